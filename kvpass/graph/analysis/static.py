"""Finds updates of static caches: new keys or values written into a buffer of fixed length."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.fx import Graph, Node

from kvpass._torch import same_size
from kvpass.graph.analysis.updates import is_cache_tensor, last_tokens, size_of, token_slice
from kvpass.graph.pattern import Miss, argument, op_name
from kvpass.tensor.packed import PackedKV


@dataclass(frozen=True)
class StaticUpdate:
    """``buffer.index_copy_(2, arange(n) + counter, new)``; attention reads the buffer.

    Or, where a static window is full or gets full, ``buffer.copy_`` of its last tokens followed by
    the new ones; attention reads the buffer, or those together.

    Attributes:
        write: the node.
        buffer: a placeholder, or zeros that the graph returns.
        past: the buffer where it is a packed placeholder; None where the cache is still empty, or
            plain.
        plain: whether the buffer is a plain placeholder.
        new: the keys or values to write, ``[B, H, n, D]``.
        room: tokens that there is room for.
        positions: ``[n]``, the slots that are written; None for a window.
        counter: the placeholder of a number on the device: how many tokens are written; None for a
            window.
        filled: how many tokens a window holds before; None if that does not matter.
        slices: reads of the first ``n`` tokens of a buffer of zeros: the new ones.
        reads: what attention reads in place of the buffer.
        dead: what is computed for the write alone.
    """

    write: Node
    buffer: Node
    past: Node | None
    new: Node
    room: int
    positions: Node | None = None
    counter: Node | None = None
    filled: int | torch.SymInt | None = None
    slices: tuple[Node, ...] = ()
    reads: tuple[Node, ...] = ()
    dead: tuple[Node, ...] = ()
    plain: bool = False


def static_updates(graph: Graph) -> dict[Node, StaticUpdate | Miss]:
    """By node that writes."""
    writers = {"index_copy_": _static_update, "copy_": _window_update}
    found = {n: writers[op_name(n)](n) for n in graph.nodes if op_name(n) in writers}
    return {node: update for node, update in found.items() if update is not None}


Kind = Literal["packed", "plain", "born"]


def _kind(write: Node) -> Miss | Kind | None:
    """Whether the buffer that is written is packed, plain, or made by the graph; None if it is no
    cache's at all."""
    buffer = write.args[0]
    assert isinstance(buffer, Node)
    example = buffer.meta["example_value"]
    born = op_name(buffer) == "zeros"
    if example.dim() != 4 or not (born or is_cache_tensor(buffer)):
        return None
    # Where Dynamo has made the buffer's length a symbol, this fixes it for the graph.
    if int(example.shape[2]) < 2:
        return Miss("the static buffer has room for a single token", buffer)
    if write.users:
        return Miss("the result of the write is read", write)
    return "born" if born else "packed" if isinstance(example, PackedKV) else "plain"


def _static_update(write: Node) -> StaticUpdate | Miss | None:
    if len(write.args) != 4 or write.kwargs or write.args[1] not in (2, -2):
        return None
    kind = _kind(write)
    if not isinstance(kind, str):
        return kind
    buffer, _, positions, new = write.args
    assert isinstance(buffer, Node)
    assert isinstance(new, Node)
    assert isinstance(positions, Node)
    room, count = int(buffer.meta["example_value"].shape[2]), new.meta["example_value"].shape[2]
    counter = _counter(positions, count)
    if counter is None:
        return Miss("the positions that are written are not known to follow the last ones", write)
    slices = tuple(u for u in buffer.users if kind == "born" and _is_first(u, count))
    past, plain = buffer if kind == "packed" else None, kind == "plain"
    return StaticUpdate(
        write, buffer, past, new, room, positions, counter, None, slices, slices, plain=plain
    )


