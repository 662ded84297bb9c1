"""Requests with chunks of different bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvpass.cocktail import ChunkBits, use
from kvpass.format.parse import parse_plan
from kvpass.plan import LayerPlan, Plan
from tests.harness import run_steps

CHUNK = 8


def any_bits(
    batch: int, tokens: int, seed: int, allowed: Sequence[float] = (2, 4, 16), chunk: int = CHUNK
) -> ChunkBits:
    """Random bits for as many chunks, from a random token on, as fit each sequence, or fewer."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, tokens // 3 + 1, (batch,), generator=generator).tolist()
    bits = []
    for start in starts:
        most = (tokens - start) // chunk
        count = int(torch.randint(0, most + 1, (1,), generator=generator))
        picks = torch.randint(0, len(allowed), (count,), generator=generator).tolist()
        bits.append(tuple(allowed[i] for i in picks))
    return ChunkBits(tuple(bits), tuple(starts), chunk)


def plan_of(keys: str, values: str) -> Plan:
    """The same for all layers."""

    return Plan(LayerPlan(parse_plan(keys), parse_plan(values)))


def run_request(
    model: Any,
    ids: Tensor,
    lengths: Sequence[int],
    bits: ChunkBits,
    mask: Tensor | None = None,
    cache: Any = None,
) -> tuple[Tensor, Any]:
    """As `run_steps`; the first step's chunks have ``bits``."""
    with use(bits):
        return run_steps(model, ids, lengths, mask, cache)


def widened(state: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The state with tokens of this dtype in double precision."""
    return [t.double() if t.dtype == dtype else t for t in state]


def check_attention(
    kernels: Any,
    plans: tuple[str, str],
    states: Sequence[list[Tensor]],
    q: Tensor,
    mask: Tensor | None,
    limit: float,
) -> None:
    """The relative error of a back end's attention over chunks, to the reference in float64, for a
    step of as many tokens as ``q`` has; without and with sinks and a soft cap."""
    _, heads, queries, dim = q.shape
    sinks = torch.randn(heads, generator=torch.Generator().manual_seed(2))
    wide = [widened(state, q.dtype) for state in states]
    for variant in ((None, queries > 1, 0, 0.0), (sinks, queries > 1, 0, 20.0)):
        arguments = (mask, dim**-0.5, *plans, *variant)
        assert kernels.unsupported_attention(q, *states, *arguments) is None
        got = kernels.attention_chunks(q, *states, *arguments).double()
        wanted = torch.ops.kvpass.attention_chunks(q.double(), *wide, *arguments)
        assert ((got - wanted).norm() / wanted.norm()).item() <= limit
