"""What calibration sees of a model: one attention at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from kvpass.errors import PlanError
from kvpass.format.rope import Rope
from kvpass.ops.attention import attention_weights, mask_rows

Stored = Literal["keys", "values"]
STORED: tuple[Stored, ...] = ("keys", "values")
Kind = Literal["keys", "before_rope", "values"]
# The attention module's path, and which of its tensors.
Name = tuple[str, Stored]
# For each tensor, one number for each text, or for each candidate.
Numbers = dict[Name, list[float]]
# How many last keys, and values, stay exact.
Exact = tuple[int, int]
# KV heads, channels of a head of keys, and of values.
Shape = tuple[int, int, int]


@dataclass(frozen=True)
class CapturedKV:
    """Keys or values in a forward pass that autograd watches.

    Attributes:
        layer: the path of the attention module.
        kinds: what they are: keys without a rotary embedding are of two kinds.
        x: the tensor, with its part of the autograd graph.
        probe: zeros that were added to what attention reads, and get its gradient.
    """

    layer: str
    kinds: tuple[Kind, ...]
    x: Tensor
    probe: Tensor


@dataclass(frozen=True)
class AttentionSample:
    """One attention of a first prompt, its keys and values as the cache gets them.

    Attributes:
        layer: the path of the attention module whose keys and values they are.
        q: ``[B, Hq, T, D]``; keys ``[B, H, T, D]``; values ``[B, H, T, Dv]``.
        mask: bool (True is visible) or additive, broadcastable to ``[B, Hq, T, T]``, or None.
        scale, sinks, causal, softcap: see `kvpass.ops.attention.attention`.
        rotations: how rotary embeddings have rotated the keys' channels.
        before_rope: the keys before their rotary embedding, themselves if they have none; or why
            they are not known.
    """

    layer: str
    q: Tensor
    keys: Tensor
    values: Tensor
    mask: Tensor | None
    scale: float
    sinks: Tensor | None
    causal: bool
    softcap: float
    rotations: tuple[Rope, ...]
    before_rope: Tensor | str

    @property
    def shape(self) -> Shape:
        """The sizes of what is stored."""
        return self.keys.shape[1], self.keys.shape[3], self.values.shape[3]

    def stored(self, kind: Stored, before_rope: bool) -> Tensor:
        """Keys, maybe before their rotary embedding, or values."""
        if kind == "values":
            return self.values
        if not before_rope:
            return self.keys
        if isinstance(self.before_rope, str):
            raise PlanError(
                f"The keys of layer '{self.layer}' cannot be stored before their rotary embedding: "
                f"{self.before_rope}. Calibrate with before_rope=False."
            )
        return self.before_rope

    def rotated(self, x: Tensor) -> Tensor:
        """What the rotary embedding makes of ``x`` ``[B, H, T, D]`` float32 in the place of the
        keys: how far each token's pairs are turned is read off the keys before and behind it."""
        before = self.stored("keys", before_rope=True)
        if before is self.keys:
            return x
        out = x.clone()
        for rope in self.rotations:
            old, new, mine = (rope.pairs(t) for t in (before, self.keys, x))
            norms = old.abs().square().sum(1, keepdim=True).clamp(min=1e-30)
            turned = mine * ((new * old.conj()).sum(1, keepdim=True) / norms)
            dim = -2 if rope.kind == "halves" else -1
            pairs = torch.stack([turned.real, turned.imag], dim).flatten(-2)
            out[..., rope.start : rope.stop] = pairs
        return out

    def rows(self, x: Tensor) -> Tensor:
        """``x`` ``[B, Hq, n, ...]`` as ``[B, H, Hq/H * n, ...]``: the queries of a KV head."""
        heads = self.keys.shape[1]
        return x.reshape(x.shape[0], heads, -1, *x.shape[3:])

    def weights(self, products: Tensor, positions: Tensor) -> Tensor:
        """Attention weights from ``products`` of queries and keys, float32 ``[B, H, Hq/H * n, T]``;
        the queries have ``positions``, int64 ``[n]``."""
        groups, n = self.q.shape[1] // self.keys.shape[1], len(positions)
        mask, sinks = self.mask, self.sinks
        if self.causal:
            # Then there is no other mask.
            tokens = torch.arange(products.shape[3], device=products.device)
            mask = (tokens <= positions.unsqueeze(1)).repeat(groups, 1)
        elif mask is not None:
            mask = mask[..., : products.shape[3]]
            mask = mask if mask.shape[2] == 1 else mask[:, :, positions]
            mask = mask_rows(mask, self.keys.shape[1], groups, n)
        if sinks is not None:
            sinks = self.rows(sinks.view(1, -1, 1, 1).expand(len(products), -1, n, 1))
        return attention_weights(products * self.scale, mask, self.softcap, sinks)


