"""What is imported of private PyTorch APIs (used with torch 2.11 to 2.13), but for compiling C++
(`kvpass._torch_cpp`) and simulating a GPU (`kvpass._torch_gpu`)."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any, cast

import sympy
import torch
from torch import Tensor, fx
from torch._dynamo.exc import ShortenTraceback as ShortenTraceback
from torch._dynamo.source import AttrSource, LocalSource
from torch._dynamo.utils import compilation_time_metrics
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, statically_known_true
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._sympy.functions import Max as Max
from torch.utils._sympy.functions import Min as Min
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.reference import PythonReferenceAnalysis

SDPA: Callable[..., Tensor] = torch._C._nn.scaled_dot_product_attention
LINEAR: Callable[..., Tensor] = torch._C._nn.linear


def make_wrapper(
    cls: type[Tensor],
    size: Sequence[int],
    stride: Sequence[int] | None,
    like: Tensor,
    dtype: torch.dtype,
) -> Any:
    """A tensor of class ``cls`` without storage, on the device of ``like``; contiguous if
    ``stride`` is None.

    Never an inference tensor: under ``torch.inference_mode`` a view op may not return one for a
    normal one.
    """
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
        return torch.Tensor._make_wrapper_subclass(
            cls, size, strides=stride, dtype=dtype, device=like.device
        )


def is_traced(tensor: Tensor) -> bool:
    """True for the stand-ins that compilers trace with, which hold no data."""
    return isinstance(tensor, FakeTensor | FunctionalTensor)


def compile_seconds() -> tuple[float, float]:
    """Seconds that Dynamo has spent in this process, without backends, and those of the
    backends."""
    spent = compilation_time_metrics
    every = sum(spent.get("_compile.compile_inner", ()))
    backend = sum(spent.get("OutputGraph.call_user_compiler", ()))
    return every - backend, backend


# Raises if a tensor is False; on a GPU later, without waiting for it.
assert_async: Callable[[Tensor], None] = torch._assert_async


def mark_dynamic(tensor: Tensor, dim: int) -> None:
    """Asks Dynamo to give dimension ``dim`` a symbol at first sight.

    What ``torch._dynamo.maybe_mark_dynamic`` does, without its mirroring on inner tensors, whose
    dimensions mean something else here.
    """
    tensor._dynamo_weak_dynamic_indices = {dim}  # type: ignore[attr-defined]
    tensor._has_dynamo_dim_marking = True  # type: ignore[attr-defined]


def source_name(node: fx.Node) -> str:
    """The origin of a placeholder in Dynamo, e.g. ``L['past_key_values'].layers[0].keys``."""
    name = getattr(getattr(node, "_dynamo_source", None), "name", "")
    return cast(str, name() if callable(name) else name)


def copy_source(old: fx.Node, new: fx.Node) -> None:
    """Gives ``new`` the source of ``old``: AOTAutograd asks every placeholder for one."""
    if hasattr(old, "_dynamo_source"):
        new._dynamo_source = old._dynamo_source


def copy_graph_facts(old: fx.GraphModule, new: fx.GraphModule) -> None:
    """Gives ``new`` the facts for AOTAutograd that Dynamo attached to ``old`` beside its nodes:
    without them, no weight counts as a static input."""
    for name in ("_param_name_to_source", "_source_to_user_stacks"):
        if hasattr(old, name):
            setattr(new, name, getattr(old, name))


def mark_static_input(node: fx.Node) -> None:
    """Marks ``node``, a placeholder, as the same memory in most calls: CUDA graphs may read and
    write it where it is."""
    facts = node.meta.get("tensor_dict", {})
    node.meta["tensor_dict"] = {**facts, "_dynamo_static_input_type": "unguarded"}


def inner_source(old: fx.Node, new: fx.Node, attribute: str) -> None:
    """Gives ``new`` the source of the inner tensor ``attribute`` of ``old``."""
    new._dynamo_source = AttrSource(old._dynamo_source, attribute)  # type: ignore[attr-defined]


def derived_source(graph: fx.Graph, new: fx.Node) -> None:
    """Gives ``new``, a placeholder that Dynamo does not know, a source of its own; none where no
    placeholder has one."""
    if known := _known_placeholders(graph):
        inner_source(known[0], new, new.name)


def _known_placeholders(graph: fx.Graph) -> list[Any]:
    return [n for n in graph.find_nodes(op="placeholder") if hasattr(n, "_dynamo_source")]


# Larger than any prompt is long.
_LARGEST = 1 << 20


def fresh_size(graph: fx.Graph, like: Tensor, name: str, example: int) -> torch.SymInt:
    """A size of its own in every call of the graph, for a placeholder that Dynamo does not know. No
    guard is put on it, as long as code relies on nothing but its being at least 2 and at most
    `_LARGEST`. ``like``: a fake tensor of the graph."""
    source = AttrSource(_known_placeholders(graph)[0]._dynamo_source, name)
    mode = cast(FakeTensor, like).fake_mode
    size = _new_size(mode, source, example)
    # Inductor asks whether kernels can take it in 32 bits.
    assert mode.shape_env is not None
    mode.shape_env.constrain_symbol_range(size.node.expr, 2, _LARGEST)
    return size


def _new_size(mode: FakeTensorMode, source: Any, example: int) -> torch.SymInt:
    env = mode.shape_env
    assert env is not None
    symbol = env.create_symbol(example, source, DimDynamic.DYNAMIC, None)
    return cast(torch.SymInt, env.create_symintnode(symbol, hint=example, source=source))


def symbolic_mode() -> FakeTensorMode:
    """Fake tensors that may have sizes of `symbolic_size`."""
    return FakeTensorMode(shape_env=ShapeEnv())


def symbolic_size(mode: FakeTensorMode, name: str, example: int) -> torch.SymInt:
    """A size that compiled code takes as an argument."""
    return _new_size(mode, LocalSource(name), example)


def divides(divisor: int, value: int | torch.SymInt) -> bool:
    """Whether ``divisor`` divides ``value`` in every call. Leaves no guard behind."""
    return statically_known_true(value % divisor == 0)


def symbol_positions(graph: fx.Graph) -> dict[Any, int]:
    """Positions of the placeholders that carry the graph's symbols."""
    examples = [n.meta.get("example_value") for n in graph.find_nodes(op="placeholder")]
    return {
        example.node.expr: position
        for position, example in enumerate(examples)
        if isinstance(example, torch.SymInt) and example.node.expr.is_symbol
    }


