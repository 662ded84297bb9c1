"""The only file that imports private PyTorch APIs (used with torch 2.11 to 2.13)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import sympy
import torch
from torch import Tensor, fx
from torch._dynamo.exc import ShortenTraceback as ShortenTraceback
from torch._dynamo.source import AttrSource, LocalSource
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, statically_known_true
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._sympy.functions import Max as Max
from torch.utils._sympy.functions import Min as Min
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

SDPA: Callable[..., Tensor] = torch._C._nn.scaled_dot_product_attention
LINEAR: Callable[..., Tensor] = torch._C._nn.linear


def make_wrapper(
    cls: type[Tensor],
    size: Sequence[int],
    stride: Sequence[int] | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Any:
    """A tensor of class ``cls`` without storage; contiguous if ``stride`` is None.

    Never an inference tensor: under ``torch.inference_mode`` a view op may not return one for a
    normal one.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return make_wrapper(cls, size, stride, dtype, device)
    return torch.Tensor._make_wrapper_subclass(
        cls, size, strides=stride, dtype=dtype, device=device
    )


def is_traced(tensor: Tensor) -> bool:
    """True for the stand-ins that compilers trace with, which hold no data."""
    return isinstance(tensor, FakeTensor | FunctionalTensor)


def assert_async(condition: Tensor) -> None:
    """Raises if ``condition`` is False; on a GPU later, without waiting for it."""
    torch._assert_async(condition)


def mark_dynamic(tensor: Tensor, dim: int) -> None:
    """Asks Dynamo to give dimension ``dim`` a symbol at first sight.

    What ``torch._dynamo.maybe_mark_dynamic`` does, without its mirroring on inner tensors, whose
    dimensions mean something else here.
    """
    tensor._dynamo_weak_dynamic_indices = {dim}  # type: ignore[attr-defined]
    tensor._has_dynamo_dim_marking = True  # type: ignore[attr-defined]


def source_name(node: fx.Node) -> str:
    """Where Dynamo read a placeholder from, e.g. ``L['past_key_values'].layers[0].keys``."""
    source = getattr(node, "_dynamo_source", None)
    if source is None:
        return ""
    name = source.name
    return cast(str, name() if callable(name) else name)


def copy_source(old: fx.Node, new: fx.Node) -> None:
    """Gives ``new`` the source of ``old``: AOTAutograd asks every placeholder for one."""
    if hasattr(old, "_dynamo_source"):
        new._dynamo_source = old._dynamo_source


def copy_graph_facts(old: fx.GraphModule, new: fx.GraphModule) -> None:
    """Gives ``new`` what Dynamo tells AOTAutograd of ``old`` beside its nodes: without it, no
    weight counts as a static input."""
    for name in ("_param_name_to_source", "_source_to_user_stacks"):
        if hasattr(old, name):
            setattr(new, name, getattr(old, name))


def mark_static_input(node: fx.Node) -> None:
    """Tells AOTAutograd that ``node``, a placeholder, is the same memory in most calls: CUDA graphs
    may read and write it where it is."""
    facts = node.meta.get("tensor_dict", {})
    node.meta["tensor_dict"] = {**facts, "_dynamo_static_input_type": "unguarded"}


def inner_source(old: fx.Node, new: fx.Node, attribute: str) -> None:
    """Gives ``new`` the source of the inner tensor ``attribute`` of ``old``."""
    new._dynamo_source = AttrSource(old._dynamo_source, attribute)  # type: ignore[attr-defined]


def derived_source(graph: fx.Graph, new: fx.Node) -> None:
    """Gives ``new``, a placeholder that Dynamo does not know, a source of its own; none where no
    placeholder has one."""
    known = [n for n in graph.find_nodes(op="placeholder") if hasattr(n, "_dynamo_source")]
    if known:
        inner_source(known[0], new, new.name)


