"""The plans that benchmarks pack random keys and values by, calibrated ones too."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import torch
from torch import Tensor

import kvpass.ops.cos_sin
import kvpass.ops.pack  # noqa: F401  (registers the ops)
from kvpass.calibration.samples import (
    STORED,
    AttentionSample,
    Exact,
    GradientObserver,
    GradientSample,
    Kind,
    Observer,
    Replacement,
    Stored,
)
from kvpass.cocktail import ChunkBits, use
from kvpass.cocktail.shares import segment_tokens
from kvpass.format.channels import ChannelBasis
from kvpass.format.chunked_plan import ChunkedPlan
from kvpass.format.rope import Rope
from kvpass.format.state import State
from kvpass.format.tensor_plan import TensorPlan
from kvpass.ops import logical
from kvpass.plan import LayerPlan
from kvpass.recipes import written_recipe
from kvpass.tensor.chunked import ChunkedKV
from kvpass.tensor.packed import PackedKV

# Tokens that a calibrated recipe sees.
_TOKENS = 1024
_THETA = 10000.0


@dataclass(frozen=True)
class _Random:
    """A `CalibrationRunner` over one layer's random tokens; gradients are random, too."""

    keys: Tensor
    values: Tensor

    def tokens(self, skip: int = 0) -> int:
        return self.keys.shape[0] * max(0, self.keys.shape[2] - skip)

    def __call__(self, observer: Observer, name: str) -> None:
        q, scale = torch.randn_like(self.keys), self.keys.shape[3] ** -0.5
        known = (None, scale, None, True, 0.0, (), self.keys)
        observer(AttentionSample("*", q, self.keys, self.values, *known))

    def gradients(self, observer: GradientObserver, name: str, exact: Exact = (0, 0)) -> None:
        kinds: tuple[Kind, ...] = ("keys", "before_rope", "values")
        for kind in kinds:
            x = self.values if kind == "values" else self.keys
            observer(GradientSample("*", kind, x, torch.randn_like(x)))

    def importance(self, name: str) -> dict[tuple[str, Stored], list[float]]:
        return {("*", kind): [1.0] for kind in STORED}

    def loss(self, replacement: Replacement | None, name: str) -> float:
        return 0.0


def check_recipe(name: str, head_dim: int) -> None:
    """Refuses what cannot be measured.

    Raises:
        OptionError: if there is no such recipe.
        PlanError: if it does not fit the head dimension.
    """
    recipe = written_recipe(name)
    if not recipe.calibrated:
        recipe.layer_plan("*", head_dim, head_dim)


def layer_plan(name: str, keys: Tensor, values: Tensor) -> LayerPlan:
    """The plan of a layer with these keys and values ``[B, H, T, D]``; that of a calibrated recipe
    comes from some of them."""
    recipe = written_recipe(name)
    if recipe.calibrated:
        with torch.random.fork_rng(devices=[keys.device] if keys.is_cuda else []):
            torch.manual_seed(0)
            runner = _Random(keys[:1, :, :_TOKENS], values[:1, :, :_TOKENS])
            plan = recipe.fit(runner, seed=0).layers["*"]
    else:
        plan = recipe.layer_plan("*", keys.shape[3], values.shape[3])
    rope = Rope("halves", 0, keys.shape[3]) if plan.before_rope else None
    return replace(plan, keys=replace(plan.keys, rope=rope))


def packed_states(
    plan: LayerPlan, keys: Tensor, values: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """States that ``kvpass::pack`` makes of keys and values in the bases of the cache; keys are
    before their rotary embedding where the plan says so. Chunks have `random_bits`."""
    if isinstance(plan.keys, ChunkedPlan):
        with use(random_bits(plan.keys, keys.shape[0], keys.shape[2])):
            k, v = (
                logical.reorder_chunks(None, x, str(tensor_plan)).state
                for x, tensor_plan in ((keys, plan.keys), (values, plan.values))
            )
        return k, v
    ranges = None if plan.key_ranges is None else plan.key_ranges.tensor(keys.device)
    k = torch.ops.kvpass.pack(keys, str(plan.keys), ranges)
    if plan.keys.rope is not None:
        half = plan.keys.rope.channels // 2
        steps = torch.arange(half, device=keys.device) / half
        angles = torch.arange(keys.shape[2], device=keys.device).unsqueeze(1) * _THETA**-steps
        cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1).to(keys.dtype).unsqueeze(0)
        k.append(torch.ops.kvpass.pack_cos_sin(cos_sin, str(plan.keys)))
    return k, torch.ops.kvpass.pack(values, str(plan.values))


def random_bits(plan: ChunkedPlan, batch: int, tokens: int) -> ChunkBits:
    """Bits of all chunks of so many tokens, in a random order which is the same at every call; how
    many have which: see `segment_tokens`."""
    random = Random(0)
    counts = [count // plan.chunk for count in segment_tokens(plan, tokens)]
    chunks = [bits for bits, n in zip(plan.chunk_bits, counts, strict=True) for _ in range(n)]
    bits = tuple(tuple(random.sample(chunks, len(chunks))) for _ in range(batch))
    return ChunkBits(bits, (0,) * batch, plan.chunk)


def handle_of(
    state: list[Tensor],
    plan: TensorPlan,
    tokens: int,
    dtype: torch.dtype,
    basis: ChannelBasis | None = None,
) -> PackedKV:
    """The cache tensor of a state of `packed_states` in this basis."""
    if isinstance(plan, ChunkedPlan):
        exact = int(State(state, plan).segment_ends[:, -1].max())
        return ChunkedKV(state, plan, tokens, dtype, written=exact)
    return PackedKV(state, plan, tokens, dtype, basis=basis)
