"""The oracle: what a packed cache must answer, in eager mode and without any graph rewriting."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvpass.cocktail.context import request_for
from kvpass.errors import OptionError
from kvpass.format.chunked_plan import ChunkedPlan
from kvpass.format.filters import retain, with_retained
from kvpass.format.quantize import fake_quantize
from kvpass.format.retention import MAX_STEP
from kvpass.format.rope import Rope
from kvpass.format.tensor_plan import TensorPlan
from kvpass.plan import LayerPlan, Plan


class Rotary:
    """What a model's rotary embedding has returned last.

    Attributes:
        rope: how the model rotates.
        cos_sin: cosines and sines of the last call's tokens, see `Rope`.
    """

    def __init__(self, module: torch.nn.Module, kind: str) -> None:
        self._kind = kind
        self.rope: Rope
        self.cos_sin: Tensor
        # The hook goes when the cache does.
        weakref.finalize(self, module.register_forward_hook(_Hook(weakref.ref(self))).remove)

    @staticmethod
    def of(model: Any) -> Rotary | None:
        """The rotary embedding of ``model``; None if it has none.

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
        return Rotary(found[0], kinds[tuple(rotated)])

    def __deepcopy__(self, memo: Any) -> Rotary:
        """Itself: copies of a cache are used by the same model."""
        return self

    def keep(self, cos: Tensor, sin: Tensor) -> None:
        """Keeps what the model has computed, each pair once."""
        channels = cos.shape[-1]
        self.rope = Rope.parse(f"{self._kind}0-{channels}")
        half = slice(None, channels // 2)
        if self._kind == "neighbours" and not torch.equal(
            cos[..., half], cos[..., channels // 2 :]
        ):
            half = slice(None, None, 2)
        self.cos_sin = torch.cat([cos[..., half], sin[..., half]], dim=-1)


class _Hook:
    """Gives a `Rotary` what its module returns, without keeping it alive."""

    def __init__(self, rotary: Callable[[], Rotary | None]) -> None:
        self._rotary = rotary

    def __call__(self, module: Any, args: Any, result: tuple[Tensor, Tensor]) -> None:
        if (rotary := self._rotary()) is not None:
            rotary.keep(*result)

    def __deepcopy__(self, memo: Any) -> Any:
        """The hook of a copied model, which does nothing."""
        return _nothing


def _nothing(module: Any, args: Any, result: Any) -> None:
    pass


def inverse_cos_sin(cos_sin: Tensor) -> Tensor:
    """The cosines and sines that undo ``cos_sin`` ``[..., channels]``, in float32."""
    cos, sin = cos_sin.float().chunk(2, dim=-1)
    squared = cos.square() + sin.square()
    return torch.cat([cos / squared, -sin / squared], dim=-1)


class OracleLayer(DynamicLayer):
    """A plain cache layer whose older tokens have been encoded and decoded once.

    ``keys`` and ``values`` are dense; their first ``packed[...]`` tokens are rounded by the codec,
    but for the sinks.
    """

    def __init__(self, plan: LayerPlan, rotary: Rotary | None = None) -> None:
        super().__init__()
        self.plan = plan
        # Where keys are stored before their rotary embedding: what rotates them, and all tokens'
        # cosines and sines.
        self.rotary = rotary
        self.cos_sin: Tensor | None = None
        self.packed = {"keys": 0, "values": 0}
        # With a filter: what is packed, as if nothing of it were retained; and what is retained,
        # and its positions.
        self.rounded: dict[str, Tensor] = {}
        self.retained: dict[str, tuple[Tensor, Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends ``[B, H, n, D]`` and returns what attention reads in this step."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.rotary is not None:
            new = self.rotary.cos_sin
            self.cos_sin = new if self.cos_sin is None else torch.cat([self.cos_sin, new], dim=1)
        return self._extend("keys", key_states), self._extend("values", value_states)

    def _extend(self, name: str, new: Tensor) -> Tensor:
        """A decode step rounds what was due before it; a prefill attends exactly, then rounds."""
        stored: Tensor = getattr(self, name)
        past = stored.shape[2] if stored.dim() == 4 else 0
        decode_step = stored.dim() == 4 and new.shape[2] <= MAX_STEP
        if isinstance(getattr(self.plan, name), ChunkedPlan):
            rounded = new if decode_step else self._round_chunks(name, new, past)
            setattr(self, name, torch.cat([stored, rounded], dim=2))
            return torch.cat([stored, new], dim=2)
        if decode_step:
            stored = self._round_due(name, stored)
        attended = torch.cat([stored, new], dim=2)
        setattr(self, name, attended if decode_step else self._round_due(name, attended))
        return attended

    def _round_chunks(self, name: str, new: Tensor, past: int) -> Tensor:
        """Each chunk of a prompt ``new``, behind ``past`` tokens, in its own bits."""
        plan, order, _ = self.plan.stored(name)
        if (request := request_for(past, new.shape[2])) is None:
            return new
        bits, out = request.bits, new.clone()
        codecs = {codec.bits: codec for codec in plan.codecs if not codec.identity}
        for row, (start, asked) in enumerate(zip(bits.starts, bits.bits, strict=True)):
            for first, chunk_bits in zip(count(start, bits.chunk), asked, strict=False):
                if chunk_bits in codecs:
                    x = new[row : row + 1, :, first : first + bits.chunk]
                    x = x if order is None else order.store(x)
                    x = fake_quantize(codecs[chunk_bits], x).to(new.dtype)
                    x = x if order is None else order.restore(x)
                    out[row, :, first : first + bits.chunk] = x[0]
        return out

    def _round_due(self, name: str, stored: Tensor) -> Tensor:
        plan, order, ranges = self.plan.stored(name)
        sinks = plan.retention.sinks
        first = max(self.packed[name], sinks)
        due = plan.retention.due(stored.shape[2] - first, first - sinks)
        if plan.codec.identity or due == 0:
            return stored
        exact = stored[:, :, first : first + due]
        exact = exact if order is None else order.store(exact)
        rope = self.rotary.rope if self.rotary is not None and name == "keys" else None
        cos_sin = None if self.cos_sin is None else self.cos_sin[:, first : first + due]
        if rope is not None and cos_sin is not None:
            exact = rope.rotate(exact, inverse_cos_sin(cos_sin))
        qparams = None if ranges is None else ranges.tensor(exact.device)
        rounded = fake_quantize(plan.codec, exact, qparams).to(stored.dtype)
        if rope is not None and cos_sin is not None:
            rounded = rope.rotate(rounded, cos_sin)
        if plan.retention.filter is not None:
            rounded, first = self._with_retained(name, plan, exact, rounded), sinks
        rounded = rounded if order is None else order.restore(rounded)
        end = self.packed[name] = first + rounded.shape[2]
        return torch.cat([stored[:, :, :first], rounded, stored[:, :, end:]], dim=2)

    def _with_retained(self, name: str, plan: TensorPlan, exact: Tensor, rounded: Tensor) -> Tensor:
        """All packed tokens, after ``exact`` ones have joined them, which are ``rounded``."""
        assert plan.retention.filter is not None
        if name not in self.retained:
            shape = (*exact.shape[:2], plan.retained)
            positions = exact.new_full(shape, -1, dtype=torch.int32)
            self.retained[name] = exact.new_zeros((*shape, exact.shape[3])), positions
            self.rounded[name] = rounded[:, :, :0]
        first = plan.retention.sinks + self.rounded[name].shape[2]
        retain(*self.retained[name], plan.retention.filter, first, exact)
        self.rounded[name] = torch.cat([self.rounded[name], rounded], dim=2)
        return with_retained(self.rounded[name], plan.retention.sinks, *self.retained[name])

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Crops; a group of tokens that is cut through counts as exact from then on."""
        if self.retained:
            raise OptionError("The oracle of a plan with a filter cannot be cropped.")
        super().crop(*args, **kwargs)
        self.cos_sin = None if self.cos_sin is None else self.cos_sin[:, : self.get_seq_length()]
        for name in self.packed:
            plan, _, _ = self.plan.stored(name)
            group, sinks = plan.codec.token_group, plan.retention.sinks
            whole = sinks + (self.get_seq_length() - sinks) // group * group
            self.packed[name] = min(self.packed[name], whole)

    def reset(self) -> None:
        """Forgets everything."""
        super().reset()
        self.packed = {"keys": 0, "values": 0}
        self.rounded, self.retained, self.cos_sin = {}, {}, None


class OracleSlidingLayer(OracleLayer):
    """`OracleLayer` with a sliding window: it keeps all tokens, and shows the last ones."""

    is_sliding = True

    def __init__(self, plan: LayerPlan, sliding_window: int, rotary: Rotary | None = None) -> None:
        keep = sliding_window - 1
        keys, values = plan.keys.sliding(keep), plan.values.sliding(keep)
        super().__init__(replace(plan, keys=keys, values=values), rotary)
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
        """The window, as transformers' layer."""
        return self.sliding_window


def oracle_cache(plan: Plan, config: Any, model: Any = None) -> DynamicCache:
    """A cache for eager generation whose answers a compiled model must reproduce.

    Args:
        plan: e.g. ``kvpass.recipe("kivi-2bit").plan(model.config)``.
        config: the model's.
        model: the model itself; needed where keys are stored before their rotary embedding.

    Returns:
        To be passed as ``past_key_values`` to the uncompiled model. Layers that kvpass does not
        pack (recurrent ones) are left as they are.
    """
    cache = cast(DynamicCache, DynamicCache(config=config))
    plans = [plan.layer_at(i) for i in range(len(cache.layers))]
    rotary = Rotary.of(model) if any(p.before_rope for p in plans) else None
    cache.layers = [_oracle_layer(p, x, rotary) for p, x in zip(plans, cache.layers, strict=True)]
    return cache


def _oracle_layer(plan: LayerPlan, layer: Any, rotary: Rotary | None) -> Any:
    own, update = type(layer), getattr(type(layer), "update", None)
    if update is DynamicLayer.update:
        oracle = OracleLayer(plan, rotary)
    elif update is DynamicSlidingWindowLayer.update:
        oracle = OracleSlidingLayer(plan, layer.sliding_window, rotary)
    else:
        return layer
    if own in (DynamicLayer, DynamicSlidingWindowLayer):
        return oracle
    # It keeps more than keys and values: recurrent states, say.
    kind = type(oracle)
    layer.__class__ = type(f"{kind.__name__}Of{own.__name__}", (kind, own), {})
    vars(layer).update(vars(oracle))
    return layer
