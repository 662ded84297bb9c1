"""Contenders for one step's attention: kvpass under a recipe, and dense attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

from kvpass.bench.models import check_sizes
from kvpass.bench.plans import handle_of, layer_plan, packed_states
from kvpass.bench.timing import Contender, relative_error
from kvpass.errors import OptionError
from kvpass.format.parse import parse_plan
from kvpass.format.state import State
from kvpass.inner import provider
from kvpass.machine import cache_size, free_memory
from kvpass.ops.library import op_of

HF_NAME = "sdpa enable_gqa (HF)"
ROWS_NAME = "sdpa rows"
FLEX_NAME = "flex_attention"
# Relative error of one attention against float64 on the same cache.
TOLERANCE = {
    # Triton's products over packed tokens have fp16 operands (2**-11 each) whatever the model's.
    torch.float32: 2e-3,
    # The same, and the output's own rounding.
    torch.float16: 3e-3,
    # The output, the softmax weights and, without a kernel, the decoded cache are rounded to 2**-9.
    torch.bfloat16: 1.2e-2,
}
_FUSED = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
_MAX_COPIES = 128
# Per element, while the reference packs: float32 values, codes and words.
_PACKING_BYTES = 20


@dataclass(frozen=True)
class Case:
    """One step: the last ``queries`` tokens of each sequence attend to its ``tokens`` cached ones,
    each to itself and those before it.

    Raises:
        OptionError: if a number is not positive, ``kv_heads`` does not divide ``heads``, or there
            are more queries than tokens.
    """

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    tokens: int
    dtype: torch.dtype
    device: torch.device
    queries: int = 1

    def __post_init__(self) -> None:
        batch, kv_heads, tokens, head_dim = self.shape
        sizes = {"heads": self.heads, "kv_heads": kv_heads, "head_dim": head_dim}
        check_sizes(batch=batch, tokens=tokens, queries=self.queries, **sizes)
        if self.queries > tokens:
            raise OptionError(f"{self.queries} new tokens are more than {tokens} in the cache")

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return float(self.head_dim**-0.5)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of keys and values, ``[B, Hkv, T, D]``."""
        return self.batch, self.kv_heads, self.tokens, self.head_dim

    @property
    def dense_bytes(self) -> int:
        """Bytes of the plain keys and values."""
        return 2 * math.prod(self.shape) * self.dtype.itemsize

    @property
    def needed_bytes(self) -> int:
        """Bytes of plain and packed caches, and of what packing one of them takes meanwhile."""
        return 2 * self.dense_bytes + _PACKING_BYTES * math.prod(self.shape)

    def cached(self, seed: int) -> Tensor:
        """Random keys or values."""
        return random_tokens(self.shape, self.dtype, self.device, seed)

    @property
    def mask(self) -> Tensor | None:
        """Bool ``[1, 1, n, T]`` of what each query sees, or None: all."""
        if self.queries == 1:
            return None
        shape = (1, 1, self.queries, self.tokens)
        seen = torch.ones(shape, dtype=torch.bool, device=self.device)
        return seen.tril(self.tokens - self.queries)

    def query(self, seed: int) -> Tensor:
        """Random queries ``[B, Hq, n, D]``."""
        shape = (self.batch, self.heads, self.queries, self.head_dim)
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=self.device).to(self.dtype)


def random_tokens(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, seed: int
) -> Tensor:
    """Random ``[B, H, T, D]`` whose channels differ in range and offset, as those of keys do."""
    generator = torch.Generator(device).manual_seed(seed)
    channels = (*shape[:2], 1, shape[3])
    spread = 0.3 + 3 * torch.rand(channels, generator=generator, device=device)
    offset = torch.randn(channels, generator=generator, device=device)
    x = torch.randn(*shape, generator=generator, device=device)
    return x.mul_(spread).add_(offset).to(dtype)


