"""The encoder and the decoder of a `Codec`, in plain ATen: ranges, codes, outliers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kvpass.format.codec import NOWHERE, Codec

# By the type of params: the type of the two numbers in them.
NUMBERS = {torch.int32: torch.float16, torch.int16: torch.float8_e4m3fn}


def encode(codec: Codec, x: Tensor, params: Tensor | None = None) -> tuple[Tensor, ...]:
    """Words, params and, if the codec has them, outliers of ``x``.

    Args:
        codec: not the identity.
        x: floating ``[B, H, T, D]``; ``T`` a multiple of `Codec.token_group`.
        params: of calibrated ranges, ``[B or 1, H, 1, D]``.

    Returns:
        int16 words ``[B, H, T, W]``, int32 or int16 params and int32 outliers, see
        `kvpass.format.codec`.
    """
    found = quantized(codec, x, params)
    extra = () if found.outliers is None else (found.outliers,)
    return codec.words.pack(found.codes), found.params, *extra


def fake_quantize(codec: Codec, x: Tensor, params: Tensor | None = None) -> Tensor:
    """What `decode` makes of what `encode` makes of ``x``, float32, without packing it."""
    found = quantized(codec, x, params)
    return dequantized(codec, found.codes, found.params, found.outliers)


def decode(
    codec: Codec, words: Tensor, params: Tensor, dtype: torch.dtype, outliers: Tensor | None = None
) -> Tensor:
    """Inverse of `encode`: ``[B, H, T, D]`` in ``dtype`` (computed in float32)."""
    heads = words.shape[1]
    if codec.axis == "channel":
        d = params.shape[3]
    else:
        d = params.shape[1] * params.shape[2] * codec.group // heads
    return dequantized(codec, codec.words.unpack(words)[..., :d], params, outliers).to(dtype)


@dataclass(frozen=True)
class Quantized:
    """Some tokens ``[B, H, T, D]`` as a codec stores them.

    Attributes:
        codes: int32, in the shape of the tokens.
        params: as they are stored.
        outliers: int32 ``[B, T, S]``, or None if the codec has none.
    """

    codes: Tensor
    params: Tensor
    outliers: Tensor | None


def quantized(codec: Codec, x: Tensor, params: Tensor | None) -> Quantized:
    """Quantizes ``x`` ``[B, H, T, D]``; ``params`` are those of an offline codec."""
    x = x.float()
    params, outliers = _ranges(codec, x, params)
    codes = _nearest(codec, codec.groups.split(x), *_spread(codec, params, x)).reshape(x.shape)
    codes = codec.words.saturated(codes)
    if codec.axis == "token":
        params = params.transpose(2, 3)
    return Quantized(codes, params.contiguous(), outliers)


def normalized(codec: Codec, x: Tensor, params: Tensor | None) -> tuple[Tensor, Tensor]:
    """What the levels of a table are to be near: ``x`` ``[B, H, T, D]`` where the range of its
    group is -1 to 1; and which of it are no outliers."""
    x = x.float()
    params, outliers = _ranges(codec, x, params)
    scale, least = _spread(codec, params, x)
    normal = ((codec.groups.split(x) - least) / scale).reshape(x.shape)
    inside = torch.ones_like(x)
    if outliers is not None:
        places, _ = split_outliers(outliers)
        inside = with_outliers(inside, join_outliers(places, torch.zeros_like(places)))
    return normal, inside.bool()


def _ranges(codec: Codec, x: Tensor, params: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The params of the groups of ``x``, not yet as they lie in memory, and its outliers."""
    if codec.static_ranges:
        assert params is not None
        params = params.view(-1, *params.shape[-3:])
        outliers = _beyond(codec, x, *split_params(params)) if codec.outliers else None
        return params, outliers
    if codec.outliers:
        outliers, low, high = _extreme(x, codec.outliers)
        return join_params(*_range(codec, low, high)), outliers
    return join_params(*_range(codec, *codec.groups.extremes(x))), None


def _spread(codec: Codec, params: Tensor, x: Tensor) -> list[Tensor]:
    """Scale and minimum, or centre, to be broadcast with the groups of ``x``."""
    return [codec.groups.spread(n, x.shape[1], x.shape[3]) for n in split_params(params)]


def dequantized(codec: Codec, codes: Tensor, params: Tensor, outliers: Tensor | None) -> Tensor:
    """float32 ``[B, H, T, D]`` from codes of that shape."""
    if codec.axis == "token":
        params = params.transpose(2, 3)
    spread = _spread(codec, params, codes)
    out = _values(codec, codec.groups.split(codes), *spread).reshape(codes.shape)
    return out if outliers is None else with_outliers(out, outliers)


def offline_params(codec: Codec, low: Tensor, high: Tensor) -> Tensor:
    """The params of channels ``[H, D]`` that lie between ``low`` and ``high``, ``[H, 1, D]``."""
    return join_params(*_range(codec, low.float().unsqueeze(1), high.float().unsqueeze(1)))


