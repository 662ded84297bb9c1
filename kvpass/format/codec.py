"""`Codec`: how a block of keys or values is stored; `kvpass.format.quantize` encodes and decodes.

Layout (the same on every device, so that kernels and reference exchange bytes):

* *words*, int16 ``[B, H, T, W]``: the codes of each token, see `kvpass.format.words`.
* *qparams*: a scale and a minimum for each group. Per channel: ``[B, H, T/G, D]``, one per group of
  ``G`` consecutive tokens and channel; ``[B, H, 1, D]`` if calibrated for all tokens. Per token:
  ``[B, H, D/G, T]``, one per token and group of ``G`` channels, or ``[B, H/k, 1, T]`` where a group
  spans ``k`` heads. int32 ``minimum << 16 | scale``, both IEEE half, or int16
  ``minimum << 8 | scale``, both fp8-e4m3.
* *outliers*, int32 ``[B, T, N]``: elements of a token that are stored as they are, ``value << 16 |
  position``: IEEE half, and ``head * D + channel``, or ``0xFFFF`` for none.
* *token_scales*, half ``[B, T, 1]``: the factor of each token.

An element decodes to ``code * scale + minimum``, or ``codebook[code] * scale + minimum``, times
the factor of its token, if it has one.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from kvpass.errors import OptionError, check, shown
from kvpass.format.groups import Axis, Groups
from kvpass.format.ranks import Ranks
from kvpass.format.words import BY_BITS, PACK11, TERNARY, WordFormat

QParams = Literal["half", "fp8"]
BITS = (1, 1.5, 2, 3, 4, 8)
# The position in an empty slot for an outlier: no element has it.
NOWHERE = 0xFFFF
NUMBER = r"-?\d+(?:\.\d+)?(?:e-\d+)?"
_LIST = rf"{NUMBER}(?:,{NUMBER})*"
# What the fields of `Codec` may be.
_ALLOWED = {
    "bits": "1, 1.5, 2, 3, 4, 8 (or the recipe 'fp')",
    "ternary_in_2bit": "False, and True at bits=1.5",
    "pack11": "False, and True at bits=3 without a codebook",
    "codebook": "None, and at 2, 3 and 4 bits a rising tuple of as many numbers as codes",
    "qnorm": "None, and with a codebook a tuple of two numbers",
    "axis": "'channel', 'token'",
    "group": "a whole number of at least 2, and per channel 0, for calibrated ranges",
    "half_split": "False, and True per token",
    "sizes": "None, or per token a tuple of positive whole numbers, one for each group of a token",
    "qparams": "'half', 'fp8'",
    "outliers": "a whole number with calibrated ranges, an even one per token, 0 else",
    "clip": "a number above 0, at most 1, or per token a tuple of them, one for each group of all "
    "heads; 1 with outliers, calibrated ranges or a codebook",
    "scale_by_token": "False, and True without outliers and calibrated ranges",
}


def _listed(numbers: tuple[float, ...]) -> str:
    return ",".join(map(str, numbers))


def _floats(text: str) -> tuple[float, ...]:
    return tuple(float(x) for x in text.split(",") if x)


class _Suffix(NamedTuple):
    """A field of `Codec` as it is printed: behind a point its word, then its value."""

    field: str
    word: str
    value: str = ""
    read: Callable[[str], Any] = lambda _: True
    write: Callable[[Any], str] = lambda _: ""


class Extra(NamedTuple):
    """Numbers that are stored of each token, of all heads, beside words and qparams.

    Attributes:
        name: the name of the field of the state.
        dtype: of a number.
        size: numbers of a token; 0: none.
    """

    name: str
    dtype: torch.dtype
    size: int


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
    _Suffix("scale_by_token", "scale_by_token"),
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
        axis: ``channel``: a group is consecutive tokens of one channel (keys in KIVI). ``token``: a
            group is consecutive channels of one token (values in KIVI), of several heads if it has
            more than a head.
        group: elements that share one scale and one minimum; 0 for the identity, and per channel
            where all tokens do: then both are calibrated (keys in KVQuant).
        clip: the range of every group is multiplied by this before it is encoded, and what lies
            beyond saturates (SKVQ, eq. 3). Meant for groups on both sides of zero, as the channels
            of a token are. Per token also one number for each group, head by head.
        qparams: what scales and minima are rounded to: ``half``, or ``fp8`` (fp8-e4m3, SKVQ
            section 3.2), which halves their bits.
        ternary_in_2bit: three values are stored in 2 bits each instead of base 3.
        half_split, sizes: which channels of a token are a group, see `kvpass.format.groups.Groups`.
        outliers: elements of each token, of all heads, that are stored as they are (KVQuant,
            section 3.4). Calibrated ranges: those furthest beyond them. Else a group has all heads,
            and its range is that of the others: half of them are the largest elements, half the
            smallest.
        codebook: the values of the codes in a range from -1 to 1, in rising order.
        qnorm: factor and offset of the codebook in decoding (Q-Norm, KVQuant, section 3.5).
        pack11: 11 codes of 3 bits share 32 bits, the last of which has 2 (KVmix): up to an eleventh
            of a head's channels saturate at code 3 of 7. Prefer 3 bits each: heads of 64, 96, 128,
            192 or 256 channels take as many bytes with less error, those of 80 or 112 fewer. From
            176 on some take fewer so (64 instead of 66).
        scale_by_token: each token is divided by the root mean square of all its heads' channels
            before it is encoded, and multiplied by it when it is read, so that tokens of a group
            have one variance (KVarN). Stored in half precision.

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
    scale_by_token: bool = False

    def __post_init__(self) -> None:
        if all(getattr(self, f.name) == f.default for f in fields(self) if f.name != "axis"):
            return
        for name, holds in self._checks():
            check(name, getattr(self, name), holds, _ALLOWED[name])

    def _checks(self) -> Iterator[tuple[str, Any]]:
        """Fields, and whether each has an allowed value, given that those before it have."""
        bits, group, codebook, outliers = self.bits, self.group, self.codebook, self.outliers
        yield "bits", bits in BITS and (type(bits) is int or bits == 1.5)
        yield "ternary_in_2bit", _is_flag(self.ternary_in_2bit, bits == 1.5)
        yield "pack11", _is_flag(self.pack11, bits == 3 and not codebook)
        codes = self.max_code + 1 if bits in (2, 3, 4) else -1
        yield "codebook", codebook is None or _rises(codebook, codes)
        pair = codebook is not None and _all_floats(self.qnorm) and len(self.qnorm or ()) == 2
        yield "qnorm", self.qnorm is None or pair
        yield "axis", self.axis in ("channel", "token")
        per_token = self.axis == "token"
        yield "group", isinstance(group, int) and (group >= 2 or (group == 0 and not per_token))
        yield "half_split", _is_flag(self.half_split, per_token)
        sizes: Any = self.sizes
        positive = isinstance(sizes, tuple) and all(type(n) is int and n > 0 for n in sizes)
        yield "sizes", sizes is None or (positive and sizes and per_token)
        yield "qparams", self.qparams in ("half", "fp8")
        fits = self.static_ranges or (per_token and type(outliers) is int and outliers % 2 == 0)
        yield "outliers", type(outliers) is int and outliers >= 0 and (fits or not outliers)
        scales = not (outliers or self.static_ranges)
        yield "scale_by_token", _is_flag(self.scale_by_token, scales)
        several = isinstance(self.clip, tuple) and self.clip and per_token
        clips: Any = self.clip if several else [self.clip]
        fits = self.clip == 1 or not (outliers or self.static_ranges or codebook)
        yield "clip", fits and all(type(x) in (int, float) and 0 < x <= 1 for x in clips)

    @property
    def static_ranges(self) -> bool:
        """Ranges are calibrated, one for all tokens of a channel."""
        return self.axis == "channel" and self.group == 0 and not self.identity

    @cached_property
    def decoded_codebook(self) -> tuple[float, ...] | None:
        """The values of decoded codes; None: they are evenly spaced."""
        if self.codebook is None or self.qnorm is None:
            return self.codebook
        factor, offset = self.qnorm
        return tuple(x * factor + offset for x in self.codebook)

    @cached_property
    def midpoints(self) -> tuple[float, ...]:
        """Halfway between neighbours in the codebook, in float32: where codes change."""
        values = np.array(self.codebook or (), np.float32)
        return tuple(((values[:-1] + values[1:]) / 2).tolist())

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
        """The layout of codes in 16-bit words."""
        if self.pack11:
            return PACK11
        if self.bits == 1.5:
            return BY_BITS[2] if self.ternary_in_2bit else TERNARY
        return BY_BITS[self.bits]

    @property
    def groups(self) -> Groups:
        """The elements that share a scale and a minimum."""
        return Groups(self.axis, self.group, self.half_split, self.sizes)

    @property
    def qparam_dtype(self) -> torch.dtype:
        """The dtype that holds a scale and a minimum together."""
        return torch.int16 if self.qparams == "fp8" else torch.int32

    @property
    def extras(self) -> tuple[Extra, ...]:
        """All extras, in the order in which they are encoded."""
        return (
            Extra("outliers", torch.int32, self.outliers),
            Extra("token_scales", torch.float16, int(self.scale_by_token)),
        )

    @property
    def has_extras(self) -> bool:
        """Whether anything is stored beside words and qparams."""
        return any(extra.size for extra in self.extras)

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

    def of_rank(self, ranks: Ranks, head_dim: int, heads: int) -> Codec:
        """The codec of one of ``ranks``, which have ``heads`` of ``head_dim`` channels each: with
        its own of the numbers that this one has for the groups of all heads."""
        lists = {n: x for n in ("clip", "sizes") if isinstance(x := getattr(self, n), tuple)}
        if not lists:
            return self
        _, group_heads, _, groups = self.groups.shape(1, heads * len(ranks.every), 1, head_dim)
        count = group_heads * groups
        return replace(self, **{n: ranks.part(x) for n, x in lists.items() if len(x) == count})

    def unsupported_reason(self, head_dim: int, heads: int | None = None) -> str | None:
        """Why this codec cannot store ``heads`` (None: any number) of ``head_dim`` channels, or
        None."""
        if self.identity:
            return None
        reason = (
            self.words.unsupported_reason(head_dim)
            or self.groups.unsupported_reason(head_dim, heads)
            or self._outliers_unsupported(head_dim, heads)
        )
        if reason or heads is None or not isinstance(self.clip, tuple):
            return reason
        _, group_heads, _, groups = self.groups.shape(1, heads, 1, head_dim)
        if len(self.clip) == group_heads * groups:
            return None
        return (
            f"{len(self.clip)} factors of clipping do not fit the {group_heads * groups} groups of "
            f"{heads} heads"
        )

    def _outliers_unsupported(self, head_dim: int, heads: int | None) -> str | None:
        if not self.outliers:
            return None
        heads_per_group = self.groups.heads_per_group(head_dim)
        if self.axis == "token" and (self.group < head_dim or heads not in (None, heads_per_group)):
            return f"outliers are those of all heads, a group of {self.group} channels is not"
        if heads is not None and not self.outliers < heads * head_dim < NOWHERE:
            return f"{heads * head_dim} channels of a token do not have {self.outliers} outliers"
        return None

    def bits_per_element(self, head_dim: int | None = None, heads: int | None = None) -> float:
        """Stored bits per element, scales and minima included (the identity counts 16), but for
        calibrated ones, which do not grow.

        For ``heads`` of ``head_dim`` channels; None: as if they filled all words, which only base 3
        may not do.

        Raises:
            ValueError: if the codec has extras and either is None.
        """
        if self.identity:
            return 16.0
        codes = self.words.bits
        if head_dim is not None:
            codes = 16 * self.words.count(head_dim) / head_dim
        if self.has_extras:
            if head_dim is None or heads is None:
                raise ValueError(f"bits_per_element of {self} needs head_dim and heads")
            token = sum(8 * extra.dtype.itemsize * extra.size for extra in self.extras)
            codes += token / (heads * head_dim)
        return codes if self.static_ranges else codes + 8 * self.qparam_dtype.itemsize / self.group


FP = Codec()


def _all_floats(numbers: Any) -> bool:
    return isinstance(numbers, tuple) and all(type(x) is float for x in numbers)


def _rises(numbers: Any, count: int) -> bool:
    """Whether these are ``count`` finite numbers in rising order."""
    if not _all_floats(numbers) or len(numbers) != count or not abs(sum(numbers)) < 1e6:
        return False
    return all(a < b for a, b in itertools.pairwise(numbers))


def _is_flag(value: Any, may_be_true: bool) -> bool:
    return isinstance(value, bool) and (may_be_true or not value)
