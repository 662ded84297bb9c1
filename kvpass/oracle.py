"""The oracle: what a packed cache must answer, in eager mode and without any graph rewriting."""

from __future__ import annotations

import sys
import weakref
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvpass.cocktail.context import current
from kvpass.errors import OptionError
from kvpass.format.chunked_plan import ChunkedPlan
from kvpass.format.filters import empty_kept, keep, restored
from kvpass.format.quantize import fake_quantize
from kvpass.format.retention import MAX_STEP
from kvpass.format.rope import Rope
from kvpass.format.tensor_plan import TensorPlan
from kvpass.plan import LayerPlan, Plan


class RotaryTables:
    """The cosines and sines that a model computes, as its last call did.

    Attributes:
        rope: what it does with them.
        rows: see `Rope`.
    """

    def __init__(self, module: torch.nn.Module, kind: str) -> None:
        self._kind = kind
        self.rope: Rope
        self.rows: Tensor
        # Not for longer than the cache lives.
        weakref.finalize(self, module.register_forward_hook(_Hook(self)).remove)

    @staticmethod
    def of(model: Any) -> RotaryTables | None:
        """Those of ``model``; None if it has no rotary embedding.

        Raises:
            OptionError: if it has several, or one of unknown pairs.
        """
        found = [m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding")]
        if not found:
            return None
        code = sys.modules[type(found[0]).__module__]
        rotated = code.rotate_half(torch.arange(4)).tolist() if hasattr(code, "rotate_half") else []
        kinds = {(-2, -3, 0, 1): "halves", (-1, 0, -3, 2): "neighbours"}
        if len(found) > 1 or tuple(rotated) not in kinds:
            raise OptionError(
                f"The rotary embeddings of {type(model).__name__} are not known to the oracle."
            )
        return RotaryTables(found[0], kinds[tuple(rotated)])

    def __deepcopy__(self, memo: Any) -> RotaryTables:
        """Copies of a cache are used by the same model."""
        return self

    def see(self, cos: Tensor, sin: Tensor) -> None:
        """Keeps what the model has computed."""
        channels = cos.shape[-1]
        self.rope = Rope.parse(f"{self._kind}0-{channels}")
        half = slice(None, channels // 2)
        if self._kind == "neighbours" and not torch.equal(
            cos[..., half], cos[..., channels // 2 :]
        ):
            half = slice(None, None, 2)
        self.rows = torch.cat([cos[..., half], sin[..., half]], dim=-1)


class _Hook:
    """Tells `RotaryTables` what a module returns, without keeping them alive."""

    def __init__(self, tables: RotaryTables) -> None:
        self._tables = weakref.ref(tables)

    def __call__(self, module: Any, args: Any, result: tuple[Tensor, Tensor]) -> None:
        if (tables := self._tables()) is not None:
            tables.see(*result)

    def __deepcopy__(self, memo: Any) -> Any:
        return _nothing


def _nothing(module: Any, args: Any, result: Any) -> None:
    """The hook of a copied model."""


def inverse_rows(rows: Tensor) -> Tensor:
    """The rows that undo ``rows``."""
    cos, sin = rows.float().chunk(2, dim=-1)
    squared = cos.square() + sin.square()
    return torch.cat([cos / squared, -sin / squared], dim=-1)


class OracleLayer(DynamicLayer):
    """A plain cache layer whose older tokens have been encoded and decoded once.

    ``keys`` and ``values`` are dense; their first ``packed[...]`` tokens are rounded by the codec,
    but for the sinks.
    """

    def __init__(self, plan: LayerPlan, tables: RotaryTables | None = None) -> None:
        super().__init__()
        self.plan = plan
        # The rotary embeddings of the tokens, where keys are stored before them.
        self.tables = tables
        self.rows: Tensor | None = None
        self.packed = {"keys": 0, "values": 0}
        # With a filter: what is packed, as if nothing of it were kept, and what is kept.
        self.rounded: dict[str, Tensor] = {}
        self.kept: dict[str, list[Tensor]] = {}
        # With chunks: tokens before those of this call.
        self._past = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends ``[B, H, n, D]`` and returns what attention reads in this step."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.tables is not None:
            new = self.tables.rows
            self.rows = new if self.rows is None else torch.cat([self.rows, new], dim=1)
        return self._extend("keys", key_states), self._extend("values", value_states)

    def _extend(self, name: str, new: Tensor) -> Tensor:
        """A decode step rounds what was due before it; a prefill attends exactly, then rounds."""
        stored: Tensor = getattr(self, name)
        decode_step = stored.dim() == 4 and new.shape[2] <= MAX_STEP
        if isinstance(getattr(self.plan, name), ChunkedPlan):
            attended = torch.cat([stored, new], dim=2)
            kept = new if decode_step else self._round_chunks(name, new)
            setattr(self, name, torch.cat([stored, kept], dim=2))
            return attended
        if decode_step:
            stored = self._round_due(name, stored)
        attended = torch.cat([stored, new], dim=2)
        setattr(self, name, attended if decode_step else self._round_due(name, attended))
        return attended

    def _round_chunks(self, name: str, new: Tensor) -> Tensor:
        """Each chunk of a prompt ``new`` in its own bits, where it stands."""
        plan: ChunkedPlan = getattr(self.plan, name)
        request, past = current(), self.get_seq_length() if name == "keys" else self._past
        self._past = past
        if request is None or not request.applies(past, new.shape[2]):
            return new
        bits, out = request.bits, new.clone()
        order = self.plan.key_order if name == "keys" else self.plan.value_order
        codecs = {codec.bits: codec for codec in plan.chunk_codecs if not codec.identity}
        for row, (start, asked) in enumerate(zip(bits.starts, bits.bits, strict=True)):
            for chunk, level in enumerate(asked):
                first = start + chunk * bits.chunk
                exact = new[row : row + 1, :, first : first + bits.chunk]
                if level in codecs:
                    exact = exact if order is None else order.store(exact)
                    exact = fake_quantize(codecs[level], exact).to(new.dtype)
                    exact = exact if order is None else order.restore(exact)
                out[row, :, first : first + bits.chunk] = exact[0]
        return out

    def _round_due(self, name: str, stored: Tensor) -> Tensor:
        plan: TensorPlan = getattr(self.plan, name)
        first = max(self.packed[name], plan.retention.sinks)
        due = plan.retention.due(stored.shape[2] - first, first - plan.retention.sinks)
        if plan.codec.identity or due == 0:
            return stored
        order = self.plan.key_order if name == "keys" else self.plan.value_order
        exact = stored[:, :, first : first + due]
        exact = exact if order is None else order.store(exact)
        turns = self.tables.rope if self.tables is not None and name == "keys" else None
        rows = None if self.rows is None else self.rows[:, first : first + due]
        ranges = self.plan.key_ranges if name == "keys" else None
        if turns is not None and rows is not None:
            exact = turns.turn(exact, inverse_rows(rows))
        params = None if ranges is None else ranges.tensor(exact.device)
        rounded = fake_quantize(plan.codec, exact, params).to(stored.dtype)
        if turns is not None and rows is not None:
            rounded = turns.turn(rounded, rows)
        if plan.retention.filter is not None:
            rounded, first = self._filtered(name, plan, exact, rounded), plan.retention.sinks
        rounded = rounded if order is None else order.restore(rounded)
        end = self.packed[name] = first + rounded.shape[2]
        return torch.cat([stored[:, :, :first], rounded, stored[:, :, end:]], dim=2)

    def _filtered(self, name: str, plan: TensorPlan, exact: Tensor, rounded: Tensor) -> Tensor:
        """All packed tokens, after ``exact`` ones have joined them, which are ``rounded``."""
        assert plan.retention.filter is not None
        before = self.rounded.get(name, rounded[:, :, :0])
        sinks, kept = (
            plan.retention.sinks,
            self.kept.setdefault(name, empty_kept(exact, plan.retained)),
        )
        keep(kept[0], kept[1], plan.retention.filter, sinks + before.shape[2], exact)
        self.rounded[name] = torch.cat([before, rounded], dim=2)
        return restored(self.rounded[name], sinks, kept[0], kept[1])

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Crops; a group of tokens that is cut through counts as exact from then on."""
        if self.kept:
            raise OptionError("The oracle of a plan with a filter cannot be cropped.")
        super().crop(*args, **kwargs)
        self.rows = None if self.rows is None else self.rows[:, : self.get_seq_length()]
        for name in self.packed:
            plan: TensorPlan = getattr(self.plan, name)
            group, sinks = plan.codec.token_group, plan.retention.sinks
            whole = sinks + (self.get_seq_length() - sinks) // group * group
            self.packed[name] = min(self.packed[name], whole)

    def reset(self) -> None:
        """Forgets everything."""
        super().reset()
        self.packed = {"keys": 0, "values": 0}
        self.rounded, self.kept, self.rows = {}, {}, None


class OracleSlidingLayer(OracleLayer):
    """The same for a layer with a sliding window: it keeps all tokens, and shows the last ones."""

    is_sliding = True

    def __init__(
        self, plan: LayerPlan, sliding_window: int, tables: RotaryTables | None = None
    ) -> None:
        keep = sliding_window - 1
        keys, values = plan.keys.sliding(keep), plan.values.sliding(keep)
        super().__init__(replace(plan, keys=keys, values=values), tables)
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


def oracle_cache(plan: Plan, config: Any, model: Any = None) -> DynamicCache:
    """A cache for eager generation whose answers a compiled model must reproduce.

    Args:
        plan: e.g. ``kvpass.recipe("kivi-2bit").plan(model.config)``.
        config: of the model.
        model: that is to use it; needed where keys are stored before their rotary embedding.

    Returns:
        To be passed as ``past_key_values`` to the uncompiled model. Layers that kvpass does not
        pack (recurrent ones) are left as they are.
    """
    cache = cast(DynamicCache, DynamicCache(config=config))
    plans = [plan.layer_at(i) for i in range(len(cache.layers))]
    tables = RotaryTables.of(model) if any(p.before_rope for p in plans) else None
    cache.layers = [_oracle_layer(p, x, tables) for p, x in zip(plans, cache.layers, strict=True)]
    return cache


def _oracle_layer(plan: LayerPlan, layer: Any, tables: RotaryTables | None) -> Any:
    if type(layer) is DynamicLayer:
        return OracleLayer(plan, tables)
    if type(layer) is DynamicSlidingWindowLayer:
        return OracleSlidingLayer(plan, layer.sliding_window, tables)
    update = getattr(type(layer), "update", None)
    if update is DynamicLayer.update:
        return _extended(layer, OracleLayer(plan, tables))
    if update is DynamicSlidingWindowLayer.update:
        return _extended(layer, OracleSlidingLayer(plan, layer.sliding_window, tables))
    return layer


def _extended(layer: Any, oracle: OracleLayer) -> Any:
    """A layer that keeps more than keys and values (recurrent states, say), which it rounds."""
    kind, own = type(oracle), type(layer)
    layer.__class__ = type(f"{kind.__name__}Of{own.__name__}", (kind, own), {})
    layer.plan, layer.packed = oracle.plan, oracle.packed
    layer.rounded, layer.kept = oracle.rounded, oracle.kept
    layer.tables, layer.rows = oracle.tables, oracle.rows
    return layer