def fresh_size(graph: fx.Graph, like: Tensor, name: str, example: int) -> torch.SymInt:
    """A size of its own in every call of the graph, no guard on which is ever asked for as long as
    nothing but its being at least 2 is asked of it; for the size of a placeholder that Dynamo does
    not know. ``like``: a fake tensor of the graph."""
    known = [n for n in graph.find_nodes(op="placeholder") if hasattr(n, "_dynamo_source")]
    source = AttrSource(known[0]._dynamo_source, name)
    return _new_size(cast(FakeTensor, like).fake_mode, source, example)


def _new_size(mode: FakeTensorMode, source: Any, example: int) -> torch.SymInt:
    env = mode.shape_env
    assert env is not None
    symbol = env.create_symbol(example, source, DimDynamic.DYNAMIC, None)
    return cast(torch.SymInt, env.create_symintnode(symbol, hint=example, source=source))


def symbolic_mode() -> FakeTensorMode:
    """Fake tensors that may have sizes of `symbolic_size`."""
    return FakeTensorMode(shape_env=ShapeEnv())


def symbolic_size(mode: FakeTensorMode, name: str, example: int) -> torch.SymInt:
    """A size that compiled code is told at every call."""
    return _new_size(mode, LocalSource(name), example)


def divides(divisor: int, value: int | torch.SymInt) -> bool:
    """Whether ``divisor`` divides ``value`` in every call. Leaves no guard behind."""
    if isinstance(value, int):
        return value % divisor == 0
    return statically_known_true(value % divisor == 0)


def symbol_positions(graph: fx.Graph) -> dict[Any, int]:
    """Positions of the placeholders that carry the graph's symbols."""
    return {
        example.node.expr: position
        for position, node in enumerate(graph.find_nodes(op="placeholder"))
        if isinstance(example := node.meta.get("example_value"), torch.SymInt)
        and example.node.expr.is_symbol
    }


def symbol_node(graph: fx.Graph, value: int | torch.SymInt) -> int | fx.Node:
    """A node that computes ``value`` from the graph's symbol placeholders, or the plain number.

    Raises:
        KeyError: if a symbol has no placeholder.
    """
    if isinstance(value, int) or value.node.expr.is_number:
        return int(value)
    placeholders = list(graph.find_nodes(op="placeholder"))
    env = {symbol: fx.Proxy(placeholders[i]) for symbol, i in symbol_positions(graph).items()}
    node = cast(fx.Node, sympy_interp(PythonReferenceAnalysis, env, value.node.expr).node)
    node.meta["example_value"] = value
    return node


def constant(value: int | torch.SymInt) -> int | None:
    """``value`` if it is the same in every call, else None. Leaves no guard behind."""
    if isinstance(value, int):
        return value
    return int(value.node.expr) if value.node.expr.is_number else None