def windowed(sample: AttentionSample, keys: Tensor, values: Tensor, exact: Exact) -> Tensor:
    """The output ``[B, Hq, T, Dv]`` of an attention that reads other ``keys`` and ``values``
    (shaped like its own) of all tokens but the last ``exact`` ones, which are a quarter at most, so
    that short texts count as well."""
    total, groups = sample.keys.shape[2], sample.q.shape[1] // sample.keys.shape[1]
    positions = torch.arange(total, device=sample.q.device)
    distance = (positions.unsqueeze(1) - positions).repeat(groups, 1)
    near, known = (distance < min(tokens, total // 4) for tokens in exact)
    wide = torch.promote_types(sample.q.dtype, torch.float32)
    q = sample.rows(sample.q).to(wide)
    own, other = (q @ k.to(wide).transpose(2, 3) for k in (sample.keys, keys))
    weights = sample.weights(torch.where(near, own, other), positions).to(wide)
    out = (weights * known) @ sample.values.to(wide) + (weights * ~known) @ values.to(wide)
    return out.reshape(*sample.q.shape[:3], -1).to(sample.q.dtype)


@dataclass(frozen=True)
class Replacement:
    """What later tokens read instead of the keys, or the values, of one layer.

    Attributes:
        layer, kind: which.
        by: from what is stored, ``[B, H, T, D]``, to what is read.
        exact: last tokens whose keys, and values, are read as they are.
    """

    layer: str
    kind: Kind
    by: Callable[[Tensor], Tensor]
    exact: Exact = (0, 0)


@dataclass(frozen=True)
class GradientSample:
    """Keys, before or behind their rotary embedding (both, if they have none), or values of a first
    prompt, and the gradient of the language model's loss.

    Attributes:
        layer: the path of the attention module.
        kind: which of them.
        x: ``[B, H, T, D]``.
        gradient: the same shape: of the sum of the tokens' losses, as far as later tokens read
            ``x`` behind the exact ones.
    """

    layer: str
    kind: Kind
    x: Tensor
    gradient: Tensor

    @property
    def stored(self) -> Stored:
        """``keys``, before or behind their rotary embedding, or ``values``."""
        return "values" if self.kind == "values" else "keys"


Observer = Callable[[AttentionSample], None]
GradientObserver = Callable[[GradientSample], None]


class CalibrationRunner(Protocol):
    """Runs a model over all texts once; ``name`` stands at the progress bar."""

    def __call__(self, observer: Observer, name: str) -> None:
        """Shows every attention of every batch."""

    def gradients(self, observer: GradientObserver, name: str, exact: Exact = (0, 0)) -> None:
        """Shows the keys and the values of every layer of every batch, with their gradients, which
        leave out how the last ``exact`` keys, and values, are read."""

    def tokens(self, skip: int = 0) -> int:
        """How many tokens all texts have behind the first ``skip`` of each."""

    def importance(self, name: str) -> Numbers:
        """A norm for the ``keys`` and the ``values`` of every layer, for each text: see
        `kvpass.calibration.importance.gradient_norms`."""

    def loss(self, replacement: Replacement | None, name: str) -> float:
        """Nats per token, with keys or values replaced."""


def layer_shapes(run: CalibrationRunner) -> dict[str, Shape]:
    """The shape of every layer."""
    found: dict[str, Shape] = {}

    def observe(sample: AttentionSample) -> None:
        found[sample.layer] = sample.shape

    run(observe, "layers")
    return found
