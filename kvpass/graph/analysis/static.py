"""Finds updates of static caches: new keys or values written into a buffer of fixed length."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.fx import Graph, Node

from kvpass._torch_sizes import same_size
from kvpass.graph.analysis.effects import node_number
from kvpass.graph.analysis.updates import is_cache_tensor, last_tokens, token_slice
from kvpass.graph.pattern import Miss
from kvpass.graph.spellings import argument, op_name
from kvpass.tensor.packed import PackedKV


@dataclass(frozen=True)
class StaticUpdate:
    """``buffer.index_copy_(2, arange(n) + counter, new)``; attention reads the buffer.

    Or, where a static window is full or gets full, ``buffer.copy_`` of its last tokens followed by
    the new ones; attention reads the buffer, or those together.

    Attributes:
        write: the node.
        buffer: a placeholder, or zeros that the graph returns.
        past: the buffer where it is a packed placeholder, else None.
        new: the keys or values to write, ``[B, H, n, D]``.
        room: tokens that there is room for.
        positions: ``[n]``, the slots that are written; None for a window.
        counter: the placeholder of a number on the device: how many tokens are written; None for a
            window.
        filled: how many tokens a window holds before; None if that does not matter.
        slices: reads of the first ``n`` tokens of a buffer of zeros: the new ones.
        reads: what attention reads in place of the buffer.
        dead: what is computed for the write alone.
        plain: whether the buffer is a plain placeholder.
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

    @property
    def born(self) -> bool:
        """Whether the graph makes the buffer."""
        return self.past is None and not self.plain


def static_updates(graph: Graph) -> dict[Node, StaticUpdate | Miss]:
    """The writes into static caches, by node."""
    completed = {"index_copy_": _at_positions, "copy_": _window}
    found: dict[Node, StaticUpdate | Miss] = {}
    for node in graph.nodes:
        name = op_name(node)
        begun = _begun(node) if name in completed else None
        if begun is not None:
            found[node] = completed[name](begun) if isinstance(begun, StaticUpdate) else begun
    return found


def _begun(write: Node) -> StaticUpdate | Miss | None:
    """What the buffer that is written says of the update, whose ``new`` is all that is written;
    None if it is no cache's buffer."""
    buffer, *dim, content = write.args[0], *write.args[1:2], write.args[-1]
    if op_name(write) == "index_copy_" and (len(write.args) != 4 or dim[0] not in (2, -2)):
        return None
    if write.kwargs or not isinstance(buffer, Node) or not isinstance(content, Node):
        return None
    example, born = buffer.meta["example_value"], op_name(buffer) == "zeros"
    if example.dim() != 4 or not (born or is_cache_tensor(buffer)):
        return None
    # Where Dynamo has made the buffer's length a symbol, this fixes it for the graph.
    if (room := int(example.shape[2])) < 2:
        return Miss("the static buffer has room for a single token", buffer)
    if write.users:
        return Miss("the result of the write is read", write)
    packed = isinstance(example, PackedKV)
    past, plain = buffer if packed else None, not packed and not born
    return StaticUpdate(write, buffer, past, content, room, plain=plain)


def _at_positions(begun: StaticUpdate) -> StaticUpdate | Miss:
    positions, count = begun.write.args[2], begun.new.meta["example_value"].shape[2]
    assert isinstance(positions, Node)
    counter = _counter(positions, count)
    if counter is None:
        reason = "the positions that are written are not known to follow the last ones"
        return Miss(reason, begun.write)
    slices = tuple(u for u in begun.buffer.users if begun.born and _is_first(u, count))
    return replace(begun, positions=positions, counter=counter, slices=slices, reads=slices)


def _window(begun: StaticUpdate) -> StaticUpdate | Miss:
    """A write of a whole buffer: what a window of its length shows after new tokens."""
    content = begun.new
    last = last_tokens(content)
    source = content if last is None else argument(content, "input")
    if last == begun.room and (begun.born or (begun.past and op_name(source) != "cat")):
        # A prompt as long as the window or longer, the first one or after a reset: attention reads
        # it, not the buffer.
        filled = None if begun.born else 0
        return replace(begun, new=source, filled=filled, reads=(source,), dead=(content,))
    if not begun.born and op_name(content) == "roll":
        return _rolled(begun)
    if not begun.born and last == begun.room and op_name(source) == "cat":
        return _joined(begun, source)
    return Miss("the static buffer is overwritten in an unknown way", begun.write)


def _rolled(begun: StaticUpdate) -> StaticUpdate | Miss:
    """``x = buffer.roll(-1, dims=-2); x[:, :, [-1]] = new; buffer.copy_(x)``."""
    content = begun.new
    dims = content.kwargs.get("dims", content.args[2] if len(content.args) > 2 else None)
    sets = [u for u in content.users if op_name(u) == "setitem"]
    rolled = content.args[:2] == (begun.buffer, -1) and dims in (-2, 2) and len(content.users) == 2
    if not rolled or len(sets) != 1 or not _sets_last(sets[0]):
        return Miss("the static buffer is rolled in an unknown way", begun.write)
    new = sets[0].args[2]
    assert isinstance(new, Node)
    if new.meta["example_value"].shape[2] != 1:
        return Miss("the static buffer is rolled by one for several tokens", begun.write)
    return replace(begun, new=new, filled=begun.room, dead=(sets[0], content))


def _sets_last(node: Node) -> bool:
    """Whether ``node`` is ``x[:, :, torch.tensor([-1])] = ...``."""
    index = node.args[1]
    if not isinstance(index, tuple) or len(index) != 3 or not isinstance(index[2], Node):
        return False
    last = op_name(index[2]) == "tensor" and index[2].args == ([-1],)
    return last and list(index[:2]) == [slice(None)] * 2


def _joined(begun: StaticUpdate, joined: Node) -> StaticUpdate | Miss:
    """``buffer.copy_(cat([buffer[:, :, a:b], new])[:, :, -room:])``: all that is written but, in a
    full window, the oldest."""
    parts, filled = argument(joined, "tensors"), None
    if argument(joined, "dim") in (2, -2) and len(parts) == 2:
        tokens = token_slice(parts[0])
        if tokens is not None and argument(parts[0], "input") is begun.buffer:
            # All but the oldest of a full window, or as many as are written.
            full = (tokens.start, tokens.stop) == (1, None)
            filled = begun.room if full else None if tokens.start else node_number(tokens.stop)
    if filled is None:
        return Miss("the static buffer is joined with new tokens in an unknown way", begun.write)
    return replace(begun, new=parts[1], filled=filled, reads=(joined,), dead=(begun.new,))


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
        offset = argument(offset, "input")
    example = offset.meta.get("example_value")
    scalar = isinstance(example, Tensor) and example.dim() == 0
    return offset if offset.op == "placeholder" and scalar else None


def _is_first(node: Node, count: int | torch.SymInt) -> bool:
    """Whether ``node`` is ``x[:, :, :count, :]``."""
    tokens = token_slice(node)
    stop = None if tokens is None or tokens.start is not None else node_number(tokens.stop)
    return stop is not None and same_size(stop, count)
