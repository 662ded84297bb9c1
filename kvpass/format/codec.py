"""`Codec`: how a block of keys or values is stored; `kvpass.format.quantize` encodes and decodes.

Layout (the same on every device, so that kernels and reference exchange bytes):

* *words*, int16 ``[B, H, T, W]``: the codes of each token, see `kvpass.format.words`.
* *params*: a scale and a minimum for each group. Per channel: ``[B, H, T/G, D]``, one per group of
  ``G`` consecutive tokens and channel; ``[B, H, 1, D]`` if calibrated for all tokens. Per token:
  ``[B, H, D/G, T]``, one per token and group of ``G`` channels, or ``[B, H/k, 1, T]`` where a group
  spans ``k`` heads. int32 ``minimum << 16 | scale``, both IEEE half, or int16
  ``minimum << 8 | scale``, both fp8-e4m3.
* *outliers*, int32 ``[B, T, S]``: elements of a token that are stored as they are, ``value << 16 |
  place``: IEEE half, and ``head * D + channel``, or ``0xFFFF`` for none.

An element decodes to ``code * scale + minimum``, or ``table[code] * scale + minimum``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np
import torch

from kvpass.errors import OptionError, shown
from kvpass.format.groups import Axis, Groups
from kvpass.format.words import BY_BITS, PACK11, TERNARY, WordFormat

QParams = Literal["half", "fp8"]
BITS = (1, 1.5, 2, 3, 4, 8)
# The place of an outlier slot that is empty: no element has it.
NOWHERE = 0xFFFF
NUMBER = r"-?\d+(?:\.\d+)?(?:e-\d+)?"
_LIST = rf"{NUMBER}(?:,{NUMBER})*"


def _listed(numbers: tuple[float, ...]) -> str:
    return ",".join(map(str, numbers))


def _floats(text: str) -> tuple[float, ...]:
    return tuple(float(x) for x in text.split(",") if x)


class _Suffix(NamedTuple):
    """A field of `Codec` in its printed form: behind a point its word, then its value."""

    field: str
    word: str
    value: str = ""
    read: Callable[[str], Any] = lambda _: True
    write: Callable[[Any], str] = lambda _: ""


_SUFFIXES = (
    _Suffix("ternary_in_2bit", "ternary_in_2bit"),
    _Suffix("half_split", "half_split"),
    _Suffix("sizes", "sizes", r"\d+(?:,\d+)*", lambda x: tuple(map(int, x.split(","))), _listed),
    _Suffix("qparams", "fp8", read=lambda _: "fp8"),
    # A comma behind a single factor of a tuple: it is a tuple still.
    _Suffix("clip", "clip", rf"{_LIST},?",
            lambda x: _floats(x) if "," in x else float(x),
            lambda x: _listed(x) + "," * (len(x) == 1) if isinstance(x, tuple) else str(x)),
    _Suffix("outliers", "outliers", r"\d+", int, str),
    _Suffix("codebook", "codebook", _LIST, _floats, _listed),
    _Suffix("qnorm", "qnorm", f"{NUMBER},{NUMBER}", _floats, _listed),
    _Suffix("pack11", "pack11"),
)  # fmt: skip
_NAME = re.compile(
    r"(?P<kind>int|nuq)(?P<bits>1\.5|\d+)\.(?P<axis>channel|token)(?P<group>\d+)"
    + "".join(rf"(?:\.{s.word}(?P<{s.field}>{s.value}))?" for s in _SUFFIXES)
)


@dataclass(frozen=True)
class Codec:
    """Asymmetric quantization of groups, uniform (KIVI, eq. 1-2) or to the values of a codebook
    (KVQuant, section 3.3), or the identity ``fp``.

    Attributes:
        bits: bits per code, one of 1, 1.5 (three values), 2, 3, 4, 8; 16 is the identity codec,
            which stores the model's own dtype.
        axis: what a group belongs to. ``channel``: ``group`` consecutive tokens of one channel
            (keys in KIVI). ``token``: ``group`` consecutive channels of one token (values in KIVI);
            more than a head has are those of several heads.
        group: elements that share one scale and one minimum; 0 for the identity, and per channel
            where all tokens do: then both are calibrated (keys in KVQuant).
        clip: the ends of every group are multiplied by this before it is encoded, and what lies
            beyond them saturates (SKVQ, eq. 3). Meant for groups on both sides of zero, as the
            channels of a token are. Per token also one number for each group, head by head.
        qparams: what scales and minima are rounded to: ``half``, or ``fp8`` (fp8-e4m3, SKVQ
            section 3.2), which halves their bits.
        ternary_in_2bit: three values are stored in 2 bits each instead of base 3.
        half_split, sizes: which channels of a token are a group, see `kvpass.format.groups.Groups`.
        outliers: elements of each token, of all heads, that are stored as they are (KVQuant,
            section 3.4). Calibrated ranges: those furthest beyond them. Else a group has all heads,
            and its range is that of the others: half of them are the largest elements, half the
            least.
        codebook: what the codes stand for, of a range from -1 to 1, in rising order.
        qnorm: factor and offset of the codebook in decoding (Q-Norm, KVQuant, section 3.5).
        pack11: 11 codes of 3 bits share 32 bits, the last of which has 2 (KVmix): up
            to an eleventh of a head's channels saturate at code 3 of 7. Prefer 3 bits each: heads
            of 64, 96, 128, 192 or 256 channels take as many bytes with less error, those of 80 or
            112 fewer. From 176 on some take fewer so (64 instead of 66).

    Raises:
        OptionError: if a field has a value that is not allowed.
    """

    bits: float = 16
    axis: Axis = "token"
    group: int = 0
    clip: float | tuple[float, ...] = 1.0
    qparams: QParams = "half"
    ternary_in_2bit: bool = False
    half_split: bool = False
    sizes: tuple[int, ...] | None = None
    outliers: int = 0
    codebook: tuple[float, ...] | None = None
    qnorm: tuple[float, float] | None = None
    pack11: bool = False

    def __post_init__(self) -> None:
        if all(getattr(self, f.name) == f.default for f in fields(self) if f.name != "axis"):
            return
        self._check_codes()
        self._check_groups()
        self._check_ranges()

    def _refuse(self, name: str, allowed: str, where: str = "") -> NoReturn:
        value = shown(getattr(self, name))
        raise OptionError(f"{name}={value} is not supported{where}; allowed: {allowed}.")

    def _check_codes(self) -> None:
        if self.bits not in BITS or (type(self.bits) is not int and self.bits != 1.5):
            self._refuse("bits", "1, 1.5, 2, 3, 4, 8 (or the recipe 'fp')")
        where = f" at bits={shown(self.bits)}"
        if not isinstance(self.ternary_in_2bit, bool) or (
            self.ternary_in_2bit and self.bits != 1.5
        ):
            self._refuse("ternary_in_2bit", "False, and True at bits=1.5", where)
        if not isinstance(self.pack11, bool) or (self.pack11 and (self.bits != 3 or self.codebook)):
            self._refuse("pack11", "False, and True at bits=3 without a codebook", where)
        if self.codebook is not None:
            numbers = _all_floats(self.codebook)
            count = 1 << int(self.bits) if self.bits in (2, 3, 4) else 0
            rising = numbers and all(a < b for a, b in itertools.pairwise(self.codebook))
            if not rising or len(self.codebook) != count or not abs(sum(self.codebook)) < 1e6:
                allowed = "None, and at 2, 3 and 4 bits a rising tuple of as many numbers as codes"
                self._refuse("codebook", allowed, where)
        pair = self.codebook is not None and _all_floats(self.qnorm) and len(self.qnorm or ()) == 2
        if self.qnorm is not None and not pair:
            self._refuse("qnorm", "None, and with a codebook a tuple of two numbers")

    def _check_groups(self) -> None:
        if self.axis not in ("channel", "token"):
            self._refuse("axis", "'channel', 'token'")
        least = 0 if self.axis == "channel" else 2
        if not isinstance(self.group, int) or self.group < least or self.group == 1:
            allowed = "a whole number of at least 2, and per channel 0, for calibrated ranges"
            self._refuse("group", allowed)
        if not isinstance(self.half_split, bool) or (self.half_split and self.axis != "token"):
            where = f" with axis={shown(self.axis)}"
            self._refuse("half_split", "False, and True per token", where)
        if self.sizes is None:
            return
        whole = isinstance(self.sizes, tuple) and all(type(n) is int and n > 0 for n in self.sizes)
        if not whole or not self.sizes or self.axis != "token":
            allowed = (
                "None, or per token a tuple of positive whole numbers, one for each group of all "
                "heads"
            )
            self._refuse("sizes", allowed)

    def _check_ranges(self) -> None:
        clip: Any = self.clip
        several = isinstance(clip, tuple) and self.axis == "token" and clip
        for factor in clip if several else (clip,):
            if type(factor) not in (int, float) or not 0 < factor <= 1:
                allowed = (
                    "a number above 0, at most 1, or per token a tuple of them, one for each group "
                    "of all heads"
                )
                self._refuse("clip", allowed)
        if self.qparams not in ("half", "fp8"):
            self._refuse("qparams", "'half', 'fp8'")
        n = self.outliers
        fits = self.static_ranges or (self.axis == "token" and type(n) is int and n % 2 == 0)
        if type(n) is not int or n < 0 or (n and not fits):
            allowed = "a whole number with calibrated ranges, an even one per token, 0 else"
            self._refuse("outliers", allowed)
        if self.clip != 1 and (n or self.static_ranges or self.codebook):
            self._refuse("clip", "1", " with outliers, calibrated ranges or a codebook")

    @property
    def static_ranges(self) -> bool:
        """Ranges are calibrated, one for all tokens of a channel."""
        return self.axis == "channel" and self.group == 0 and not self.identity

    @cached_property
    def decoded_codebook(self) -> tuple[float, ...] | None:
        """What the codes stand for when they are decoded, of a range from -1 to 1; None: evenly
        spaced."""
        if self.codebook is None or self.qnorm is None:
            return self.codebook
        factor, offset = self.qnorm
        return tuple(x * factor + offset for x in self.codebook)

    @cached_property
    def midpoints(self) -> tuple[float, ...]:
        """Halfway between neighbours in the codebook, in float32: where codes change."""
        levels = np.array(self.codebook or (), np.float32)
        halfway: list[float] = ((levels[:-1] + levels[1:]) / 2).tolist()
        return tuple(halfway)

    @property
    def identity(self) -> bool:
        """True for ``fp``."""
        return self.bits == 16

    @property
    def token_group(self) -> int:
        """Consecutive tokens that can only be encoded together."""
        return max(1, self.group) if self.axis == "channel" else 1

    @property
    def max_code(self) -> int:
        """The largest code: 2 at 1.5 bits, which are three values."""
        return 2 if self.bits == 1.5 else (1 << int(self.bits)) - 1

    @property
    def words(self) -> WordFormat:
        """How codes lie in 16-bit words."""
        if self.pack11:
            return PACK11
        if self.bits == 1.5:
            return BY_BITS[2] if self.ternary_in_2bit else TERNARY
        return BY_BITS[self.bits]

    @property
    def groups(self) -> Groups:
        """What shares a scale and a minimum."""
        return Groups(self.axis, self.group, self.half_split, self.sizes)

    @property
    def qparam_dtype(self) -> torch.dtype:
        """What a scale and a minimum are packed into."""
        return torch.int16 if self.qparams == "fp8" else torch.int32

    def __str__(self) -> str:
        if self.identity:
            return "fp"
        kind = "int" if self.codebook is None else "nuq"
        text = f"{kind}{self.bits}.{self.axis}{self.group}"
        for suffix in _SUFFIXES:
            if (value := getattr(self, suffix.field)) != getattr(FP, suffix.field):
                text += f".{suffix.word}{suffix.write(value)}"
        return text

    @staticmethod
    @cache
    def parse(text: str) -> Codec:
        """The codec that prints as ``text``, e.g. ``int2.channel32``, ``fp``, or
        ``int1.5.token128.fp8.clip0.92``."""
        if text == "fp":
            return Codec()
        match = _NAME.fullmatch(text)
        if match is None or (match["kind"] == "nuq") != (match["codebook"] is not None):
            raise OptionError(
                f"Codec {shown(text)} cannot be read; allowed: 'fp' or e.g. 'int2.channel32', "
                "'int4.token32'."
            )
        options = {s.field: s.read(x) for s in _SUFFIXES if (x := match[s.field]) is not None}
        return Codec(
            bits=1.5 if match["bits"] == "1.5" else int(match["bits"]),
            axis="channel" if match["axis"] == "channel" else "token",
            group=int(match["group"]),
            **options,
        )

    def unsupported_reason(self, head_dim: int, heads: int | None = None) -> str | None:
        """Why this codec cannot store ``heads`` (None: any number) of ``head_dim`` channels, or
        None."""
        if self.identity:
            return None
        if reason := self.words.unsupported_reason(head_dim):
            return reason
        if reason := self.groups.unsupported_reason(head_dim, heads):
            return reason
        if reason := self._outliers_unsupported(head_dim, heads):
            return reason
        count = heads and self.groups.shape(1, heads, 1, head_dim)
        if count and isinstance(self.clip, tuple) and len(self.clip) != count[1] * count[3]:
            return (
                f"{len(self.clip)} factors of clipping do not fit the {count[1] * count[3]} groups "
                f"of {heads} heads"
            )
        return None

    def _outliers_unsupported(self, head_dim: int, heads: int | None) -> str | None:
        if not self.outliers:
            return None
        joined = self.groups.heads_per_group(head_dim)
        if self.axis == "token" and (self.group < head_dim or heads not in (None, joined)):
            return f"outliers are those of all heads, a group of {self.group} channels is not"
        # Without the number of heads, the least that there can be.
        elements = (joined if heads is None else heads) * head_dim
        if heads is not None and not self.outliers < elements < NOWHERE:
            return f"{elements} channels of a token do not have {self.outliers} outliers"
        return None

    def bits_per_element(self, head_dim: int | None = None, heads: int | None = None) -> float:
        """Stored bits per element, scales and minima included (the identity counts 16), but for
        calibrated ones, which do not grow.

        For ``heads`` of ``head_dim`` channels; None: as if they filled all words, which only base 3
        may not do.

        Raises:
            ValueError: if the codec has outliers and either is None.
        """
        if self.identity:
            return 16.0
        codes = self.words.bits
        if head_dim is not None:
            codes = 16 * self.words.count(head_dim) / head_dim
        if self.outliers:
            if head_dim is None or heads is None:
                raise ValueError("bits_per_element of outliers needs head_dim and heads")
            codes += 32 * self.outliers / (heads * head_dim)
        return codes if self.static_ranges else codes + 8 * self.qparam_dtype.itemsize / self.group


FP = Codec()


def _all_floats(numbers: Any) -> bool:
    return isinstance(numbers, tuple) and all(type(x) is float for x in numbers)
