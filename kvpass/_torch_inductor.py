"""Compiling graphs with Inductor, through private PyTorch APIs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import sympy
import torch
from torch import fx
from torch._ops import OpOverload

from kvpass._torch import FakeTensor
from kvpass._torch_calls import CompiledModule
from kvpass._torch_cpp import batched_kernels, call_directly, trusted_vectors

# What compiles a graph for examples of its arguments.
Compile = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]
_CUDA_GRAPHS = "triton.cudagraphs"
# Of code that `_named_sizes` has seen to.
_NAMED = " sizes are named"
# What constants of Triton kernels may be.
_CONSTANTS = (bool, int, float, str, torch.dtype, type(None))


def inductor_modes() -> dict[str, dict[str, Any]]:
    """The options that each mode of Inductor sets."""
    from torch._inductor import list_mode_options

    return list_mode_options()


def wants_cuda_graphs(mode: str | None) -> bool:
    """Whether a mode of Inductor asks for CUDA graphs."""
    return mode is not None and bool(inductor_modes()[mode].get(_CUDA_GRAPHS))


@contextmanager
def _named_sizes() -> Iterator[None]:
    """Lets generated code name the sizes of its inputs that it needs. Where it asserts none,
    Inductor from torch 2.14 on names those only that the graph itself asks for."""
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.ir import TensorBox
    from torch._inductor.virtualized import V

    write_inputs: Any = PythonWrapperCodegen.codegen_inputs

    def write_inputs_and_sizes(self: Any) -> None:
        if (sources := getattr(V.graph, "symbolic_input_sources", None)) is not None:
            used = {s for x in V.graph.operations for s in x.get_free_symbol_uses()}
            for name, tensor in self.get_graph_inputs().items():
                if not isinstance(tensor, TensorBox):
                    continue
                numbers = [("size", *x) for x in enumerate(tensor.get_size())]
                numbers += [("stride", *x) for x in enumerate(tensor.get_stride())]
                for kind, dim, number in numbers:
                    if number in used:
                        sources.setdefault(number, (name, kind, dim))
        write_inputs(self)

    with patch.object(PythonWrapperCodegen, "codegen_inputs", write_inputs_and_sizes):
        yield


def accesses_finder() -> str | None:
    """What Inductor calls, in `torch._higher_order_ops.triton_kernel_wrap`, to find out what a
    Triton kernel reads and writes; in torch 2.11, what it writes."""
    from torch._higher_order_ops import triton_kernel_wrap

    names = ("identify_accessed_tensors", "identify_mutated_tensors")
    return next((name for name in names if hasattr(triton_kernel_wrap, name)), None)


def _known_of(argument: Any) -> Any:
    """What that finder looks at of an argument; None if it is not known what."""
    from torch._inductor.ir import TensorBox

    if isinstance(argument, FakeTensor | TensorBox):
        return "tensor", argument.dtype
    # One number stands for all of these.
    if isinstance(argument, torch.SymInt | torch.SymFloat | torch.SymBool | sympy.Expr):
        return "symbol"
    return (type(argument), argument) if isinstance(argument, _CONSTANTS) else None


@contextmanager
def _accesses_found_once() -> Iterator[None]:
    """Lets Inductor find out once what a Triton kernel reads and writes: it asks, compiling the
    kernel halfway, four times for each call of one, and all layers call the same."""
    from torch._higher_order_ops import triton_kernel_wrap

    finder = accesses_finder()
    if finder is None:
        yield
        return
    find, found = getattr(triton_kernel_wrap, finder), dict[Any, Any]()

    def find_once(kernel: Any, arguments: dict[str, Any], descriptors: dict[str, Any]) -> Any:
        from triton.runtime.autotuner import Autotuner

        if isinstance(kernel, Autotuner):
            # As `find` has it. What gives a call its number of warps is one, too.
            arguments = arguments | (kernel.configs[0].kwargs if kernel.configs else {})
            kernel = kernel.fn
        known = {name: _known_of(x) for name, x in arguments.items()}
        if descriptors or None in known.values():
            return find(kernel, arguments, descriptors)
        call = kernel, tuple(known.items())
        if call not in found:
            found[call] = find(kernel, arguments, descriptors)
        return found[call]

    with patch.object(triton_kernel_wrap, finder, find_once):
        yield


@contextmanager
def inductor(
    mode: str | None,
    tag: str,
    capture: bool = True,
    direct: Iterable[OpOverload] = (),
    modules: list[CompiledModule] | None = None,
) -> Iterator[Compile]:
    """Gives what compiles a graph, which has ops that tracing replaces by their kernels, for its
    examples. What it returns can be called when the context is left.

    Args:
        mode: of Inductor.
        tag: stands for what those kernels are; Inductor's caches know a graph by its ops only.
        capture: whether CUDA graphs may replay it.
        direct: ops that are called without PyTorch's dispatcher, see `kvpass._torch_cpp`.
        modules: gets those of the generated code.
    """
    from torch._inductor.compile_fx import compile_fx
    from torch.compiler import config

    call_directly(direct)
    # Inputs are what Dynamo's guards and `Meta` say: asked once a step, and not once more.
    patches = {"size_asserts": False, **(inductor_modes()[mode] if mode else {})}
    if not capture:
        patches[_CUDA_GRAPHS] = False
    key = f"{config.cache_key_tag}{tag}{_NAMED}"
    own = config.patch(cache_key_tag=key)  # type: ignore[attr-defined]
    with (
        own, batched_kernels() as loaded, trusted_vectors(), _named_sizes(), _accesses_found_once(),
    ):  # fmt: skip
        compiler: Any = compile_fx
        yield partial(compiler, config_patches=patches)
    if modules is not None:
        modules += loaded
