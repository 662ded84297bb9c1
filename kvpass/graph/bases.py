"""Bases of channels in a graph: their arithmetic, and the nodes that change to them.

A *basis* says what becomes of a tensor's last dimension. It is an order or a rotation:

* An order, int64, has as many dimensions as the tensor, of size one where it does not depend on
  them: ``[1, H, 1, D]`` permutes the channels of each head of ``[B, H, n, D]``.
* A rotation, floating, has orthogonal matrices in the place of the last dimension, for consecutive
  blocks of the channels: ``[1, H, 1, blocks, D / blocks, D / blocks]``; a block ``x`` becomes
  ``x @ matrix``.

It changes tensors of size one in the other dimensions as well, which it broadcasts.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.nn.functional import one_hot

from kvpass.format.channels import ChannelBasis
from kvpass.graph.logical_calls import BasisCall, WeightBasisCall

_PREFIX = "_constant_"


def is_rotation(basis: Tensor) -> bool:
    """Whether it is a rotation, not an order."""
    return basis.is_floating_point()


def of_heads(basis: ChannelBasis, heads: int | None = None) -> Tensor:
    """``basis`` on ``[B, heads, n, D]``; KV heads are repeated for the query heads."""
    repeats = 1 if heads is None else heads // basis.heads
    own = basis.tensor().repeat_interleave(repeats, dim=0)
    return own[None, :, None, None] if is_rotation(own) else own[None, :, None]


def rank(basis: Tensor) -> int:
    """How many dimensions a tensor has that it applies to."""
    return basis.dim() - 2 if is_rotation(basis) else basis.dim()


def channels(basis: Tensor) -> int:
    """The size of that tensor's last dimension."""
    return basis.shape[-3] * basis.shape[-1] if is_rotation(basis) else basis.shape[-1]


def compact(basis: Tensor) -> Tensor:
    """The same basis, with size one in all dimensions that it does not depend on."""
    for dim in range(rank(basis) - 1):
        first = basis.narrow(dim, 0, 1)
        if bool((basis == first).all()):
            basis = first
    return basis.contiguous()


def is_identity(basis: Tensor) -> bool:
    """Whether nothing changes."""
    if is_rotation(basis):
        # What is left of a rotation and its inverse is as far from one as float32 is.
        return bool((basis - torch.eye(basis.shape[-1])).abs().max() < 1e-5)
    return bool((basis == torch.arange(basis.shape[-1])).all())


def composed(first: Tensor, then: Tensor) -> Tensor:
    """The basis that changes ``x`` as ``first`` and ``then`` do, one after the other."""
    if not is_rotation(first) and not is_rotation(then):
        return compact(torch.take_along_dim(first, then, dim=-1))
    size = math.lcm(*(b.shape[-1] if is_rotation(b) else channels(b) for b in (first, then)))
    product = blocks(first, size).double() @ blocks(then, size).double()
    return compact(product.float())


def blocks(basis: Tensor, size: int) -> Tensor:
    """``basis`` as a rotation whose matrices have ``size`` rows, a multiple of what they have."""
    if not is_rotation(basis):
        basis = one_hot(basis, basis.shape[-1]).mT.float().unsqueeze(-3)
    count = size // basis.shape[-1]
    if count == 1:
        return basis
    # [..., i, j, block, block], then [..., block, i, block, j].
    wide = torch.diag_embed(basis.unflatten(-3, (-1, count)).movedim(-3, -1))
    return wide.movedim((-2, -4, -1, -3), (-4, -3, -2, -1)).flatten(-4, -3).flatten(-2)


def inverse(basis: Tensor) -> Tensor:
    """The basis that undoes ``basis``."""
    return basis.mT.contiguous() if is_rotation(basis) else basis.argsort(dim=-1)


def shared(basis: Tensor) -> Tensor:
    """A rotation without the repetitions of neighbours in one dimension, see
    `kvpass.ops.basis.rotate`: of the heads of a query that share a KV head one is left."""
    for dim in range(rank(basis) - 1):
        size = basis.shape[dim]
        for step in (n for n in range(size, 1, -1) if size % n == 0):
            part = basis.index_select(dim, torch.arange(0, size, step))
            if part.repeat_interleave(step, dim).equal(basis):
                basis = part
                break
    return basis


def transposed(basis: Tensor, dims: Sequence[int]) -> Tensor:
    """``basis`` on a tensor whose dimension ``i`` was ``dims[i]``; the last one stays."""
    return basis.permute(*dims, *range(len(dims), basis.dim()))


