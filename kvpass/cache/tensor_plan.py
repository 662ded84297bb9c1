"""`TensorPlan`: how the tokens of one cache tensor are stored."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

import torch

from kvpass.cache.codec import FP, NUMBER, Codec
from kvpass.cache.levels import check_levels, labels, level_names
from kvpass.cache.residency import MAX_STEP, Residency
from kvpass.cache.rope import Rope
from kvpass.errors import PlanError, shown

# Capacities are whole tiles; two at least, since the compiler specialises dimensions of size 0 and
# 1.
TILE = 128

_PLAN = re.compile(
    r"(?P<codec>[^/]+)(/(sinks=(?P<sinks>\d+),)?window=(?P<window>\d+),flush=(?P<flush>\d+)"
    r"(,pivotal=(?P<pivotal>0\.\d+))?(,fraction=(?P<fraction>0\.\d+))?"
    r"(,kept=(?P<kept>\d+),filter=(?P<filter>\w+))?)?"
    r"(/chunk=(?P<chunk>\d+))?"
    r"(/keep=(?P<keep>\d+))?(/room=(?P<room>\d+))?(/rope=(?P<rope>\w+-\d+))?"
)

_LIST = re.compile(rf"(?<=clip|izes|able){NUMBER}(?:,{NUMBER})+")


@dataclass(frozen=True)
class Segment:
    """A run of tokens stored with one codec. ``ring`` is its fixed number of slots, None if it
    grows."""

    codec: Codec
    ring: int | None = None


@dataclass(frozen=True)
class TensorPlan:
    """How one cache tensor (the keys or the values of one layer) is stored.

    Attributes:
        codec: of the tokens that have left the exact window.
        residency: which those are.
        keep: tokens that a sliding window leaves in the cache between two steps, None for all.
            Token ``t`` is then stored at slot ``t % capacity``, so that whole groups leave by being
            overwritten.
        room: tokens of a static cache's buffer, None if the tensor grows. Its logical length is
            always ``room``; tokens that are not written yet are zeros. ``keep`` is then one less:
            where a static window is full, a new token takes the place of the oldest.
        rope: keys are stored before their rotary embedding, which they get when they are read.
        levels: codecs of the chunks of a prompt, from least to most bits (Cocktail, section 4);
            which chunk gets which is data of each request, see `kvpass.ops.reorder_chunks`. All
            other tokens are exact: ``codec`` is the identity then.
        chunk: with levels, a chunk's tokens are a multiple of this; 0 without.

    Raises:
        PlanError: if whole groups of tokens cannot be packed at a time, if there are sinks
            although a window slides, or if there are levels beside anything else.
    """

    codec: Codec = FP
    residency: Residency = field(default_factory=Residency)
    keep: int | None = None
    room: int | None = None
    rope: Rope | None = None
    levels: tuple[Codec, ...] = ()
    chunk: int = 0

    def __post_init__(self) -> None:
        if self.levels or self.chunk:
            self._check_levels()
        if self.room is not None and self.keep != self.room - 1:
            raise PlanError(f"room={self.room} needs keep={self.room - 1}, not keep={self.keep}.")
        for name in ("keep", "room"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise PlanError(
                    f"{name}={shown(value)} is not supported; allowed: a positive number of tokens."
                )
        if self.keep is not None and (self.sinks or self.kept):
            raise PlanError(
                f"sinks={self.sinks} and kept={self.kept} cannot stay where only {self.keep} "
                "tokens do."
            )
        if self.keep is not None and self.grows:
            raise PlanError(f"No ratio of the tokens can stay exact where only {self.keep} stay.")
        if self.residency.flush % self.codec.token_group:
            raise PlanError(
                f"group {self.codec.token_group} of {self.codec} does not divide the residual of "
                f"{self.residency.flush} tokens that are packed at a time."
            )

    def _check_levels(self) -> None:
        alone = self.codec.identity and self.residency == Residency()
        if not alone or (self.keep, self.room, self.rope) != (None, None, None):
            raise PlanError(f"Levels of chunks ({self}) take no window, sinks or rotary embedding.")
        check_levels(self.levels, self.chunk)

    def one_codec(self) -> None:
        """For what stores all tokens by one codec.

        Raises:
            PlanError: if this plan has levels.
        """
        if self.levels:
            raise PlanError(
                f"The bits of chunks ({self}) are those of a request; this needs a plan of one "
                "codec for all tokens."
            )

    def __str__(self) -> str:
        if self.levels:
            return "|".join(map(str, (*self.levels, self.codec))) + f"/chunk={self.chunk}"
        text = str(self.codec)
        if not self.codec.identity:
            sinks = f"sinks={self.sinks}," if self.sinks else ""
            text += f"/{sinks}window={self.residency.window},flush={self.residency.flush}"
            for name in ("pivotal", "fraction"):
                if ratio := getattr(self.residency, name):
                    text += f",{name}={ratio}"
            if self.kept:
                text += f",kept={self.kept},filter={self.residency.filter}"
        if self.keep is not None:
            text += f"/keep={self.keep}"
        if self.room is not None:
            text += f"/room={self.room}"
        return text if self.rope is None else f"{text}/rope={self.rope}"

    def brief(self) -> str:
        """Printed for people: of lists with a number for each group, the least and the largest."""
        return _LIST.sub(_ends, str(self))

    @staticmethod
    @cache
    def parse(text: str) -> TensorPlan:
        """The plan that prints as ``text``, e.g. ``int2.token32/window=128,flush=1``."""
        match = _PLAN.fullmatch(text)
        exact = match is not None and match["codec"].split("|")[-1] == "fp"
        if match is None or (match["window"] is None) != exact:
            raise PlanError(
                f"Tensor plan {shown(text)} cannot be read; allowed: 'fp' or e.g. "
                "'int2.channel32/window=0,flush=128', 'int2.channel32|int4.channel32|fp/chunk=32'."
            )
        *levels, last = match["codec"].split("|")
        codec = Codec.parse(last)
        residency = Residency()
        if not codec.identity:
            window, flush, sinks, kept = (
                int(match[name] or 0) for name in ("window", "flush", "sinks", "kept")
            )
            ratios = (float(match[name] or 0) for name in ("pivotal", "fraction"))
            residency = Residency(window, flush, sinks, kept, match["filter"], *ratios)
        keep, room = (int(match[name]) if match[name] else None for name in ("keep", "room"))
        rope = Rope.parse(match["rope"]) if match["rope"] else None
        codecs = tuple(map(Codec.parse, levels))
        return TensorPlan(codec, residency, keep, room, rope, codecs, int(match["chunk"] or 0))

    def sliding(self, keep: int) -> TensorPlan:
        """This plan for a cache that keeps the last ``keep`` tokens.

        The identity where the exact window would hold all of them: packing would only add to it.
        Without sinks and filter: the window forgets the first tokens, and with them their
        positions. Without a ratio: what the window keeps does not grow. Without levels: all its
        tokens get that in the middle.
        """
        if self.levels:
            return self.uniform.sliding(keep)
        if keep <= self.residency.window + self.residency.flush:
            return TensorPlan(keep=keep, rope=self.rope)
        return replace(self, residency=self.residency.window_only(), keep=keep)

    @property
    def uniform(self) -> TensorPlan:
        """Where chunks cannot have levels of their own: the one in the middle for all tokens, with
        an exact window as KIVI has."""
        codec = self.levels[len(self.levels) // 2]
        if codec.identity:
            return TensorPlan()
        channel = codec.axis == "channel"
        return TensorPlan(codec, Residency(0, self.tile) if channel else Residency(TILE, 1))

    def static(self, room: int) -> TensorPlan:
        """This plan for a static cache's buffer of ``room`` tokens.

        Without sinks, filter and ratio, as `sliding`: a static window forgets its first tokens when
        it is full, and the graph that begins one looks like the graph that begins a buffer which
        never slides.
        """
        return replace(self, residency=self.residency.window_only(), keep=room - 1, room=room)

    def visible(self, total: int, new: int) -> int:
        """How many of ``total`` tokens the attention of a step that has added ``new`` can see: the
        last ones."""
        return total if self.keep is None else min(total, self.keep + new)

    @property
    def sinks(self) -> int:
        """First tokens that stay exact for ever (0 for ``fp``, which stores all of them so)."""
        return 0 if self.codec.identity else self.residency.sinks

    @property
    def kept(self) -> int:
        """Further tokens of every KV head that stay exact (0 for ``fp``)."""
        return 0 if self.codec.identity else self.residency.kept

    @property
    def grows(self) -> bool:
        """The exact window has more slots for longer contexts (never for ``fp``)."""
        return self.residency.grows and not self.codec.identity

    @property
    def ring(self) -> int:
        """Slots of the exact window (0 for ``fp``); if a ratio stays exact, the least number."""
        return self.slots(0)

    def slots(self, tokens: int) -> int:
        """Slots of the exact window: what it can hold, and room for one step (0 for ``fp``).

        Args:
            tokens: of which a ratio stays exact; may be symbolic. Room for one step more is then
                included: a failed one must not overwrite what a pivotal ratio has made it pack.
        """
        if self.codec.identity:
            return 0
        window, flush = self.residency.window, self.residency.flush
        if self.grows:
            # Where (1 - ratio) of the tokens are a flush and a step, steps leave no more of them.
            numerator, denominator = self.residency.ratio
            settled = -(-(flush + MAX_STEP) * denominator // (denominator - numerator))
            window = self.residency.stay(torch.sym_max(tokens, settled)) + MAX_STEP
        return window + flush + MAX_STEP - 1

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Oldest tokens first."""
        packed = Segment(self.codec)
        if self.codec.identity:
            return (*map(Segment, self.levels), packed)
        sinks = (Segment(FP, self.sinks),) if self.sinks else ()
        return (*sinks, packed, Segment(FP, None if self.grows else self.ring))

    @cached_property
    def state_names(self) -> tuple[str, ...]:
        """The inner tensors of a `PackedKV` with this plan, in the order in which ops take them."""
        rotary = ("rotary",) if self.rope is not None else ()
        return (*self.own_names[:-1], *rotary, "ends")

    @cached_property
    def own_names(self) -> tuple[str, ...]:
        """`state_names` but for what all layers share."""
        if self.levels:
            return (*self.made_names[:-1], *self.place_names, "ends")
        if self.codec.identity:
            return ("codes", "ends")
        sinks = ("sinks",) if self.sinks else ()
        outliers = ("outliers",) if self.codec.outliers else ()
        kept = ("kept", "places") if self.kept else ()
        return ("codes", "params", "window", *sinks, *outliers, *kept, "ends")

    @cached_property
    def made_names(self) -> tuple[str, ...]:
        """What `kvpass.ops.reorder_chunks` makes of a prompt: the exact tokens, and codes and
        params of each level; and the ends."""
        return ("codes", *level_names(self.levels), "ends")

    @cached_property
    def place_names(self) -> tuple[str, ...]:
        """The positions of the tokens of each level, and of the exact ones."""
        return (*(f"places{i}" for i in range(len(self.levels))), "places")

    @property
    def extended_names(self) -> tuple[str, ...]:
        """What ``append`` extends, in the order in which it takes them."""
        return ("codes", "ends") if self.levels else self.own_names

    @cached_property
    def labels(self) -> tuple[float, ...]:
        """The bits by which a request asks for each level, and for exact tokens."""
        return labels(self.levels)

    @property
    def tile(self) -> int:
        """Capacities are multiples of this many tokens."""
        return math.lcm(TILE, self.codec.token_group, self.chunk or 1)

    def capacity(self, tokens: int) -> int:
        """Tokens to make room for when ``tokens`` are to be packed. ``tokens`` may be symbolic.

        Where a window slides: when ``tokens`` are to stay readable, which may begin and end within
        a tile.
        """
        if self.keep is not None:
            tokens = torch.sym_max(tokens, self.keep + MAX_STEP) + self.tile - 1
        tiles: int = torch.sym_max(-(-tokens // self.tile), 2)
        return tiles * self.tile

    def logical(self, tokens: int) -> int:
        """The logical length of a cache tensor after a first prompt of ``tokens``."""
        if self.room is not None:
            return self.room
        return tokens if self.keep is None else min(tokens, self.keep)

    def skipped(self, tokens: int) -> int:
        """Of a first prompt's ``tokens``, how many whole flushes of the oldest no later step can
        see. ``tokens`` may be symbolic."""
        if self.keep is None:
            return 0
        beyond: int = torch.sym_max(tokens - (self.room or self.keep), 0)
        return beyond // self.residency.flush * self.residency.flush

    def packed(self, tokens: int) -> int:
        """Of ``tokens`` that arrive at once, how many a prefill packs. ``tokens`` may be
        symbolic."""
        if self.codec.identity:
            return tokens
        return self.residency.due(tokens - self.sinks)


def _ends(found: re.Match[str]) -> str:
    numbers = sorted(found[0].split(","), key=float)
    return f"{numbers[0]}..{numbers[-1]}"