def symbol_node(graph: fx.Graph, value: int | torch.SymInt) -> int | fx.Node:
    """A node that computes ``value`` from the graph's symbol placeholders, or the plain number.

    Raises:
        KeyError: if a symbol has no placeholder.
    """
    if (number := constant(value)) is not None:
        return number
    placeholders = list(graph.find_nodes(op="placeholder"))
    env = {symbol: fx.Proxy(placeholders[i]) for symbol, i in symbol_positions(graph).items()}
    proxy = sympy_interp(PythonReferenceAnalysis, env, size_expr(value))
    node: fx.Node = proxy.node
    node.meta["example_value"] = value
    return node


# None of these leaves a guard behind.


def size_expr(value: int | torch.SymInt) -> sympy.Expr:
    """``value`` over the symbols of Dynamo's graph."""
    return sympy.Integer(value) if isinstance(value, int) else value.node.expr


def symbols_of(value: Any) -> set[sympy.Symbol]:
    """The symbols in a number."""
    return set(value.node.expr.free_symbols) if isinstance(value, torch.SymInt) else set()


def shape_symbols(tensor: Any) -> set[sympy.Symbol]:
    """The symbols in a tensor's sizes, and in strides that matter."""
    if not isinstance(tensor, Tensor):
        return set()
    strides = [s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if constant(n) != 1]
    return {symbol for number in (*tensor.shape, *strides) for symbol in symbols_of(number)}


def constant(value: int | torch.SymInt) -> int | None:
    """``value`` if it is the same in every call, else None."""
    expr = size_expr(value)
    return int(expr) if expr.is_number else None


