"""Bytes of a model's whole cache, from the layouts of the states in it: nothing is allocated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvpass.cocktail.shares import segment_tokens
from kvpass.errors import PlanError
from kvpass.estimate.shapes import LayerShape, ModelShape
from kvpass.format.chunked_plan import ChunkedPlan
from kvpass.format.rope import Rope
from kvpass.format.shard import WHOLE, Shard
from kvpass.format.sharded_plan import ShardedChunks, ShardedPlan, first_block, part_of
from kvpass.format.tensor_plan import TensorPlan
from kvpass.ops.shard import own_prompt
from kvpass.plan import LayerPlan, Plan
from kvpass.recipes import Recipe
from kvpass.tensor.packed import PackedKV
from kvpass.tensor.sharded import ShardedChunkedKV, ShardedKV, kind_of
from kvpass.tensor.size import stored_bits

# Fields that all layers share, by their window, name and sizes.
Shared = dict[tuple[object, ...], Tensor]


@dataclass(frozen=True)
class CachedTensor:
    """Keys or values ``[B, heads, T, dim]``, of which ``window`` tokens are kept; ``plan`` None:
    as a plain tensor."""

    heads: int
    dim: int
    window: int | None
    plan: TensorPlan | None

    def tensor(self, batch: int, tokens: int, dtype: torch.dtype, shared: Shared) -> Tensor:
        """The cache tensor right after a prompt of so many tokens, on the meta device."""
        plan = self.plan
        x = torch.empty(batch, self.heads, tokens, self.dim, dtype=dtype, device="meta")
        if plan is None:
            return x if self.window is None else x[:, :, -self.window :]
        x = x[:, :, plan.skipped(tokens) :]
        kept, ends = x.shape[2], _segment_ends(plan, x.shape[2])
        written = ends[-1]
        if isinstance(plan, ShardedPlan):
            sizes, held = dict[str, int](), plan.shard.own(kept)
            made = own_prompt(plan, x)
            fields, ends = made.state.tensors, made.ends
        else:
            if isinstance(plan, ChunkedPlan):
                if isinstance(plan, ShardedChunks):
                    ends = [plan.shard.own(count, plan.chunk) for count in ends]
                sizes = plan.chunk_sizes(x.shape, [plan.capacity(count) for count in ends])
                written, ends = ends[-1], plan.row_ends(ends, kept)
            else:
                sizes = plan.sizes(x.shape, plan.packed(kept))
            fields, held = [field.empty(x, sizes) for field in plan.layout.own], kept
        # Each sequence has positions of its own where `generate` counts them.
        sizes |= {"rows": batch, "cos_sin": plan.capacity(held)}
        state = dict(zip(plan.layout.own_names, fields, strict=True))
        # Real numbers: bits are counted by them.
        state["segment_ends"] = torch.tensor(ends, dtype=torch.int32).expand(batch, -1)
        for field in plan.layout.shared:
            key = (plan.window_size, str(field), *(sizes.get(str(d)) for d in field.shape))
            state[field.name] = shared.setdefault(key, field.empty(x, sizes))
        if isinstance(plan, ChunkedPlan):
            return kind_of(plan)(list(state.values()), plan, tokens, dtype, written)
        return kind_of(plan).of_prompt(list(state.values()), plan, tokens, dtype)


def _segment_ends(plan: TensorPlan, tokens: int) -> list[int]:
    """The ends of the segments after a prompt of so many tokens, see `State`."""
    if isinstance(plan, ChunkedPlan):
        return segment_tokens(plan, tokens)
    if plan.codec.identity:
        return [tokens]
    sinks = min(plan.sinks, tokens)
    return [*([sinks] if plan.sinks else []), sinks + plan.packed(tokens), tokens]


@dataclass(frozen=True)
class ModelCache:
    """A model's whole cache.

    Attributes:
        tensors: the kinds of cache tensors, and how many there are of each.
        state_bytes: what recurrent layers hold, per sequence.
        dtype: the type of plain tensors and of exact tokens.
    """

    tensors: Mapping[CachedTensor, int]
    state_bytes: int
    dtype: torch.dtype

    @staticmethod
    def plain(shape: ModelShape, dtype: torch.dtype) -> ModelCache:
        """Keys and values as they are, in ``dtype``."""
        return ModelCache(_counted(shape, {}), shape.state_bytes, dtype)

    @staticmethod
    def packed(
        shape: ModelShape, planner: Recipe | Plan, dtype: torch.dtype, shard: Shard = WHOLE
    ) -> ModelCache:
        """Keys and values as a recipe, or a plan for this model, says; of layers without a sliding
        window the part ``shard``.

        Raises:
            PlanError: if it does not fit the model, or cannot be spread over devices.
        """
        plan = planner
        if isinstance(plan, Recipe):
            sizes = {str(i): (x.heads, x.key_dim, x.value_dim) for i, x in shape.layers.items()}
            plan = plan.sized(sizes)
        layers = {i: _layer_plan(plan, i, layer, shard) for i, layer in shape.layers.items()}
        return ModelCache(_counted(shape, layers), shape.state_bytes, dtype)

    def nbytes(self, batch: int, tokens: int) -> int:
        """Bytes held right after a prompt, spare room included. While tokens are generated the
        packed segment grows by a quarter at a time, so up to that much more may be spare."""
        shared: Shared = {}
        total = batch * self.state_bytes
        for kind, count in self.tensors.items():
            tensor = kind.tensor(batch, tokens, self.dtype, shared)
            own = tensor.own if isinstance(tensor, PackedKV) else [tensor]
            total += count * sum(t.numel() * t.element_size() for t in own)
        return total + sum(t.nbytes for t in shared.values())

    def stored(self, batch: int, tokens: int) -> tuple[float, float]:
        """Bits that store one element of keys and values, everything but spare room; and the bytes
        that a decode step reads: these, once, and recurrent states."""
        shared: Shared = {}
        tensors: list[Tensor] = []
        for kind, count in self.tensors.items():
            tensor = kind.tensor(batch, tokens, self.dtype, shared)
            held = tensor.part if isinstance(tensor, ShardedKV | ShardedChunkedKV) else tensor
            tensors += [held] * count
        bits = stored_bits(tensors)
        return bits, bits * sum(t.numel() for t in tensors) / 8 + batch * self.state_bytes

    @property
    def chunked(self) -> bool:
        """Whether a request chooses the bits of chunks."""
        return any(isinstance(kind.plan, ChunkedPlan) for kind in self.tensors)

    @property
    def bits(self) -> Counter[float]:
        """The bits of codes, and how many cache tensors have them; those of chunks are not
        counted."""
        found: Counter[float] = Counter()
        for kind, count in self.tensors.items():
            if kind.plan is not None and not isinstance(kind.plan, ChunkedPlan):
                found[kind.plan.codec.bits] += count
        return found


def _counted(shape: ModelShape, plans: Mapping[int, LayerPlan]) -> Counter[CachedTensor]:
    """Keys and values of all layers; plain ones of those without a plan."""
    found: Counter[CachedTensor] = Counter()
    for i, layer in shape.layers.items():
        own = plans.get(i)
        for dim, plan in (
            (layer.key_dim, None if own is None else own.keys),
            (layer.value_dim, None if own is None else own.values),
        ):
            found[CachedTensor(layer.heads, dim, layer.window, plan)] += 1
    return found


def _layer_plan(plan: Plan, number: int, layer: LayerShape, shard: Shard) -> LayerPlan:
    """How a layer is stored: as the rules store it that rewrite its cache."""
    path = str(number)
    found = plan.layer_at(number)
    if plan.calibration is not None and found is plan.default:
        raise PlanError(f"The plan is calibrated for another model: it has no layer {path}.")
    if layer.latents:
        keys, values = (found.unknown(path, dim) for dim in (layer.key_dim, layer.value_dim))
        found = LayerPlan(keys, values)
    found.check(path, layer.key_dim, layer.value_dim, layer.heads)
    if found.before_rope and layer.rope:
        found = replace(found, keys=replace(found.keys, rope=Rope("halves", 0, layer.rope)))
    if layer.window is not None:
        keys, values = (p.sliding(layer.window) for p in (found.keys, found.values))
        found = replace(found, keys=keys, values=values)
    elif shard != WHOLE:
        shard = replace(shard, first=first_block(found.keys, found.values))
        keys, values = (part_of(p, shard) for p in (found.keys, found.values))
        found = replace(found, keys=keys, values=values)
    return found