def with_outliers(x: Tensor, outliers: Tensor) -> Tensor:
    """``x`` ``[B, H, T, D]`` with the elements that ``outliers`` ``[B, T, S]`` hold."""
    b, h, t, d = x.shape
    places, values = split_outliers(outliers)
    # Those that are nowhere go behind the last element.
    flat = torch.cat([x.transpose(1, 2).reshape(b, t, h * d), x.new_empty(b, t, 1)], dim=2)
    flat = flat.scatter(2, places.clamp(max=h * d), values.to(x.dtype))
    return flat[..., :-1].reshape(b, t, h, d).transpose(1, 2)


def join_outliers(places: Tensor, values: Tensor) -> Tensor:
    """int32 ``value << 16 | place``: the place of an element within its token's heads, and the
    element as half."""
    exact = rounded_to(values.float(), torch.float16)
    return (exact.view(torch.int16).to(torch.int32) << 16) | places.to(torch.int32)


def split_outliers(outliers: Tensor) -> tuple[Tensor, Tensor]:
    """Places, int64, and values, half, from what `join_outliers` made."""
    values = (outliers >> 16).to(torch.int16).view(torch.float16)
    return (outliers & 0xFFFF).long(), values


def _range(codec: Codec, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """The two numbers that are stored of each group between ``low`` and ``high``: scale and
    minimum, or of levels in a table half the width and the centre (KVQuant, section 3.3)."""
    number = NUMBERS[codec.qparam_dtype]
    if codec.codebook is not None:
        return rounded_to((high - low) / 2, number), rounded_to((high + low) / 2, number)
    # The range is clipped as a whole, so that no sum follows a product: compilers that join them
    # would round differently.
    clip = _clips(codec.clip, str(low.device), low.shape[1])
    return rounded_to((high - low) * clip / codec.max_code, number), rounded_to(low * clip, number)


def _nearest(codec: Codec, x: Tensor, scale: Tensor, least: Tensor) -> Tensor:
    """Codes are chosen against the rounded numbers: those are what decoding will use."""
    normal = (x - least) / scale
    if codec.codebook is None:
        codes = normal.round_().nan_to_num_().clamp_(0, codec.max_code)
        return torch.where(scale > 0, codes, 0.0).to(torch.int32)
    middles = _numbers(codec.midpoints, str(x.device))
    return torch.bucketize(normal.contiguous(), middles, out_int32=True)


def _values(codec: Codec, codes: Tensor, scale: Tensor, least: Tensor) -> Tensor:
    """What codes decode to."""
    if codec.decoded_codebook is None:
        return torch.addcmul(least, codes.float(), scale)
    return torch.addcmul(
        least, _numbers(codec.decoded_codebook, str(codes.device))[codes.long()], scale
    )


def _extreme(x: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each token: its ``count`` outliers, half of them the largest and half the least elements
    of all heads, and the ends ``[B, 1, T, 1]`` of the others."""
    b, h, t, d = x.shape
    flat = x.transpose(1, 2).reshape(b, t, h * d)
    places, ends = [], []
    for largest in (False, True):
        found = flat.topk(count // 2 + 1, dim=2, largest=largest)
        places.append(found.indices[..., :-1])
        ends.append(found.values[..., -1].view(b, 1, t, 1))
    taken = torch.cat(places, dim=2)
    return join_outliers(taken, flat.gather(2, taken)), ends[0], ends[1]


def _beyond(codec: Codec, x: Tensor, scale: Tensor, least: Tensor) -> Tensor:
    """Of each token: the outliers that lie furthest beyond the ranges of their channels."""
    b, h, t, d = x.shape
    if codec.codebook is not None:
        low, high = least - scale, least + scale
    else:
        low, high = least, least + scale * codec.max_code
    excess = torch.maximum(low - x, x - high).transpose(1, 2).reshape(b, t, h * d)
    found = excess.topk(codec.outliers, dim=2)
    values = x.transpose(1, 2).reshape(b, t, h * d).gather(2, found.indices)
    # A NaN is beyond any range, and must show.
    return join_outliers(found.indices.masked_fill(found.values <= 0, NOWHERE), values)


@lru_cache(maxsize=1024)
def _numbers(table: tuple[float, ...], device: str) -> Tensor:
    # Neither fake nor an inference tensor, wherever it is asked for first.
    with torch.inference_mode(False):
        return torch.tensor(table, device=device)


@lru_cache(maxsize=1024)
def _clips(clip: float | tuple[float, ...], device: str, heads: int) -> Tensor | float:
    """What the ends of groups are multiplied by, ``[heads, 1, groups]`` if it is not one number."""
    if not isinstance(clip, tuple):
        return clip
    return _numbers(clip, device).view(heads, 1, -1)


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
    flat = params.contiguous().view(-1).view(NUMBERS[params.dtype])
    pairs = flat.view(*params.shape, 2).float()
    return pairs[..., 0], pairs[..., 1]
