"""Cocktail: the bits of each chunk of a prompt by its relevance to the query (Tao et al., 2025)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvpass.cocktail.bits import ChunkBits
from kvpass.cocktail.search import check_shares, chunk_bits
from kvpass.errors import PlanError, check, check_whole, is_number
from kvpass.format.chunked_plan import ChunkedPlan
from kvpass.format.codec import BITS, FP, Codec
from kvpass.format.groups import Axis
from kvpass.format.tensor_plan import TensorPlan
from kvpass.plan import LayerPlan
from kvpass.recipes.base import Recipe

_GROUP = 32


@dataclass(frozen=True)
class Cocktail(Recipe):
    """Chunks of a prompt in the bits that `kvpass.cocktail.use` sets; all else stays exact.

    Keys are quantized per channel within a chunk, values per token.

    Attributes:
        chunk: tokens.
        alpha, beta: where a relevance between the least and the largest is low and high (equations
            2 and 3); for `chunk_bits`.
        bits: for chunks of low, middle and high relevance, ascending; the last is 16: exact.
        clip: the ends of the groups of keys in the fewest bits are multiplied by it; 1, as in the
            paper, leaves them. Rounding adds noise to the scores of a key, and the softmax is
            convex: in 2 bits, chunks that do not matter drown the one that does. Ends closer to
            zero (0.8, say) make their scores smaller. Not for keys with large biases.
    """

    name: ClassVar[str] = "cocktail"
    renamed: ClassVar[dict[str, str]] = {"levels": "bits"}

    chunk: int = 32
    alpha: float = 0.6
    beta: float = 0.1
    bits: tuple[float, ...] = (2, 4, 16)
    clip: float = 1.0

    def __post_init__(self) -> None:
        check_whole("chunk", self.chunk, 2)
        check_shares(self.alpha, self.beta)
        fits = is_number(self.clip) and 0 < self.clip <= 1
        check("clip", self.clip, fits, "above 0, at most 1")
        bits = self.bits
        fits = isinstance(bits, tuple) and all(n in (*BITS, FP.bits) for n in bits)
        fits = fits and len(bits) > 1 and list(bits) == sorted(set(bits)) and bits[-1] == 16
        known = ", ".join(map(str, BITS))
        check("bits", bits, fits, f"a tuple of bits of {known}, ascending, and 16 at its end")
        group = min(_GROUP, self.chunk)
        if self.chunk % group:
            raise PlanError(
                f"chunk={self.chunk} is not supported: it is no multiple of the group of {group} "
                "tokens that share a scale."
            )

    def chunk_bits(self, context: Any, query: str | Sequence[str], **more: Any) -> ChunkBits:
        """`kvpass.cocktail.chunk_bits` with this recipe's chunk, alpha, beta and bits, of which
        there have to be three; ``more`` are its other arguments."""
        own = {name: getattr(self, name) for name in ("chunk", "alpha", "beta", "bits")}
        return chunk_bits(context, query, **own, **more)

    def _plan(self, axis: Axis, group: int, clip: float = 1.0) -> TensorPlan:
        fewest, *others = self.bits[:-1]
        more = (Codec(bits, axis, group) for bits in others)
        codecs = (Codec(fewest, axis, group, clip=float(clip)), *more)
        return ChunkedPlan(chunk_codecs=codecs, chunk=self.chunk)

    def layer_plan(self, path: str, key_dim: int, value_dim: int) -> LayerPlan:
        """Keys per channel, values per token; a request chooses their bits."""
        values = self._plan("token", math.gcd(_GROUP, value_dim))
        plan = LayerPlan(self._plan("channel", min(_GROUP, self.chunk), self.clip), values)
        plan.check(path, key_dim, value_dim)
        return plan