def dense_attention(
    q: Tensor, rows: Iterator[tuple[Tensor, Tensor]], scale: float, mask: Tensor | None = None
) -> Tensor:
    """Attention in float64, one sequence of the batch at a time.

    Args:
        q: ``[B, Hq, n, D]``, as is the result.
        rows: keys and values ``[1, Hkv, T, D]`` of every sequence; lengths may differ.
        scale: factor of the scores.
        mask: bool ``[B, 1, n, T]``, True is visible; B and n may be 1.
    """
    outs = []
    for b, (k, v) in enumerate(rows):
        heads, n, dim = q.shape[1:]
        grouped = q[b : b + 1].double().reshape(1, k.shape[1], heads // k.shape[1] * n, dim)
        scores = grouped @ k.double().transpose(2, 3) * scale
        if mask is not None:
            seen = mask[b % mask.shape[0], :, :, : k.shape[2]].expand(1, n, -1)
            hidden = ~seen.repeat(1, heads // k.shape[1], 1)
            scores = scores.masked_fill(hidden, float("-inf"))
        out = scores.softmax(-1) @ v.double()
        outs.append(out.reshape(1, heads, n, v.shape[3]))
    return torch.cat(outs)


def decoded_rows(
    keys: Sequence[Tensor], values: Sequence[Tensor], k_plan: str, v_plan: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values of every sequence of packed states, in float32."""
    for b in range(keys[0].shape[0]):
        k, v = (
            op_of(parse_plan(plan), "unpack")(
                # All sequences may have the same cosines and sines.
                [t[b : b + 1] if t.shape[0] > b else t for t in state],
                State.of(state, plan).length(b),
                plan,
                torch.float32,
            )
            for state, plan in ((keys, k_plan), (values, v_plan))
        )
        yield k, v


def packed_contender(case: Case, recipe: str, q: Tensor, k: Tensor, v: Tensor) -> Contender:
    """``kvpass::attention`` by the best provider, on the cache that ``recipe`` makes of k and v.

    Raises:
        OptionError: if there is no such recipe.
        PlanError: if it does not fit the head dimension.
    """
    plan = layer_plan(recipe, k, v)
    plans = (str(plan.keys), str(plan.values))
    keys, values = packed_states(plan, k, v)
    handles = [
        handle_of(state, tensor_plan, case.tokens, case.dtype)
        for state, tensor_plan in ((keys, plan.keys), (values, plan.values))
    ]
    count = copies(sum(h.nbytes for h in handles), case.device)
    # Without attention sinks, each query up to its own token.
    rest = None, case.scale, *plans, None, case.queries > 1
    target, choice = provider(f"attention{plan.keys.op_suffix}", q, keys, values, *rest)
    calls = [partial(target, q, *_clones(i, keys, values), *rest) for i in range(count)]
    expected = dense_attention(q, decoded_rows(keys, values, *plans), case.scale, case.mask)
    declined = "".join(f"; {name} declined: {why}" for name, why in choice.declined)
    return Contender(
        name=f"kvpass {recipe}",
        calls=calls,
        error=partial(relative_error, expected=expected),
        tolerance=TOLERANCE[case.dtype],
        bytes_read=round(sum(h.bits_per_element * h.numel() / 8 for h in handles)),
        note=f"{choice.provider}, buffers: {count}{declined}",
        # The reference reads lengths on the host.
        capturable=choice.provider != "aten",
        required=True,
    )


def dense_contenders(case: Case, q: Tensor, k: Tensor, v: Tensor) -> list[Contender]:
    """SDPA as transformers calls it and with packed query rows; on a GPU, for one query of a
    sequence, also every fused backend of SDPA in both forms, and compiled flex_attention."""
    count = copies(case.dense_bytes, case.device)
    buffers = [_clones(i, [k, v])[0] for i in range(count)]
    rows = zip(k.split(1), v.split(1), strict=True)
    expected = dense_attention(q, rows, case.scale, case.mask)
    return [
        Contender(
            name=name,
            calls=[partial(form, q, *pair, scale=case.scale) for pair in buffers],
            error=partial(relative_error, expected=expected),
            tolerance=TOLERANCE[case.dtype],
            bytes_read=case.dense_bytes,
            note=f"buffers: {count}",
        )
        for name, form in _dense_forms(case).items()
    ]


def copies(nbytes: int, device: torch.device) -> int:
    """How many buffers of ``nbytes`` exceed the last-level cache twice, where memory allows."""
    wanted = -(-2 * cache_size(device) // nbytes)
    fitting = free_memory(device) // 8 // nbytes
    return max(1, min(wanted, fitting, _MAX_COPIES))


def _clones(i: int, *states: Sequence[Tensor]) -> list[list[Tensor]]:
    """The states themselves first, then copies of them."""
    return [list(s) if i == 0 else [t.clone() for t in s] for s in states]


def _dense_forms(case: Case) -> dict[str, Callable[..., Tensor]]:
    plain = partial(_sdpa, mask=case.mask)
    rows = partial(plain, rows=True)
    forms: dict[str, Callable[..., Tensor]] = {HF_NAME: plain, ROWS_NAME: rows}
    if case.device.type == "cuda" and case.queries == 1:
        for name, backend in _FUSED.items():
            forms[f"sdpa {name} enable_gqa"] = partial(plain, backend=backend)
            forms[f"sdpa {name} rows"] = partial(rows, backend=backend)
        flex: Any = torch.compile(flex_attention, dynamic=False)
        forms[FLEX_NAME] = partial(flex, enable_gqa=True)
    return forms


def _sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    mask: Tensor | None = None,
    rows: bool = False,
    backend: SDPBackend | None = None,
) -> Tensor:
    """SDPA as `transformers` calls it without padding; with ``rows`` at its best in a decode step:
    the queries of a KV head are rows of one matrix."""
    batch, heads, n, dim = q.shape
    if rows:
        shared = heads // k.shape[1]
        q = q.view(batch, k.shape[1], shared * n, dim)
        mask = None if mask is None else mask.repeat(1, 1, shared, 1)
    with nullcontext() if backend is None else sdpa_kernel(backend):
        out = scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=not rows)
    return out.reshape(batch, heads, n, v.shape[3]) if rows else out