def same_size(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Whether two sizes are known to be the same in every call."""
    return bool(size_expr(a) == size_expr(b))


def same_shape(a: Sequence[int | torch.SymInt], b: Sequence[int | torch.SymInt]) -> bool:
    """Whether two shapes are known to be equal."""
    return len(a) == len(b) and all(map(same_size, a, b))


def symbol_bounds(value: torch.SymInt) -> dict[sympy.Symbol, tuple[int | None, int | None]]:
    """Smallest and largest value of each symbol in ``value`` that the graph's guards let through;
    None: unbounded."""
    found: dict[sympy.Symbol, tuple[int | None, int | None]] = {}
    for symbol in symbols_of(value):
        known = value.node.shape_env.var_to_range.get(symbol)
        ends = (None, None) if known is None else (known.lower, known.upper)
        low, high = (int(end) if isinstance(end, sympy.Integer) else None for end in ends)
        found[symbol] = (low, high)
    return found


def storage_key(tensor: Tensor) -> int:
    """The same for tensors that share memory, in a compiler's stand-ins too."""
    return cast(int, tensor.untyped_storage()._cdata)


def written_arguments(target: Any) -> set[int | str] | None:
    """Positions and names of the arguments that an operator of ``torch.ops`` writes to; None if
    ``target`` is no such operator."""
    if isinstance(target, OpOverloadPacket):
        overloads = [getattr(target, name) for name in target.overloads()]
    elif isinstance(target, OpOverload):
        overloads = [target]
    else:
        return None
    return {
        key
        for overload in overloads
        for position, argument in enumerate(overload._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
        for key in (position, argument.name)
    }


def is_higher_order(target: Any) -> bool:
    """Whether ``target`` calls functions of the graph: nothing says what it writes to."""
    return isinstance(target, HigherOrderOperator)


class Size:
    """A tensor's size as a function of the arguments that a compiled graph is called with."""

    def __init__(
        self, value: int | torch.SymInt, positions: Mapping[Any, int] | None = None
    ) -> None:
        expr = size_expr(value)
        symbols = sorted(expr.free_symbols, key=str)
        self._positions = [(positions or {})[s] for s in symbols]
        self._compute = _function_of(tuple(map(str, symbols)), PythonPrinter().doprint(expr))

    def __call__(self, arguments: Sequence[Any]) -> int:
        """The size for these arguments."""
        return int(self._compute(*[arguments[p] for p in self._positions]))


@cache
def _function_of(names: tuple[str, ...], expression: str) -> Callable[..., int]:
    # As Dynamo's guards are made: a step has several sizes for each layer, and to interpret their
    # expressions anew would take as long as attention.
    function: Callable[..., int] = eval(f"lambda {', '.join(names)}: {expression}", {"math": math})
    return function


_CUDA_GRAPHS = "triton.cudagraphs"


def inductor_modes() -> dict[str, dict[str, Any]]:
    """The options that each mode of Inductor sets."""
    from torch._inductor import list_mode_options

    return list_mode_options()


def wants_cuda_graphs(mode: str | None) -> bool:
    """Whether a mode of Inductor asks for CUDA graphs."""
    return mode is not None and bool(inductor_modes()[mode].get(_CUDA_GRAPHS))


def compile_inductor(
    module: fx.GraphModule, examples: list[Any], mode: str | None, tag: str, capture: bool = True
) -> Callable[..., Any]:
    """Inductor's callable for ``module``, which has ops that tracing replaces by their kernels.

    Args:
        module: to be called with ``examples``.
        examples: its arguments.
        mode: of Inductor.
        tag: stands for what those kernels are; Inductor's caches know a graph by its ops only.
        capture: whether CUDA graphs may replay it.
    """
    from torch._inductor.compile_fx import compile_fx
    from torch.compiler import config

    patches = {**inductor_modes()[mode]} if mode else {}
    if not capture:
        patches[_CUDA_GRAPHS] = False
    with config.patch(cache_key_tag=f"{config.cache_key_tag}{tag}"):  # type: ignore[attr-defined]
        compiled: Any = compile_fx(module, examples, config_patches=patches or None)
    return cast(Callable[..., Any], compiled)


def register_backend_once(function: Callable[..., Any]) -> None:
    """Makes ``backend="kvpass"`` known from a bare checkout, where no entry point does."""
    from torch._dynamo.backends.registry import list_backends, register_backend

    if function.__name__ not in list_backends(exclude_tags=()):
        register_backend(function)


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Shows ``text`` to tlparse and TORCH_TRACE as an artifact."""
    torch._logging._internal.trace_structured(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text
    )


def is_compiled(model: Any) -> bool:
    """Whether ``model.compile()`` was called."""
    return getattr(model, "_compiled_call_impl", None) is not None


def compile_options(model: Any) -> Mapping[str, Any] | None:
    """The options with which ``model``, or its ``forward``, is compiled by kvpass; None if it is
    not."""
    from torch._dynamo.eval_frame import innermost_backend

    for compiled in (getattr(model, "_compiled_call_impl", None), vars(model).get("forward")):
        # Dynamo keeps them for itself.
        shown = getattr(compiled, "get_compiler_config", None)
        if shown is not None:
            context = inspect.getclosurevars(shown).nonlocals["self"]
            backend: Any = innermost_backend(context.callback)
            if getattr(backend, "compiler_name", None) == "kvpass":
                return cast(Mapping[str, Any], backend.kwargs.get("options", {}))
    return None


def many_graphs() -> Any:
    """A context in which Dynamo compiles a function as often as it is asked to."""
    return torch._dynamo.config.patch(recompile_limit=2**16)


def graph_counts() -> tuple[int, int]:
    """Graphs that Dynamo has compiled in this process, and graph breaks."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"]), sum(counters["graph_break"].values())


def is_sharded(tensor: Any) -> bool:
    """Whether ``tensor`` is a ``DTensor``, of which this process may hold a part only."""
    # It takes half a second to import, and nobody has one who has not done so.
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def local_shard(tensor: Tensor) -> Tensor:
    """What this process holds of a ``DTensor``, the same object in every call; another tensor as it
    is."""
    return cast(Any, tensor)._local_tensor if is_sharded(tensor) else tensor


def shard_offset(tensor: Any) -> tuple[int, ...]:
    """Where in a ``DTensor`` its `local_shard` begins."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return offset


def default_store() -> Any:
    """The store that the processes of ``torch.distributed`` have met at."""
    return torch.distributed.distributed_c10d._get_default_store()


def is_subclass(tensor: Tensor) -> bool:
    """Whether ``tensor`` wraps others, as quantized and distributed ones do."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return is_traceable_wrapper_subclass(tensor)