def embedded(basis: Tensor, start: int, total: int) -> Tensor:
    """``basis`` on the channels from ``start`` on, of ``total``; the others stay."""
    if not is_rotation(basis):
        every = torch.arange(total).expand(*basis.shape[:-1], total).clone()
        every[..., start : start + basis.shape[-1]] = basis + start
        return every
    size = basis.shape[-1]
    if start % size or total % size:
        basis = blocks(basis, channels(basis))
        size, count = total, 1
    else:
        count = total // size
    every = torch.eye(size).expand(*basis.shape[:-3], count, size, size).clone()
    if count > 1:
        every[..., start // size : start // size + basis.shape[-3], :, :] = basis
    else:
        inside = slice(start, start + basis.shape[-1])
        every[..., inside, inside] = basis
    return every


def part(basis: Tensor, start: int, stop: int) -> Tensor | None:
    """The basis of the channels ``start ... stop``; None if they mix with others."""
    if not is_rotation(basis):
        inside = basis[..., start:stop] - start
        if bool(((inside < 0) | (inside >= stop - start)).any()):
            return None
        return compact(inside)
    size = basis.shape[-1]
    if start % size == 0 and stop % size == 0:
        return compact(basis[..., start // size : stop // size, :, :])
    rows = blocks(basis, channels(basis))[..., start:stop, :]
    mixed = rows[..., :start].any() or rows[..., stop:].any()
    return None if mixed else compact(rows[..., start:stop])


def leaves(basis: Tensor, chosen: Sequence[int]) -> bool:
    """Whether these channels stay as and where they are."""
    if is_rotation(basis):
        rows = blocks(basis, channels(basis)).squeeze(-3)[..., chosen, :]
        return bool((rows == torch.eye(channels(basis))[chosen]).all())
    kept = torch.tensor(chosen, dtype=torch.int64)
    return bool((basis[..., kept] == kept).all())


def merged(basis: Tensor, sizes: Sequence[int]) -> Tensor | None:
    """The flat basis that does to ``prod(sizes)`` channels what ``basis`` does to their view as
    ``[..., *sizes]``, see `flat`; None if it depends on the other dimensions, too."""
    outside = rank(basis) - len(sizes)
    if any(size != 1 for size in basis.shape[:outside]):
        return None
    inner = basis.reshape(basis.shape[outside:])
    if is_rotation(basis):
        return inner.expand(*sizes[:-1], *basis.shape[-3:]).flatten(0, -3)
    every = torch.arange(math.prod(sizes)).view(*sizes)
    return torch.take_along_dim(every, inner.expand(*sizes), dim=-1).flatten()


def flat(basis: Tensor) -> Tensor | None:
    """``basis`` of a vector: an order ``[C]``, or a rotation ``[blocks, C / blocks, C / blocks]``;
    None if it depends on other dimensions than the last."""
    return merged(basis, [channels(basis)])


def on_rank(basis: Tensor, dims: int) -> Tensor:
    """A flat ``basis`` on tensors of so many dimensions."""
    return basis.view(*[1] * (dims - 1), *basis.shape)


def basis_of(node: Node) -> Tensor:
    """The basis that the channels of ``node``, or the entries of a weight, are brought to."""
    call = BasisCall.of(node) or WeightBasisCall.at(node)
    return constant_value(call.basis)


def constant_value(basis: Node) -> Tensor:
    """The tensor, on the CPU, of a ``get_attr`` node that `constant_node` made."""
    return _owner(basis.graph).get_buffer(str(basis.target))


def constant_node(graph: Graph, index: Tensor, device: torch.device) -> Node:
    """The constant ``index``, on the CPU, for a device: one node for all that are equal. It is
    brought there when it becomes an argument."""
    owner = _owner(graph)
    text = f"{tuple(index.shape)} {index.dtype} {device}".encode() + index.numpy().tobytes()
    name = f"{_PREFIX}{hashlib.sha256(text).hexdigest()[:16]}"
    known: list[Node] = [n for n in graph.find_nodes(op="get_attr") if n.target == name]
    if known:
        return known[0]
    owner.register_buffer(name, index, persistent=False)
    with graph.inserting_before(_first_op(graph)):
        node = graph.get_attr(name)
    node.meta |= {"example_value": index, "device": device}
    return node


def constant_beside(graph: Graph, value: Tensor, x: Node) -> Node:
    """The constant ``value`` on the device of ``x``, for a call that gets both."""
    example = x.meta["example_value"]
    node = constant_node(graph, value, example.device)
    node.meta["example_value"] = example.new_empty(value.shape, dtype=value.dtype)
    return node


def drop_constants(graph: Graph) -> None:
    """Takes all constants from the graph's module: none is read any more."""
    owner = _owner(graph)
    for node in [n for n in graph.find_nodes(op="get_attr") if is_constant(n)]:
        graph.erase_node(node)
    for name in [n for n, _ in owner.named_buffers() if n.startswith(_PREFIX)]:
        delattr(owner, name)


def _owner(graph: Graph) -> GraphModule:
    assert graph.owning_module is not None
    return graph.owning_module


def is_constant(node: Node) -> bool:
    """Whether `constant_node` made ``node``."""
    return node.op == "get_attr" and str(node.target).startswith(_PREFIX)


def in_basis(x: Node, basis: Tensor, direction: str = "up", before: Node | None = None) -> Node:
    """``x`` with its channels in another basis; ``x`` if nothing changes.

    Args:
        x: a tensor of the graph.
        basis: see the module's docstring.
        direction: where the change is to be moved: ``up`` to what computes ``x``, ``down`` to what
            reads it, or ``stays``.
        before: where it is computed, by default right behind ``x``.
    """
    basis = compact(basis)
    if is_identity(basis):
        return x
    example = x.meta["example_value"]
    call = BasisCall(x, constant_node(x.graph, basis, example.device))
    for user in x.users if before is None else ():
        if BasisCall.of(user) == call:
            return user
    after = max(x, _first_op(x.graph).prev) if before is None else before.prev
    with x.graph.inserting_after(after):
        node = call.insert(x.graph)
    node.meta = {k: v for k, v in x.meta.items() if k in ("nn_module_stack", "stack_trace")}
    node.meta["direction"] = direction
    dims = len(example.shape) - 1
    sizes = zip(example.shape[:dims], basis.shape[:dims], strict=True)
    lead = [n if i == 1 else i for n, i in sizes]
    node.meta["example_value"] = example.new_empty([*lead, example.shape[-1]])
    return node


def changes_basis(node: Any) -> bool:
    """Whether ``node`` brings channels to another basis."""
    return isinstance(node, Node) and BasisCall.of(node) is not None


def _first_op(graph: Graph) -> Node:
    """The first node that is neither an argument nor a constant."""
    first: Node = next(n for n in graph.nodes if n.op not in ("placeholder", "get_attr"))
    return first
