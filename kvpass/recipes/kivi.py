"""KIVI: keys per channel, values per token, an exact window (Liu et al., 2024, algorithm 1)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvpass.errors import check, check_flag, check_whole
from kvpass.format.codec import Codec
from kvpass.format.retention import RetentionPolicy
from kvpass.format.tensor_plan import TensorPlan
from kvpass.plan import LayerPlan
from kvpass.recipes.base import Recipe


@dataclass(frozen=True)
class Kivi(Recipe):
    """KIVI without calibration.

    Keys are packed ``residual`` tokens at a time when that many are exact; of the values exactly
    the last ``residual`` tokens stay exact.

    Attributes:
        bits: per code of keys and of values: 2, 4 or 8.
        group: tokens that share a scale per key channel, and channels that share one per value
            token. None: 32, or for values the largest part of 32 that divides the head dimension.
        residual: tokens, a multiple of ``group``.
        before_rope: keys are stored before their rotary embedding (KVQuant, section 3.2).
        key_bits, value_bits: of keys, of values alone; None: ``bits``.
    """

    bits: int = 4
    group: int | None = None
    residual: int = 128
    before_rope: bool = False
    key_bits: int | None = None
    value_bits: int | None = None

    def __post_init__(self) -> None:
        for name in ("bits", "key_bits", "value_bits"):
            bits = getattr(self, name)
            fits = isinstance(bits, int) and bits in (2, 4, 8)
            fits = fits or (bits is None and name != "bits")
            check(name, bits, fits, "2, 4, 8 (or the recipe 'fp')")
        check_whole("residual", self.residual, 1)
        if self.group is not None:
            check_whole("group", self.group, 2)
        check_flag("before_rope", self.before_rope)
        # Bad combinations should be reported before any graph is compiled.
        _ = self._keys

    @property
    def name(self) -> str:
        """``kivi-2bit``, ``kivi-4bit`` or ``kivi-8bit``; with other values than keys
        ``kivi-k4v2``."""
        keys, values = self._bits
        return f"kivi-{keys}bit" if keys == values else f"kivi-k{keys}v{values}"

    @property
    def _bits(self) -> tuple[int, int]:
        """Bits of keys, and of values."""
        return self.key_bits or self.bits, self.value_bits or self.bits

    @property
    def _keys(self) -> TensorPlan:
        codec = Codec(self._bits[0], "channel", 32 if self.group is None else self.group)
        return TensorPlan(codec, RetentionPolicy(window=0, pack_every=self.residual))

    def _values(self, group: int) -> TensorPlan:
        return TensorPlan(
            Codec(self._bits[1], "token", group), RetentionPolicy(self.residual, pack_every=1)
        )

    def layer_plan(self, path: str, key_dim: int, value_dim: int) -> LayerPlan:
        """Keys per channel, values per token."""
        group = math.gcd(32, value_dim) if self.group is None else self.group
        plan = LayerPlan(self._keys, self._values(group), before_rope=self.before_rope)
        plan.check(path, key_dim, value_dim)
        return plan

    def unknown_plan(self, path: str, dim: int) -> TensorPlan:
        """As values, in groups that divide ``dim``."""
        return LayerPlan(values=self._values(self.group or 32)).unknown(path, dim)

    def warning(self, query_heads: int, kv_heads: int) -> str | None:
        """KIVI, section 4.2.1: multi-query attention needs 4 bits."""
        if kv_heads == 1 and query_heads > 1 and min(self._bits) < 4:
            return f"{self.name} loses accuracy with one KV head (multi-query); KIVI advises 4 bits"
        return None
