"""Hypothesis strategies for tensors, plans and steps; memory poisoned until it is written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from hypothesis import strategies as st
from torch import Tensor

from kvpass.format.codec import BITS, Codec
from kvpass.format.quantize import decode, encode
from kvpass.format.retention import MAX_STEP, RetentionPolicy
from kvpass.format.tensor_plan import TensorPlan

HEAD_DIMS = (16, 64, 80, 128)
DIMS = st.sampled_from(HEAD_DIMS)
TOKENS = st.integers(1, 40)
SEEDS = st.integers(0, 2**32 - 1)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal values, the same for the same seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@st.composite
def tensors(draw, *, tokens=TOKENS, dims=DIMS, dtypes=DTYPES):
    """``[B, H, T, D]`` with values of any usual magnitude, off centre, some channels constant."""
    b, h, t, d = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(tokens), draw(dims)
    x = randn(b, h, t, d, seed=draw(SEEDS))
    x = x * 10.0 ** draw(st.integers(-3, 2)) + draw(st.sampled_from([0.0, -7.0, 300.0]))
    if draw(st.booleans()):
        x[..., : d // 2] = x[:, :, :1, :1]
    return x.to(draw(dtypes))


@st.composite
def codecs(draw, head_dim: int, groups=(2, 4, 8, 16, 24, 32)):
    """Codecs that fit heads of ``head_dim`` channels; never the identity."""
    axis = draw(st.sampled_from(["channel", "token"]))
    fitting = [g for g in groups if axis == "channel" or head_dim % g == 0]
    bits = draw(st.sampled_from(BITS))
    return Codec(
        bits,
        axis,
        draw(st.sampled_from(fitting)),
        clip=draw(st.sampled_from([1.0, 1.0, 0.92, 0.5])),
        qparams=draw(st.sampled_from(["half", "half", "fp8"])),
        ternary_in_2bit=bits == 1.5 and draw(st.booleans()),
        pack11=bits == 3 and draw(st.booleans()),
        scale_by_token=draw(st.sampled_from([False, False, True])),
    )


@st.composite
def tensor_plans(draw, head_dim: int):
    """The identity, or a codec with a window and a pack_every."""
    if draw(st.integers(0, 7)) == 0:
        return TensorPlan()
    codec = draw(codecs(head_dim, groups=(2, 4, 8)))
    pack_every = codec.token_group * draw(st.integers(1, 4))
    sinks = draw(st.sampled_from([0, 0, 1, 5, 20]))
    return TensorPlan(codec, RetentionPolicy(draw(st.integers(0, 24)), pack_every, sinks))


def steps(most: int = 6) -> st.SearchStrategy[list[int]]:
    """Lengths of a prompt and of the steps after it: one token, several, further prompts."""
    several = st.integers(2, MAX_STEP)
    later = st.one_of(st.just(1), several, st.integers(MAX_STEP + 1, 40))
    return st.tuples(st.integers(1, 40), st.lists(later, max_size=most)).map(
        lambda x: [x[0], *x[1]]
    )


def rounded(x: Tensor, plan: TensorPlan, packed: int) -> Tensor:
    """``x`` with its first ``packed`` tokens encoded and decoded, but for the sinks."""
    if plan.codec.identity:
        return x
    first = min(plan.sinks, packed)
    decoded = decode(plan.codec, encode(plan.codec, x[:, :, first:packed]), x.dtype)
    return torch.cat([x[:, :, :first], decoded, x[:, :, packed:]], dim=2)


@contextmanager
def poisoned() -> Iterator[None]:
    """Fresh memory holds NaN, or the largest integer (a NaN scale and minimum in params)."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
