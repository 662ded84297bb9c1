"""What calibration sees of a model: one attention at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from kvpass.errors import PlanError
from kvpass.ops.attention import attention_weights, mask_rows

# What is cached, and what of it can be told.
Stored = Literal["keys", "values"]
STORED: tuple[Stored, ...] = ("keys", "values")
Kind = Literal["keys", "before_rope", "values"]
# How many last keys, and values, stay exact.
Exact = tuple[int, int]


@dataclass(frozen=True)
class Rotation:
    """Channels ``start ... stop`` of each head that rotary embeddings turn in pairs: ``halves``
    are ``i`` and ``i + (stop - start) / 2``, ``neighbours`` ``2i`` and ``2i + 1``."""

    start: int
    stop: int
    kind: Literal["halves", "neighbours"]


@dataclass(frozen=True)
class CapturedKV:
    """Keys or values in a forward pass that autograd watches.

    Attributes:
        layer: the path of the attention module.
        kinds: what they are.
        x: the tensor, detached.
        probe: zeros that were added to what attention reads, and get its gradient.
        made: ``x`` with what autograd knows of it.
    """

    layer: str
    kinds: tuple[Kind, ...]
    x: Tensor
    probe: Tensor
    made: Tensor


@dataclass(frozen=True)
class AttentionSample:
    """One attention of a first prompt, its keys and values as the cache gets them.

    Attributes:
        layer: the path of the attention module whose keys and values they are.
        q: ``[B, Hq, T, D]``; keys ``[B, H, T, D]``; values ``[B, H, T, Dv]``.
        mask: bool (True is visible) or additive, broadcastable to ``[B, Hq, T, T]``, or None.
        scale, sinks, causal, softcap: see `kvpass.ops.attention.attention`.
        rotations: of the keys' channels.
        before_rope: the keys before their rotary embedding, themselves if they have none; or why
            they cannot be told.
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
    rotations: tuple[Rotation, ...]
    before_rope: Tensor | str

    def stored(self, kind: Stored, before_rope: bool) -> Tensor:
        """Keys, or values, as a plan stores them: keys maybe before their rotary embedding."""
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

    def rows(self, x: Tensor) -> Tensor:
        """``x`` ``[B, Hq, n, ...]`` as ``[B, H, Hq/H * n, ...]``: the queries of a KV head."""
        heads = self.keys.shape[1]
        return x.reshape(x.shape[0], heads, -1, *x.shape[3:])

    def weights(self, products: Tensor, positions: Tensor) -> Tensor:
        """Attention weights from products of queries and keys.

        Args:
            products: ``[B, H, Hq/H * n, T]``, float32.
            positions: int64 ``[n]`` of the queries.
        """
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


def windowed(seen: AttentionSample, keys: Tensor, values: Tensor, exact: Exact) -> Tensor:
    """The output ``[B, Hq, T, Dv]`` of an attention that reads other ``keys`` and ``values``
    (shaped like its own) of all but the last tokens.

    Args:
        exact: so many last keys, and values, are its own; at most a quarter of all, so that short
            texts tell something as well.
    """
    total, groups = seen.keys.shape[2], seen.q.shape[1] // seen.keys.shape[1]
    positions = torch.arange(total, device=seen.q.device)
    distance = (positions.unsqueeze(1) - positions).repeat(groups, 1)
    near, known = (distance < min(tokens, total // 4) for tokens in exact)
    wide = torch.promote_types(seen.q.dtype, torch.float32)
    q = seen.rows(seen.q).to(wide)
    own, other = (q @ k.to(wide).transpose(2, 3) for k in (seen.keys, keys))
    weights = seen.weights(torch.where(near, own, other), positions).to(wide)
    out = (weights * known) @ seen.values.to(wide) + (weights * ~known) @ values.to(wide)
    return out.reshape(*seen.q.shape[:3], -1).to(seen.q.dtype)


@dataclass(frozen=True)
class Replacement:
    """Of the keys, or the values, of one layer, where later tokens read them.

    Attributes:
        layer, kind: which.
        by: makes of ``[B, H, T, D]`` what is read instead.
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
        layer: as `AttentionSample`.
        kind: which of them.
        x: ``[B, H, T, D]``.
        gradient: of the sum of the tokens' losses, likewise, as far as later tokens read ``x``
            behind the exact ones.
    """

    layer: str
    kind: Kind
    x: Tensor
    gradient: Tensor


# Looks at every attention of a batch.
Observer = Callable[[AttentionSample], None]
GradientObserver = Callable[[GradientSample], None]


class CalibrationRunner(Protocol):
    """Runs a model over all texts once, an observer looking on; the text names the progress
    bar."""

    def __call__(self, observer: Observer, name: str) -> None:
        """Every attention of every batch."""

    def gradients(self, observer: GradientObserver, name: str, exact: Exact = (0, 0)) -> None:
        """The keys and the values of every layer of every batch, with their gradients, which leave
        out how the last ``exact`` keys, and values, are read."""

    def tokens(self, skip: int = 0) -> int:
        """Of all texts, but the first ``skip`` of each."""

    def importance(self, name: str) -> dict[tuple[str, Stored], list[float]]:
        """Of the ``keys`` and the ``values`` of every layer, for each text: see
        `kvpass.calibration.importance.gradient_norms`."""

    def loss(self, replacement: Replacement | None, name: str) -> float:
        """Nats per token, with keys or values replaced."""


def layer_shapes(run: CalibrationRunner) -> dict[tuple[str, Stored], tuple[int, int]]:
    """KV heads, and channels of each, of the keys and the values of every layer."""
    found: dict[tuple[str, Stored], tuple[int, int]] = {}

    def look(seen: AttentionSample) -> None:
        found[seen.layer, "keys"] = (seen.keys.shape[1], seen.keys.shape[3])
        found[seen.layer, "values"] = (seen.values.shape[1], seen.values.shape[3])

    run(look, "layers")
    return found


def layer_dims(
    shapes: Mapping[tuple[str, Stored], tuple[int, int]],
) -> dict[str, tuple[int, int]]:
    """Channels of a head of keys, and of values, of every layer."""
    layers = dict.fromkeys(layer for layer, _ in shapes)
    return {x: (shapes[x, "keys"][1], shapes[x, "values"][1]) for x in layers}
