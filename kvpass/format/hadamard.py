"""Hadamard matrices, by the constructions of Sylvester and Paley."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def hadamard(dim: int, seed: int | None = None) -> Tensor:
    """An orthogonal matrix ``[dim, dim]`` in float64, whose elements are equal but for their signs:
    what is concentrated in one channel is spread over all of them.

    Orders that no construction gives (odd ones, 92) are made of equal blocks, as large as one is:
    each spreads its own channels.

    Args:
        dim: channels.
        seed: of random signs of the channels that are rotated. None: no signs; then the rows are in
            the order of their changes of sign, so that the first of them, which are those of one
            sign, of two, and so on, are the most alike within groups of consecutive channels.
    """
    size = _largest_block(dim)
    block = torch.tensor(_rows(size), dtype=torch.float64) / size**0.5
    block = block[(block[:, 1:] != block[:, :-1]).sum(1).argsort(stable=True)]
    matrix: Tensor = torch.block_diag(*[block] * (dim // size))
    if seed is None:
        return matrix
    generator = torch.Generator().manual_seed(seed)
    signs = 2 * torch.randint(2, (dim, 1), generator=generator) - 1
    signed: Tensor = matrix * signs
    return signed


def _largest_block(dim: int) -> int:
    return next(n for n in range(dim, 0, -1) if dim % n == 0 and _rows(n))


@lru_cache(maxsize=256)
def _rows(order: int) -> tuple[tuple[int, ...], ...]:
    """A Hadamard matrix of 1 and -1 whose first row is of ones; empty if it is not known how."""
    if order == 1:
        return ((1,),)
    found = _paley(order)
    if not found and order % 2 == 0 and (half := _rows(order // 2)):
        # Sylvester: [[H, H], [H, -H]].
        pairs = [(row + row, row + tuple(-x for x in row)) for row in half]
        found = tuple(row for pair in zip(*pairs, strict=True) for row in pair)
    if not found:
        return ()
    return tuple(tuple(x * y for x, y in zip(row, found[0], strict=True)) for row in found)


def _paley(order: int) -> tuple[tuple[int, ...], ...]:
    """Paley's matrix for a prime ``q``: of order ``q + 1`` where ``q`` is 3 modulo 4 (his first
    construction), of ``2 (q + 1)`` where it is 1 (his second); empty if there is none."""
    if order % 4:
        return ()
    if order & (order - 1) and _is_prime(order - 1):
        q = order - 1
        core = _jacobsthal(q)
        skew = [[0] + [1] * q, *([-1, *row] for row in core)]
        return tuple(tuple(x + (i == j) for j, x in enumerate(row)) for i, row in enumerate(skew))
    q = order // 2 - 1
    if q % 4 != 1 or not _is_prime(q):
        return ()
    conference = [[0] + [1] * q, *([1, *row] for row in _jacobsthal(q))]
    # Each element by a matrix of two: C times [[1, 1], [1, -1]], and 1 times [[1, -1], [-1, -1]].
    parts = ((1, 1), (1, -1)), ((1, -1), (-1, -1))
    return tuple(
        tuple(
            x * parts[0][a][b] + (i == j) * parts[1][a][b]
            for j, x in enumerate(row)
            for b in (0, 1)
        )
        for i, row in enumerate(conference)
        for a in (0, 1)
    )


def _jacobsthal(q: int) -> list[list[int]]:
    """Legendre symbols ``(i - j | q)``, of a prime ``q``."""
    squares = {i * i % q for i in range(1, q)}
    symbol = [0, *(1 if i in squares else -1 for i in range(1, q))]
    return [[symbol[(i - j) % q] for j in range(q)] for i in range(q)]


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % i for i in range(2, int(n**0.5) + 1))
