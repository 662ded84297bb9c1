"""How a block of keys or values is stored: the `Codec`, with its encoder and decoder in plain ATen.

Layout (the same on every device, so that kernels and reference exchange bytes):

* *words*, int16 ``[B, H, T, W]``: the codes of each token, see `kvpass.cache.words`.
* *params*: a scale and a minimum for each group. Per channel: ``[B, H, T/G, D]``, one per group of
  ``G`` consecutive tokens and channel. Per token: ``[B, H, D/G, T]``, one per token and group of
  ``G`` channels, or ``[B, H/k, 1, T]`` where a group spans ``k`` heads. int32
  ``minimum << 16 | scale``, both IEEE half, or int16 ``minimum << 8 | scale``, both fp8-e4m3.

An element decodes to ``code * scale + minimum``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from kvpass.cache.groups import Axis, Groups
from kvpass.cache.words import pack_words, unpack_words, word_count, word_misfit
from kvpass.errors import OptionError

Params = Literal["half", "fp8"]
BITS = (1, 1.5, 2, 3, 4, 8)
# By the type of params: the type of the scale and the minimum in them.
_NUMBERS = {torch.int32: torch.float16, torch.int16: torch.float8_e4m3fn}
NUMBER = r"\d+(?:\.\d+)?(?:e-\d+)?"
_NAME = re.compile(
    r"int(?P<bits>1\.5|\d+)\.(?P<axis>channel|token)(?P<group>\d+)(?P<slots>\.slots)?"
    r"(?P<pairs>\.pairs)?(\.sizes(?P<sizes>\d+(,\d+)*))?"
    rf"(?P<fp8>\.fp8)?(\.clip(?P<clip>{NUMBER}(,{NUMBER})*,?))?"
)


@dataclass(frozen=True)
class Codec:
    """Uniform asymmetric quantization of groups (KIVI, eq. 1-2), or the identity ``fp``.

    Attributes:
        bits: bits per code, one of 1, 1.5 (three levels), 2, 3, 4, 8; 16 is the identity codec,
            which stores the model's own dtype.
        axis: what a group belongs to. ``channel``: ``group`` consecutive tokens of one channel
            (keys in KIVI). ``token``: ``group`` consecutive channels of one token (values in KIVI);
            more than a head has are those of several heads.
        group: elements that share one scale and one minimum; 0 for the identity.
        clip: the ends of every group are multiplied by this before it is encoded, and what lies
            beyond them saturates (SKVQ, eq. 3). Meant for groups on both sides of zero, as the
            channels of a token are. Per token also one number for each group, head by head.
        params: what scales and minima are rounded to: ``half``, or ``fp8`` (fp8-e4m3, SKVQ
            section 3.2), which halves their bits.
        slots: three levels are stored in 2 bits each instead of base 3.
        pairs, sizes: which channels of a token are a group, see `kvpass.cache.groups.Groups`.

    Raises:
        OptionError: if a field has a value that is not allowed.
    """

    bits: float = 16
    axis: Axis = "token"
    group: int = 0
    clip: float | tuple[float, ...] = 1.0
    params: Params = "half"
    slots: bool = False
    pairs: bool = False
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if all(getattr(self, f.name) == f.default for f in fields(self) if f.name != "axis"):
            return
        if self.bits not in BITS or (type(self.bits) is not int and self.bits != 1.5):
            raise OptionError(
                f"bits={self.bits!r} is not supported; allowed: 1, 1.5, 2, 3, 4, 8 (or the recipe "
                "'fp')."
            )
        if self.axis not in ("channel", "token"):
            raise OptionError(f"axis={self.axis!r} is not supported; allowed: 'channel', 'token'.")
        if not isinstance(self.group, int) or self.group < 2:
            raise OptionError(
                f"group={self.group!r} is not supported; allowed: a whole number of at least 2."
            )
        self._check_clip()
        if self.params not in ("half", "fp8"):
            raise OptionError(f"params={self.params!r} is not supported; allowed: 'half', 'fp8'.")
        if not isinstance(self.slots, bool) or (self.slots and self.bits != 1.5):
            raise OptionError(
                f"slots={self.slots!r} is not supported at bits={self.bits!r}; allowed: False, and "
                "True at bits=1.5."
            )
        self._check_groups()

    def _check_clip(self) -> None:
        clip: Any = self.clip
        several = isinstance(clip, tuple) and self.axis == "token" and clip
        for factor in clip if several else (clip,):
            if type(factor) not in (int, float) or not 0 < factor <= 1:
                raise OptionError(
                    f"clip={clip!r} is not supported; allowed: a number above 0, at most 1, or "
                    "per token a tuple of them, one for each group of all heads."
                )

    def _check_groups(self) -> None:
        if not isinstance(self.pairs, bool) or (self.pairs and self.axis != "token"):
            raise OptionError(
                f"pairs={self.pairs!r} is not supported with axis={self.axis!r}; allowed: False, "
                "and True per token."
            )
        if self.sizes is None:
            return
        whole = isinstance(self.sizes, tuple) and all(type(n) is int and n > 0 for n in self.sizes)
        if not whole or not self.sizes or self.axis != "token":
            raise OptionError(
                f"sizes={self.sizes!r} is not supported; allowed: None, or per token a tuple of "
                "positive whole numbers, one for each group of all heads."
            )

    @property
    def identity(self) -> bool:
        """True for ``fp``."""
        return self.bits == 16

    @property
    def token_group(self) -> int:
        """Consecutive tokens that can only be encoded together."""
        return self.group if self.axis == "channel" and not self.identity else 1

    @property
    def levels(self) -> int:
        """The largest code: 2 at 1.5 bits, which are three levels."""
        return 2 if self.bits == 1.5 else (1 << int(self.bits)) - 1

    @property
    def word_bits(self) -> float:
        """The layout of the words, by its bits, see `kvpass.cache.words`."""
        return 2 if self.slots else self.bits

    @property
    def groups(self) -> Groups:
        """What shares a scale and a minimum."""
        return Groups(self.axis, self.group, self.pairs, self.sizes)

    @property
    def param_dtype(self) -> torch.dtype:
        """Of params."""
        return torch.int16 if self.params == "fp8" else torch.int32

    def __str__(self) -> str:
        if self.identity:
            return "fp"
        text = f"int{self.bits}.{self.axis}{self.group}"
        text += ".slots" * self.slots + ".pairs" * self.pairs
        if self.sizes is not None:
            text += f".sizes{_listed(self.sizes)}"
        text += ".fp8" * (self.params == "fp8")
        if isinstance(self.clip, tuple):
            # A comma behind a single one: it is a tuple still.
            return f"{text}.clip{_listed(self.clip)}" + "," * (len(self.clip) == 1)
        return text if self.clip == 1 else f"{text}.clip{self.clip}"

    @staticmethod
    @cache
    def parse(text: str) -> Codec:
        """The codec that prints as ``text``, e.g. ``int2.channel32``, ``fp``, or
        ``int1.5.token128.fp8.clip0.92``."""
        if text == "fp":
            return Codec()
        if match := _NAME.fullmatch(text):
            axis: Axis = "channel" if match["axis"] == "channel" else "token"
            bits = 1.5 if match["bits"] == "1.5" else int(match["bits"])
            clips = tuple(float(c) for c in (match["clip"] or "1").split(",") if c)
            clip = clips if "," in (match["clip"] or "") else clips[0]
            params: Params = "fp8" if match["fp8"] else "half"
            sizes = tuple(map(int, match["sizes"].split(","))) if match["sizes"] else None
            more = (bool(match["slots"]), bool(match["pairs"]), sizes)
            return Codec(bits, axis, int(match["group"]), clip, params, *more)
        raise OptionError(
            f"Codec {text!r} cannot be read; allowed: 'fp' or e.g. 'int2.channel32', "
            "'int4.token32'."
        )

    def words(self, head_dim: int) -> int:
        """16-bit words that hold one token's codes."""
        return word_count(head_dim, self.word_bits)

    def misfit(self, head_dim: int, heads: int | None = None) -> str | None:
        """Why this codec cannot store ``heads`` (None: any number) of ``head_dim`` channels, or
        None."""
        if self.identity:
            return None
        if reason := word_misfit(head_dim, self.word_bits):
            return reason
        if reason := self.groups.misfit(head_dim, heads):
            return reason
        count = heads and self.groups.shape(1, heads, 1, head_dim)
        if count and isinstance(self.clip, tuple) and len(self.clip) != count[1] * count[3]:
            return (
                f"{len(self.clip)} factors of clipping do not fit the {count[1] * count[3]} groups "
                f"of {heads} heads"
            )
        return None

    def bits_per_element(self, head_dim: int | None = None) -> float:
        """Stored bits per element, scales and minima included (the identity counts 16).

        For heads of ``head_dim`` channels; None: as if they filled all words, which only base 3
        may not do.
        """
        if self.identity:
            return 16.0
        codes = 1.6 if self.word_bits == 1.5 else self.word_bits
        if head_dim is not None:
            codes = 16 * self.words(head_dim) / head_dim
        return codes + 8 * self.param_dtype.itemsize / self.group

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Words and params of ``x``.

        Args:
            x: floating ``[B, H, T, D]``; ``T`` a multiple of `token_group`.

        Returns:
            int16 words ``[B, H, T, W]`` and int32 or int16 params (see the module's docstring).
        """
        scale, minimum, codes, _ = self._quantized(x)
        whole = codes.to(torch.int32).reshape(x.shape)
        params = join_params(scale, minimum)
        if self.axis == "token":
            params = params.transpose(2, 3)
        return pack_words(whole, self.word_bits), params.contiguous()

    def rounded(self, x: Tensor) -> Tensor:
        """What `decode` makes of what `encode` makes of ``x``, float32, without packing it."""
        _, _, codes, (steps, least) = self._quantized(x)
        return torch.addcmul(least, codes, steps).reshape(x.shape)

    def _quantized(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Scale and minimum of each group as they are stored, and, as `Groups.split` divides
        ``x``: the codes, and scale and minimum once more."""
        groups, heads, dim = self.groups, x.shape[1], x.shape[3]
        x = x.float()
        low, high = groups.extremes(x)
        # The range is clipped as a whole, so that no sum follows a product: compilers that join
        # them would round differently.
        clip = _clips(self.clip, str(x.device), low.shape[1])
        number = _NUMBERS[self.param_dtype]
        scale = rounded_to((high - low) * clip / self.levels, number)
        minimum = rounded_to(low * clip, number)
        # Codes are chosen against the rounded scale and minimum: those are what decoding will use.
        steps = groups.spread(scale.float(), heads, dim)
        least = groups.spread(minimum.float(), heads, dim)
        codes = ((groups.split(x) - least) / steps).round_().clamp_(0, self.levels)
        return scale, minimum, torch.where(steps > 0, codes, 0.0), (steps, least)

    def decode(self, words: Tensor, params: Tensor, dtype: torch.dtype) -> Tensor:
        """Inverse of `encode`: ``[B, H, T, D]`` in ``dtype`` (computed in float32)."""
        scale, minimum = split_params(params)
        b, h, t = words.shape[:3]
        if self.axis == "channel":
            d = params.shape[3]
        else:
            d = params.shape[1] * params.shape[2] * self.group // h
            scale, minimum = scale.transpose(2, 3), minimum.transpose(2, 3)
        groups = self.groups
        codes = groups.split(unpack_words(words, self.word_bits)[..., :d])
        spread = [groups.spread(number, h, d) for number in (minimum, scale)]
        out = torch.addcmul(spread[0], codes, spread[1])
        return out.reshape(b, h, t, d).to(dtype)


FP = Codec()


def _listed(numbers: tuple[float, ...]) -> str:
    return ",".join(map(str, numbers))


@lru_cache(maxsize=1024)
def _clips(clip: float | tuple[float, ...], device: str, heads: int) -> Tensor | float:
    """What the ends of groups are multiplied by, ``[heads, 1, groups]`` if it is not one number."""
    if not isinstance(clip, tuple):
        return clip
    with torch.inference_mode(False):
        return torch.tensor(clip, device=device).view(heads, 1, -1)


def rounded_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` rounded to a shorter floating ``dtype``, saturating: an infinite minimum would decode
    to NaN."""
    most = torch.finfo(dtype).max
    return x.clamp(-most, most).to(dtype)


def join_params(scale: Tensor, minimum: Tensor) -> Tensor:
    """``minimum << n | scale`` from two tensors of equal shape of n-bit numbers: int32 from half,
    int16 from fp8-e4m3."""
    if scale.dtype == torch.float16:
        low = scale.view(torch.int16).to(torch.int32) & 0xFFFF
        return (minimum.view(torch.int16).to(torch.int32) << 16) | low
    low = scale.view(torch.uint8).to(torch.int32)
    return (minimum.view(torch.uint8).to(torch.int32) << 8 | low).to(torch.int16)


def split_params(params: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and minimum in float32, from what `join_params` made."""
    # Flat first: a dimension of size one may have any stride, which would refuse the other dtype.
    flat = params.contiguous().view(-1).view(_NUMBERS[params.dtype])
    pairs = flat.view(*params.shape, 2).float()
    return pairs[..., 0], pairs[..., 1]