def _window_update(write: Node) -> StaticUpdate | Miss | None:
    """A write of a whole buffer: what a window of its length shows after new tokens."""
    if len(write.args) != 2 or write.kwargs or not isinstance(write.args[0], Node):
        return None
    kind = _kind(write)
    if not isinstance(kind, str):
        return kind
    buffer, content = write.args
    assert isinstance(buffer, Node)
    assert isinstance(content, Node)
    room = int(buffer.meta["example_value"].shape[2])
    last = last_tokens(content)
    source = content.args[0] if last is not None else content
    assert isinstance(source, Node)
    found: StaticUpdate | Miss = Miss("the static buffer is overwritten in an unknown way", write)
    if kind == "born" and last == room:
        # A first prompt as long as the window or longer: attention reads it, not the buffer.
        found = StaticUpdate(write, buffer, None, source, room, reads=(source,), dead=(content,))
    elif kind == "packed" and last == room and op_name(source) != "cat":
        # The same after a reset.
        found = StaticUpdate(
            write, buffer, buffer, source, room, filled=0, reads=(source,), dead=(content,)
        )
    elif kind != "born" and op_name(content) == "roll":
        found = _rolled(write, buffer, content, room)
    elif kind != "born" and last == room and op_name(source) == "cat":
        found = _joined(write, buffer, content, source, room)
    if kind == "plain" and isinstance(found, StaticUpdate):
        return replace(found, past=None, plain=True)
    return found


def _rolled(write: Node, buffer: Node, content: Node, room: int) -> StaticUpdate | Miss:
    """``x = buffer.roll(-1, dims=-2); x[:, :, [-1]] = new; buffer.copy_(x)``."""
    dims = content.kwargs.get("dims", content.args[2] if len(content.args) > 2 else None)
    sets = [u for u in content.users if op_name(u) == "setitem"]
    rolled = content.args[:2] == (buffer, -1) and dims in (-2, 2) and len(content.users) == 2
    if not rolled or len(sets) != 1 or not _sets_last(sets[0]):
        return Miss("the static buffer is rolled in an unknown way", write)
    new = sets[0].args[2]
    assert isinstance(new, Node)
    if new.meta["example_value"].shape[2] != 1:
        return Miss("the static buffer is rolled by one for several tokens", write)
    return StaticUpdate(write, buffer, buffer, new, room, filled=room, dead=(sets[0], content))


def _sets_last(node: Node) -> bool:
    """Whether ``node`` is ``x[:, :, torch.tensor([-1])] = ...``."""
    index = node.args[1]
    if not isinstance(index, tuple) or len(index) != 3 or not isinstance(index[2], Node):
        return False
    last = op_name(index[2]) == "tensor" and index[2].args == ([-1],)
    return last and list(index[:2]) == [slice(None)] * 2


def _joined(
    write: Node, buffer: Node, content: Node, joined: Node, room: int
) -> StaticUpdate | Miss:
    """``buffer.copy_(cat([buffer[:, :, a:b], new])[:, :, -room:])``: all that is written but, in a
    full window, the oldest."""
    parts = argument(joined, "tensors")
    dim = argument(joined, "dim")
    miss = Miss("the static buffer is joined with new tokens in an unknown way", write)
    if dim not in (2, -2) or len(parts) != 2:
        return miss
    old, new = parts
    tokens = token_slice(old)
    if tokens is None or old.args[0] is not buffer:
        return miss
    # All but the oldest of a full window, or as many as are written.
    filled = size_of(tokens.stop) if tokens.start is None else None
    filled = room if (tokens.start, tokens.stop) == (1, None) else filled
    if filled is None:
        return miss
    return StaticUpdate(
        write, buffer, buffer, new, room, filled=filled, reads=(joined,), dead=(content,)
    )


def _counter(positions: Node, count: int | torch.SymInt) -> Node | None:
    """``c``, a placeholder of a number, if ``positions`` is ``arange(count) + c``."""
    if op_name(positions) != "add":
        return None
    steps, offset = argument(positions, "input"), argument(positions, "other")
    if op_name(steps) != "arange":
        steps, offset = offset, steps
    if op_name(steps) != "arange" or len(steps.args) != 1 or not isinstance(offset, Node):
        return None
    if not same_size(steps.meta["example_value"].shape[0], count):
        return None
    while op_name(offset) == "to":
        offset = offset.args[0]
    example = offset.meta.get("example_value")
    scalar = isinstance(example, Tensor) and example.dim() == 0
    return offset if offset.op == "placeholder" and scalar else None


def _is_first(node: Node, count: int | torch.SymInt) -> bool:
    """Whether ``node`` is ``x[:, :, :count, :]``."""
    tokens = token_slice(node)
    if tokens is None or tokens.start is not None:
        return False
    stop = size_of(tokens.stop)
    return stop is not None and same_size(stop, count)