def same_size(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Whether two sizes are the same in every call, by their symbols. Leaves no guard behind."""
    left, right = (x if isinstance(x, int) else x.node.expr for x in (a, b))
    return bool(left == right)


def same_shape(a: Sequence[int | torch.SymInt], b: Sequence[int | torch.SymInt]) -> bool:
    """Whether two shapes are known to be equal, without adding a guard."""
    return len(a) == len(b) and all(map(same_size, a, b))


def size_expr(value: int | torch.SymInt) -> sympy.Expr:
    """``value`` over the symbols of Dynamo's graph."""
    return sympy.Integer(value) if isinstance(value, int) else value.node.expr


def symbol_bounds(value: torch.SymInt) -> dict[sympy.Symbol, tuple[int | None, int | None]]:
    """Smallest and largest value of each symbol in ``value`` that the graph's guards let through;
    None: unbounded."""
    found: dict[sympy.Symbol, tuple[int | None, int | None]] = {}
    for symbol in value.node.expr.free_symbols:
        known = value.node.shape_env.var_to_range.get(symbol)
        ends = (None, None) if known is None else (known.lower, known.upper)
        low, high = (int(end) if isinstance(end, sympy.Integer) else None for end in ends)
        found[symbol] = (low, high)
    return found


def storage_key(tensor: Tensor) -> int:
    """The same for tensors that share memory, in a compiler's stand-ins too."""
    return cast(int, tensor.untyped_storage()._cdata)


def storage_reference(tensor: Tensor) -> object:
    """Keeps `storage_key` of ``tensor`` from being given to another tensor, but no memory."""
    return StorageWeakRef(tensor.untyped_storage())


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
        self._constant = int(value) if isinstance(value, int) or value.node.expr.is_number else None
        self._expr = None if isinstance(value, int) else value.node.expr
        self._positions = positions or {}

    def __call__(self, arguments: Sequence[Any]) -> int:
        """The size for these arguments."""
        if self._constant is not None:
            return self._constant
        assert self._expr is not None
        env = {s: arguments[self._positions[s]] for s in self._expr.free_symbols}
        return int(sympy_interp(PythonReferenceAnalysis, env, self._expr))


_CUDA_GRAPHS = "triton.cudagraphs"


def inductor_modes() -> list[str]:
    """The names of Inductor's modes."""
    from torch._inductor import list_mode_options

    return list(list_mode_options())


def wants_cuda_graphs(mode: str | None) -> bool:
    """Whether a mode of Inductor asks for CUDA graphs."""
    from torch._inductor import list_mode_options

    return mode is not None and bool(list_mode_options(mode).get(_CUDA_GRAPHS))


def compile_inductor(
    module: fx.GraphModule, examples: list[Any], mode: str | None, tag: str, capture: bool = True
) -> Callable[..., Any]:
    """Inductor's callable for ``module``.

    Args:
        module: with ops that tracing replaces by their kernels.
        examples: its arguments.
        mode: of Inductor.
        tag: stands for what those kernels are; Inductor's caches know a graph by its ops only.
        capture: whether CUDA graphs may replay it.
    """
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx
    from torch.compiler import config

    patches = dict(list_mode_options(mode)) if mode else {}
    if not capture:
        patches[_CUDA_GRAPHS] = False
    tag = f"{config.cache_key_tag}{tag}"
    with config.patch(cache_key_tag=tag):  # type: ignore[attr-defined]
        return cast(
            Callable[..., Any], compile_fx(module, examples, config_patches=patches or None)
        )


def load_cpp(source: str, flags: Sequence[str]) -> Any:
    """The library compiled from C++ ``source`` with Inductor's compiler, kept in its cache.

    Args:
        source: with ``extern "C"`` functions.
        flags: behind Inductor's own, so that they win.
    """
    from torch._inductor.codecache import CppCodeCache

    return CppCodeCache.load(source, extra_flags=tuple(flags))


CPP_PROBLEMS = ("no C++ compiler was found", "the C++ compiler refuses generated code")


def cpp_problem(error: BaseException) -> str | None:
    """Which of `CPP_PROBLEMS` the error is, if any.

    Inductor of torch 2.11 writes masks of a dynamic length in C++ that does not compile.
    """
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, InvalidCxxCompiler):
            return CPP_PROBLEMS[0]
        if isinstance(cause, CppCompileError):
            return CPP_PROBLEMS[1]
        cause = getattr(cause, "inner_exception", None) or cause.__cause__
    return None


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


def many_graphs() -> Any:
    """A context in which Dynamo compiles a function as often as it is asked to."""
    return torch._dynamo.config.patch(recompile_limit=2**16)


def graph_counts() -> tuple[int, int]:
    """Graphs that Dynamo has compiled in this process, and graph breaks."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"]), sum(counters["graph_break"].values())


def is_subclass(tensor: Tensor) -> bool:
    """Whether ``tensor`` wraps others, as quantized and distributed ones do."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return is_traceable_wrapper_subclass(tensor)
