"""The oracle: what a packed cache must answer, in eager mode and without any graph rewriting."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvpass.cache.filters import empty_kept, keep, restored
from kvpass.cache.residency import MAX_STEP, TensorPlan
from kvpass.errors import OptionError
from kvpass.plan import LayerPlan, Plan


class OracleLayer(DynamicLayer):
    """A plain cache layer whose older tokens have been encoded and decoded once.

    ``keys`` and ``values`` are dense; their first ``packed[...]`` tokens are rounded by the codec,
    but for the sinks.
    """

    def __init__(self, plan: LayerPlan) -> None:
        super().__init__()
        self.plan = plan
        self.packed = {"keys": 0, "values": 0}
        # With a filter: what is packed, as if nothing of it were kept, and what is kept.
        self.rounded: dict[str, Tensor] = {}
        self.kept: dict[str, list[Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends ``[B, H, n, D]`` and returns what attention reads in this step."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._extend("keys", key_states), self._extend("values", value_states)

    def _extend(self, name: str, new: Tensor) -> Tensor:
        """A decode step rounds what was due before it; a prefill attends exactly, then rounds."""
        stored: Tensor = getattr(self, name)
        decode_step = stored.dim() == 4 and new.shape[2] <= MAX_STEP
        if decode_step:
            stored = self._round_due(name, stored)
        attended = torch.cat([stored, new], dim=2)
        setattr(self, name, attended if decode_step else self._round_due(name, attended))
        return attended

    def _round_due(self, name: str, stored: Tensor) -> Tensor:
        plan: TensorPlan = getattr(self.plan, name)
        first = max(self.packed[name], plan.residency.sinks)
        due = plan.residency.due(stored.shape[2] - first)
        if plan.codec.identity or due == 0:
            return stored
        order = self.plan.key_order if name == "keys" else self.plan.value_order
        exact = stored[:, :, first : first + due]
        exact = exact if order is None else order.store(exact)
        rounded = plan.codec.decode(*plan.codec.encode(exact), stored.dtype)
        if plan.residency.filter is not None:
            rounded, first = self._filtered(name, plan, exact, rounded), plan.residency.sinks
        rounded = rounded if order is None else order.restore(rounded)
        end = self.packed[name] = first + rounded.shape[2]
        return torch.cat([stored[:, :, :first], rounded, stored[:, :, end:]], dim=2)

    def _filtered(self, name: str, plan: TensorPlan, exact: Tensor, rounded: Tensor) -> Tensor:
        """All packed tokens, after ``exact`` ones have joined them, which are ``rounded``."""
        assert plan.residency.filter is not None
        before = self.rounded.get(name, rounded[:, :, :0])
        sinks, kept = plan.residency.sinks, self.kept.setdefault(name, empty_kept(exact, plan.kept))
        keep(kept[0], kept[1], plan.residency.filter, sinks + before.shape[2], exact)
        self.rounded[name] = torch.cat([before, rounded], dim=2)
        return restored(self.rounded[name], sinks, kept[0], kept[1])

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Crops; a group of tokens that is cut through counts as exact from then on."""
        if self.kept:
            raise OptionError("The oracle of a plan with a filter cannot be cropped.")
        super().crop(*args, **kwargs)
        for name in self.packed:
            plan: TensorPlan = getattr(self.plan, name)
            group, sinks = plan.codec.token_group, plan.residency.sinks
            whole = sinks + (self.get_seq_length() - sinks) // group * group
            self.packed[name] = min(self.packed[name], whole)

    def reset(self) -> None:
        """Forgets everything."""
        super().reset()
        self.packed = {"keys": 0, "values": 0}
        self.rounded, self.kept = {}, {}


class OracleSlidingLayer(OracleLayer):
    """The same for a layer with a sliding window: it keeps all tokens, and shows the last ones."""

    is_sliding = True

    def __init__(self, plan: LayerPlan, sliding_window: int) -> None:
        keep = sliding_window - 1
        keys, values = plan.keys.sliding(keep), plan.values.sliding(keep)
        super().__init__(replace(plan, keys=keys, values=values))
        self.sliding_window = sliding_window

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """See `OracleLayer.update`."""
        shown = self.sliding_window - 1 + key_states.shape[2]
        keys, values = super().update(key_states, value_states)
        return keys[:, :, -shown:], values[:, :, -shown:]

    def get_seq_length(self) -> int:
        """Tokens seen; none is ever dropped."""
        return int(DynamicLayer.get_seq_length(self))

    def activate_past_recording(self) -> None:
        """Nothing is ever dropped."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what attention reads in a step of so many tokens."""
        past = self.get_seq_length()
        shown = min(past, self.sliding_window - 1)
        return shown + query_length, past - shown

    def get_max_length(self) -> int:
        """As transformers' layer."""
        return self.sliding_window


def oracle_cache(plan: Plan, config: Any) -> DynamicCache:
    """A cache for eager generation whose answers a compiled model must reproduce.

    Args:
        plan: e.g. ``kvpass.recipe("kivi-2bit").plan(model.config)``.
        config: of the model.

    Returns:
        To be passed as ``past_key_values`` to the uncompiled model. Layers that kvpass does not
        pack (recurrent ones) are left as they are.
    """
    cache = cast(DynamicCache, DynamicCache(config=config))
    cache.layers = [_oracle_layer(plan.layer_at(i), x) for i, x in enumerate(cache.layers)]
    return cache


def _oracle_layer(plan: LayerPlan, layer: Any) -> Any:
    if type(layer) is DynamicLayer:
        return OracleLayer(plan)
    if type(layer) is DynamicSlidingWindowLayer:
        return OracleSlidingLayer(plan, layer.sliding_window)
    update = getattr(type(layer), "update", None)
    if update is DynamicLayer.update:
        return _extended(layer, OracleLayer(plan))
    if update is DynamicSlidingWindowLayer.update:
        return _extended(layer, OracleSlidingLayer(plan, layer.sliding_window))
    return layer


def _extended(layer: Any, oracle: OracleLayer) -> Any:
    """A layer that keeps more than keys and values (recurrent states, say), which it rounds."""
    kind, own = type(oracle), type(layer)
    layer.__class__ = type(f"{kind.__name__}Of{own.__name__}", (kind, own), {})
    layer.plan, layer.packed = oracle.plan, oracle.packed
    layer.rounded, layer.kept = oracle.rounded, oracle.kept
    return layer
