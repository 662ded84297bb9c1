"""`TensorPlan`: how the tokens of one cache tensor are stored."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any, ClassVar, Self

import torch

from kvpass.errors import PlanError, shown
from kvpass.format.codec import FP, NUMBER, Codec
from kvpass.format.layout import Field, Overwritten, StateLayout, codec_fields, codec_sizes
from kvpass.format.retention import MAX_STEP, RetentionPolicy
from kvpass.format.rope import Rope

# Capacities are whole tiles; two at least, since the compiler specialises dimensions of size 0 and
# 1.
TILE = 128

_PLAN = re.compile(
    r"(?P<codec>[^/|]+)(/(sinks=(?P<sinks>\d+),)?window=(?P<window>\d+),pack_every=(?P<pack_every>\d+)"
    r"(,pivotal=(?P<pivotal>0\.\d+))?(,fraction=(?P<fraction>0\.\d+))?"
    r"(,retained=(?P<retained>\d+),filter=(?P<filter>\w+))?)?"
    r"(/window_size=(?P<window_size>\d+))?(/room=(?P<room>\d+))?(/rope=(?P<rope>\w+-\d+))?"
)
# The fields of a `RetentionPolicy` as they are printed, and how they are read.
_RETENTION: dict[str, Callable[[str], Any]] = {
    "sinks": int, "window": int, "pack_every": int, "pivotal": float, "fraction": float,
    "retained": int, "filter": str,
}  # fmt: skip

_LIST = re.compile(rf"(?<=clip|izes|book){NUMBER}(?:,{NUMBER})+")


@dataclass(frozen=True)
class Segment:
    """A run of tokens stored with one codec. ``ring`` is its fixed number of slots, None if it
    grows."""

    codec: Codec
    ring: int | None = None


@dataclass(frozen=True)
class TensorPlan:
    """The storage of one cache tensor (the keys or the values of one layer).

    Attributes:
        codec: the storage of tokens that have left the exact window.
        retention: which tokens stay exact.
        window_size: tokens that a sliding window leaves in the cache between two steps, None for
            all. Token ``t`` is then stored at slot ``t % capacity``, so that whole groups leave by
            being overwritten.
        room: tokens of a static cache's buffer, None if the tensor grows. Its logical length is
            always ``room``; tokens that are not written yet are zeros. ``window_size`` is then one
            less: where a static window is full, a new token takes the place of the oldest.
        rope: keys are stored before their rotary embedding, which they get when they are read.

    Raises:
        PlanError: if whole groups of tokens cannot be packed at a time, or if there are sinks
            although a window slides.
    """

    # Whether keys may be stored before their rotary embedding.
    takes_rope: ClassVar[bool] = True
    # Behind the names of the ops that work on tokens stored so.
    op_suffix: ClassVar[str] = ""
    # Whether the ends of segments are each counted on its own.
    side_by_side: ClassVar[bool] = False

    codec: Codec = FP
    retention: RetentionPolicy = field(default_factory=RetentionPolicy)
    window_size: int | None = None
    room: int | None = None
    rope: Rope | None = None

    def __post_init__(self) -> None:
        if self.room is not None and self.window_size != self.room - 1:
            raise PlanError(
                f"room={self.room} needs window_size={self.room - 1}, not {self.window_size}."
            )
        for name in ("window_size", "room"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                allowed = "a positive number of tokens"
                raise PlanError(f"{name}={shown(value)} is not supported; allowed: {allowed}.")
        if self.window_size is not None and (self.sinks or self.retained):
            raise PlanError(
                f"sinks={self.sinks} and retained={self.retained} cannot stay where only "
                f"{self.window_size} tokens do."
            )
        if self.window_size is not None and self.grows:
            tokens = self.window_size
            raise PlanError(f"No ratio of the tokens can stay exact where only {tokens} stay.")
        if self.retention.pack_every % self.codec.token_group:
            raise PlanError(
                f"group {self.codec.token_group} of {self.codec} does not divide the residual of "
                f"{self.retention.pack_every} tokens that are packed at a time."
            )

    def __getstate__(self) -> dict[str, Any]:
        """The fields, without what is computed of them."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def __str__(self) -> str:
        parts = [str(self.codec)]
        if not self.codec.identity:
            values = ((name, getattr(self.retention, name)) for name in _RETENTION)
            printed = (f"{name}={value}" for name, value in values if value or name == "window")
            parts.append(",".join(printed))
        limits = ((name, getattr(self, name)) for name in ("window_size", "room", "rope"))
        return "/".join([*parts, *(f"{name}={x}" for name, x in limits if x is not None)])

    def summary(self) -> str:
        """The plan as people read it: of lists with a number for each group, the extremes."""

        def extremes(found: re.Match[str]) -> str:
            numbers = sorted(found[0].split(","), key=float)
            return f"{numbers[0]}..{numbers[-1]}"

        return _LIST.sub(extremes, str(self))

    @classmethod
    def read(cls, text: str) -> Self | None:
        """The plan that prints as ``text``; None if none of this kind does."""
        match = _PLAN.fullmatch(text)
        if match is None or (match["window"] is None) != (match["codec"] == "fp"):
            return None
        retention = {n: read(x) for n, read in _RETENTION.items() if (x := match[n])}
        window_size, room = (int(x) if (x := match[n]) else None for n in ("window_size", "room"))
        rope = Rope.parse(match["rope"]) if match["rope"] else None
        codec = Codec.parse(match["codec"])
        return cls(codec, RetentionPolicy(**retention), window_size, room, rope)

    def sliding(self, window_size: int) -> TensorPlan:
        """This plan for a cache that keeps the last ``window_size`` tokens.

        The identity where the exact window would hold all of them: packing would only add to it.
        Without sinks and filter: the window forgets the first tokens, and with them their
        positions. Without a ratio: what the window keeps does not grow.
        """
        if window_size <= self.retention.window + self.retention.pack_every:
            return TensorPlan(window_size=window_size, rope=self.rope)
        return replace(self, retention=self.retention.window_only(), window_size=window_size)

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """The codecs of packed tokens."""
        return (self.codec,)

    @property
    def uniform(self) -> TensorPlan:
        """This plan where all packed tokens need the same codec."""
        return self

    def one_codec(self) -> None:
        """Refuses a plan that stores packed tokens by several codecs.

        Raises:
            PlanError: if this is one.
        """
        if self.uniform is not self:
            raise PlanError(
                f"The bits of chunks ({self}) are those of a request; this needs a plan of one "
                "codec for all tokens."
            )

    def unsupported_pair(self, values: TensorPlan) -> str | None:
        """Why keys stored so cannot be attended to beside ``values``, or None."""
        if type(values) is not type(self):
            return f"keys {self} and values {values} do not split a prompt into the same chunks"
        return None

    def static(self, room: int) -> TensorPlan:
        """This plan for a static cache's buffer of ``room`` tokens.

        Without sinks, filter and ratio, as `sliding`: a static window forgets its first tokens when
        it is full, and the graph that begins one looks like the graph that begins a buffer which
        never slides.
        """
        retention = self.retention.window_only()
        return replace(self, retention=retention, window_size=room - 1, room=room)

    def length(self, ends: Sequence[int]) -> int:
        """The number of tokens of a sequence whose segments end at ``ends``."""
        return ends[-1]

    def visible(self, total: int, new: int) -> int:
        """The number of tokens, of ``total`` the last ones, that attention sees in a step which has
        added ``new``."""
        return total if self.window_size is None else min(total, self.window_size + new)

    @property
    def sinks(self) -> int:
        """First tokens that stay exact for ever (0 for ``fp``, which stores all of them so)."""
        return 0 if self.codec.identity else self.retention.sinks

    @property
    def retained(self) -> int:
        """Further tokens of every KV head that stay exact (0 for ``fp``)."""
        return 0 if self.codec.identity else self.retention.retained

    @property
    def grows(self) -> bool:
        """The exact window has more slots for longer contexts (never for ``fp``)."""
        return self.retention.grows and not self.codec.identity

    @property
    def ring(self) -> int:
        """Slots of the exact window (0 for ``fp``); if a ratio stays exact, at least so many."""
        return self.ring_slots(0)

    def ring_slots(self, tokens: int) -> int:
        """Slots of the exact window: what it can hold, and room for one step (0 for ``fp``).

        Args:
            tokens: their number, of which a ratio stays exact; may be symbolic. Room for one step
                more is then included: a failed one must not overwrite what a pivotal ratio has made
                it pack.
        """
        if self.codec.identity:
            return 0
        window, pack_every = self.retention.window, self.retention.pack_every
        if self.grows:
            # Where (1 - ratio) of the tokens are a packed run and a step, steps leave no more.
            numerator, denominator = self.retention.ratio
            settled = -(-(pack_every + MAX_STEP) * denominator // (denominator - numerator))
            window = self.retention.stay(torch.sym_max(tokens, settled)) + MAX_STEP
            return window + pack_every + MAX_STEP - 1
        # Whole pages of memory, where a step's slots of all heads are.
        return -(-(window + pack_every - 1) // MAX_STEP) * MAX_STEP + MAX_STEP

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments, that of the oldest tokens first."""
        packed = Segment(self.codec)
        if self.codec.identity:
            return (packed,)
        sinks = (Segment(FP, self.sinks),) if self.sinks else ()
        return (*sinks, packed, Segment(FP, None if self.grows else self.ring))

    @cached_property
    def layout(self) -> StateLayout:
        """The tensors that tokens are stored in."""
        # Ends change otherwise than by new tokens behind the last ones where a step may pack tokens
        # that another one of its length would not.
        often: Overwritten = "step" if self.retention.pivotal or self.retained else "prefill"
        shape = ("batch", len(self.segments))
        ends = Field("segment_ends", shape, torch.int32, overwritten=often)
        return StateLayout(*self._token_fields(), ends, *self._shared_fields())

    @property
    def _ring_overwritten(self) -> Overwritten:
        """The steps in which tokens replace others in fields that grow: these are rings where a
        window slides."""
        return "never" if self.window_size is None else "prefill"

    def _token_fields(self) -> tuple[Field, ...]:
        tokens, ring = ("batch", "heads"), self._ring_overwritten
        grown = partial(Field, grows="capacity", overwritten=ring)
        if self.codec.identity:
            return (grown("codes", (*tokens, "capacity", "channels"), exact=True),)
        found = [*codec_fields(self.codec, "", ring)]
        window = ("window", (*tokens, "window", "channels"))
        grows = "window" if self.grows else None
        found.append(Field(*window, grows=grows, exact=True, overwritten="prefill"))
        if self.sinks:
            found.append(Field("sinks", (*tokens, self.sinks, "channels"), exact=True))
        for name, dtype, size in self.codec.extras:
            if size:
                found.append(grown(name, ("batch", "capacity", size), dtype))
        if count := self.retained:
            every = partial(Field, overwritten="step")
            found.append(every("retained", (*tokens, count, "channels"), exact=True, fill=0))
            found.append(every("positions", (*tokens, count), torch.int32, fill=-1))
        return tuple(found)

    def _shared_fields(self) -> tuple[Field, ...]:
        if self.rope is None:
            return ()
        shape, ring = ("rows", "cos_sin", self.rope.channels), self._ring_overwritten
        return (Field("cos_sin", shape, grows="cos_sin", shared=True, overwritten=ring),)

    @cached_property
    def growing(self) -> dict[str, int]:
        """The fields that grow with the context, and along which dimension; none in a static
        cache."""
        if self.room is not None:
            return {}
        return {f.name: f.token_dim for f in self.layout.fields if f.grows is not None}

    def sizes(self, shape: Sequence[int], tokens: int) -> dict[str, int]:
        """The sizes that the shapes of `layout` name, where ``tokens`` are packed of a prompt of
        this ``shape`` ``[B, H, T, D]``."""
        batch, heads, length, channels = shape
        found = {"batch": batch, "heads": heads, "channels": channels}
        found |= {"capacity": self.capacity(tokens), "window": self.ring_slots(length - self.sinks)}
        return found | codec_sizes(self.codec, "", heads, channels)

    @property
    def tile(self) -> int:
        """Capacities are multiples of this many tokens."""
        return math.lcm(TILE, self.codec.token_group)

    def capacity(self, tokens: int) -> int:
        """Tokens to make room for when ``tokens`` are to be packed. ``tokens`` may be symbolic.

        Where a window slides: when ``tokens`` are to stay readable, which may begin and end within
        a tile.
        """
        if self.window_size is not None:
            tokens = torch.sym_max(tokens, self.window_size + MAX_STEP) + self.tile - 1
        tiles: int = torch.sym_max(-(-tokens // self.tile), 2)
        return tiles * self.tile

    def logical(self, tokens: int) -> int:
        """The logical length of a cache tensor after a first prompt of ``tokens``."""
        if self.room is not None:
            return self.room
        return tokens if self.window_size is None else min(tokens, self.window_size)

    def skipped(self, tokens: int) -> int:
        """The number of the oldest of a first prompt's ``tokens`` that no later step can see, in
        whole runs that are packed together. ``tokens`` may be symbolic."""
        if self.window_size is None:
            return 0
        beyond: int = torch.sym_max(tokens - (self.room or self.window_size), 0)
        return beyond // self.retention.pack_every * self.retention.pack_every

    def packed(self, tokens: int) -> int:
        """The number of tokens that a prefill of ``tokens`` packs. ``tokens`` may be symbolic."""
        if self.codec.identity:
            return tokens
        return self.retention.due(tokens - self.sinks)
