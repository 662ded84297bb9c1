"""Changes of the basis of channels, in plain ATen. What a basis is: `kvpass.graph.bases`."""

from __future__ import annotations

import torch
from torch import Tensor

_DIMS = "abcdefgh"


def rotate(x: Tensor, basis: Tensor) -> Tensor:
    """``x`` ``[..., C]`` in another basis.

    Args:
        x: floating.
        basis: an order, int64 ``[..., C]``: ``out[..., j] = x[..., order[..., j]]``; or a rotation,
            floating ``[..., blocks, C / blocks, C / blocks]``: each block of channels is multiplied
            by its matrix, in float32 (in which that is orthogonal), and rounded to the dtype of
            ``x``. Both have as many dimensions before those as ``x``, of size one where they do not
            depend on them; one of a rotation may be a part of that of ``x``, as where several
            queries share a KV head.
    """
    if not basis.is_floating_point():
        return torch.take_along_dim(x, basis, dim=-1)
    *lead, blocks, size, _ = basis.shape
    dims, own, shape = "", "", []
    for dim, count, total in zip(_DIMS, lead, x.shape[:-1], strict=False):
        shares = count != 1 and count != total
        dims += dim + dim.upper() if shares else dim
        own += dim if count != 1 else ""
        shape += [count, total // count] if shares else [total]
    matrices = basis.view(*(n for n in lead if n != 1), blocks, size, size)
    wide = torch.promote_types(x.dtype, basis.dtype)
    split = x.to(wide).reshape(*shape, blocks, size)
    out = torch.einsum(f"{dims}ni,{own}nij->{dims}nj", split, matrices.to(wide))
    return out.reshape(x.shape).to(x.dtype)


def rotate_weight(weight: Tensor, basis: Tensor, dim: int) -> Tensor:
    """``weight`` with its entries along ``dim`` in another basis, as `rotate` has it for channels.

    Args:
        weight: floating.
        basis: an order, int64 of any shape, which takes the place of ``dim`` in the result; or a
            rotation ``[blocks, C / blocks, C / blocks]``, where ``dim`` has ``C`` entries.
        dim: a dimension of the weight.
    """
    if not basis.is_floating_point():
        out: Tensor = weight.index_select(dim, basis.flatten()).unflatten(dim, basis.shape)
        return out
    last = weight.movedim(dim, -1)
    matrices = basis.view(*[1] * (last.dim() - 1), *basis.shape)
    return rotate(last, matrices).movedim(-1, dim).contiguous()
