"""What is imported of private PyTorch APIs (used with torch 2.11 to 2.15), but for sizes
(`kvpass._torch_sizes`), Inductor (`kvpass._torch_inductor`), compiling C++ (`kvpass._torch_cpp`),
keeping what was compiled (`kvpass._torch_libraries`) and simulating a GPU
(`kvpass._torch_gpu`)."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch._dynamo.exc import ShortenTraceback as ShortenTraceback
from torch._dynamo.source import (
    AttrSource,
    TensorProperty,
    TensorPropertySource,
)
from torch._dynamo.utils import compilation_time_metrics
from torch._guards import detect_fake_mode
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only

from kvpass._torch_sizes import new_size

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
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return make_wrapper(cls, size, stride, like, dtype)
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


def copy_module(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy to work on: Dynamo reads its own placeholders after the backend has returned."""
    mapping: dict[Any, Any] = {}
    graph = fx.Graph()
    output = graph.graph_copy(gm.graph, mapping)
    graph.output(output)
    for old, new in mapping.items():
        copy_source(old, new)
        # A weak reference to the real argument, which Dynamo drops after compilation.
        new.meta.pop("grapharg", None)
    # Most copies are for reports, and nobody asks for their code.
    copied = _LazyGraphModule(gm, graph)
    copied.meta = dict(gm.meta)
    # What Dynamo says beside nodes: without it, no weight counts as a static input.
    for name in ("_param_name_to_source", "_source_to_user_stacks"):
        if hasattr(gm, name):
            setattr(copied, name, getattr(gm, name))
    return copied


def compiling_mode() -> FakeTensorMode | None:
    """The mode of the stand-ins of the compilation that goes on, if there is one with sizes that
    differ from call to call."""
    mode: FakeTensorMode | None = detect_fake_mode()
    return None if mode is None or mode.shape_env is None else mode


def mark_static_input(node: fx.Node) -> None:
    """Marks ``node``, a placeholder, as the same memory in most calls: CUDA graphs may read and
    write it where it is."""
    facts = node.meta.get("tensor_dict", {})
    node.meta["tensor_dict"] = {**facts, "_dynamo_static_input_type": "unguarded"}


def inner_source(old: fx.Node, new: fx.Node, attribute: str) -> None:
    """Gives ``new`` the source of the inner tensor ``attribute`` of ``old``."""
    new._dynamo_source = AttrSource(old._dynamo_source, attribute)  # type: ignore[attr-defined]


def inner_example(
    node: fx.Node,
    shape: Sequence[int | torch.SymInt | None],
    dtype: torch.dtype,
    like: Tensor,
    example: int,
) -> Tensor:
    """A contiguous stand-in for the placeholder ``node``, a tensor that Dynamo does not know.

    Args:
        node: with a source of its own (`inner_source`).
        shape: None is a size of its own in every call, of at least 2. It has no guards but those
            that code asks for.
        dtype: of the tensor.
        like: a fake tensor of the graph on the same device.
        example: for those sizes.
    """
    mode, source = cast(FakeTensor, like).fake_mode, node._dynamo_source  # type: ignore[attr-defined]
    sizes = [
        new_size(mode, TensorPropertySource(source, TensorProperty.SIZE, dim), example)
        if size is None
        else size
        for dim, size in enumerate(shape)
    ]
    with unkept(like):
        return like.new_empty(sizes, dtype=dtype)


def unkept(like: Tensor) -> AbstractContextManager[object]:
    """Shapes that ops on stand-ins in the mode of ``like`` give are not kept for later ones: where
    each stand-in has sizes of its own, looking for them takes most of the time."""
    return patch.object(cast(FakeTensor, like).fake_mode, "cache_enabled", False)


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
    size = new_size(mode, source, example)
    # Inductor asks whether kernels can take it in 32 bits.
    assert mode.shape_env is not None
    mode.shape_env.constrain_symbol_range(size.node.expr, 2, _LARGEST)
    return size


def storage_key(tensor: Tensor) -> int:
    """The same for tensors that share memory, in a compiler's stand-ins too."""
    return cast(int, tensor.untyped_storage()._cdata)


def unbatched(tensor: Tensor) -> Tensor:
    """The tensor that one inside `torch.vmap`, which has no memory of its own, stands for."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


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


def process_group(name: str) -> Any:
    """The process group of ``torch.distributed`` with this name."""
    return cast(Any, torch.distributed.distributed_c10d)._resolve_process_group(name)


def all_gathered(x: Tensor, size: int, group: str) -> Tensor:
    """``x`` of all ``size`` processes of the process group with this name, one behind the other
    along the first dimension: a functional collective, which compiled graphs contain."""
    # It registers the shapes.
    import torch.distributed._functional_collectives

    collectives = torch.ops._c10d_functional
    gathered = collectives.all_gather_into_tensor.default(x.contiguous(), size, group)
    return cast(Tensor, collectives.wait_tensor.default(gathered))


def is_subclass(tensor: Tensor) -> bool:
    """Whether ``tensor`` wraps others, as quantized and distributed ones do."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return is_traceable_wrapper_subclass(tensor)


def inner_names(tensor: Tensor) -> list[str]:
    """The dotted names of the plain tensors that a tensor wraps, if it is a subclass."""
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    found = [(name, getattr(tensor, name)) for name in names]
    return [
        f"{name}.{more}" if more else name
        for name, x in found
        for more in (inner_names(x) if is_subclass(x) else [""])
    ]
