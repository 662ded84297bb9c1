"""The encoder and the decoder of a `Codec`, in plain ATen: ranges, codes, outliers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from kvpass.format.codec import NOWHERE, Codec

# The dtype of a scale and of a minimum, by that of the qparams in which both are packed.
_NUMBERS = {torch.int32: torch.float16, torch.int16: torch.float8_e4m3fn}


def encode(codec: Codec, x: Tensor, qparams: Tensor | None = None) -> tuple[Tensor, ...]:
    """Words, qparams and the extras of the codec of ``x``; for the identity ``x`` alone.

    Args:
        codec: how to encode.
        x: floating ``[B, H, T, D]``; ``T`` a multiple of `Codec.token_group`.
        qparams: ``[B or 1, H, 1, D]``, if ranges are calibrated.

    Returns:
        int16 words ``[B, H, T, W]``, int32 or int16 qparams and extras ``[B, T, N]``, see
        `kvpass.format.codec`.
    """
    if codec.identity:
        return (x,)
    codes, *others = _quantized(codec, x.float(), qparams)
    return codec.words.pack(codes), *others


def fake_quantize(codec: Codec, x: Tensor, qparams: Tensor | None = None) -> Tensor:
    """``x`` as `encode` and `decode` return it, float32, without packing it."""
    return _dequantized(codec, *_quantized(codec, x.float(), qparams))


def decode(codec: Codec, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Inverse of `encode`, which has made ``parts``: ``[B, H, T, D]`` in ``dtype`` (computed in
    float32)."""
    if codec.identity:
        return parts[0].to(dtype)
    words, qparams, *extras = parts
    if codec.axis == "channel":
        d = qparams.shape[3]
    else:
        d = qparams.shape[1] * qparams.shape[2] * codec.group // words.shape[1]
    return _dequantized(codec, codec.words.unpack(words)[..., :d], qparams, *extras).to(dtype)


def normalized(codec: Codec, x: Tensor, qparams: Tensor | None) -> tuple[Tensor, Tensor]:
    """The values that a codebook is fitted to: ``x`` ``[B, H, T, D]``, scaled so that the range of
    its group is -1 to 1; and which of its elements are no outliers."""
    x = x.float()
    qparams, outliers = _ranges(codec, x, qparams)
    normal = _normal(codec, x, *_spread(codec, qparams, x)).reshape(x.shape)
    inside = torch.ones_like(x)
    if outliers is not None:
        # With their values cleared, which are the high bits.
        inside = _with_outliers(inside, outliers & 0xFFFF)
    return normal, inside.bool()


def static_qparams(codec: Codec, low: Tensor, high: Tensor) -> Tensor:
    """The qparams ``[H, 1, D]`` of channels ``[H, D]`` that lie between ``low`` and ``high``."""
    return _range(codec, low.float().unsqueeze(1), high.float().unsqueeze(1))


def split_qparams(qparams: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and minimum in float32, from what `join_qparams` made."""
    # Flat first: a dimension of size one may have any stride, which would refuse the other dtype.
    flat = qparams.contiguous().view(-1).view(_NUMBERS[qparams.dtype])
    pairs = flat.view(*qparams.shape, 2).float()
    return pairs[..., 0], pairs[..., 1]


def join_qparams(scale: Tensor, minimum: Tensor) -> Tensor:
    """``minimum << n | scale`` from two tensors of equal shape of n-bit numbers: int32 from half,
    int16 from fp8-e4m3."""
    if scale.dtype == torch.float16:
        low = scale.view(torch.int16).to(torch.int32) & 0xFFFF
        return (minimum.view(torch.int16).to(torch.int32) << 16) | low
    low = scale.view(torch.uint8).to(torch.int32)
    return (minimum.view(torch.uint8).to(torch.int32) << 8 | low).to(torch.int16)


def split_outliers(outliers: Tensor) -> tuple[Tensor, Tensor]:
    """Positions within the heads of a token, int64, and elements, half."""
    values = (outliers >> 16).to(torch.int16).view(torch.float16)
    return (outliers & 0xFFFF).long(), values


def _join_outliers(positions: Tensor, values: Tensor) -> Tensor:
    exact = rounded_to(values, torch.float16)
    return (exact.view(torch.int16).to(torch.int32) << 16) | positions.to(torch.int32)


def rounded_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` rounded to a shorter floating ``dtype``, saturating: an infinite minimum would decode
    to NaN."""
    most = torch.finfo(dtype).max
    return x.clamp(-most, most).to(dtype)


def _quantized(codec: Codec, x: Tensor, qparams: Tensor | None) -> tuple[Tensor, ...]:
    """Codes, int32 in the shape of ``x``, and qparams and extras as they are stored."""
    scales = _token_scales(x) if codec.scale_by_token else None
    x = x if scales is None else x / _by_token(scales)
    qparams, outliers = _ranges(codec, x, qparams)
    codes = _nearest(codec, x, *_spread(codec, qparams, x)).reshape(x.shape)
    if codec.axis == "token":
        qparams = qparams.transpose(2, 3)
    extras = (extra for extra in (outliers, scales) if extra is not None)
    return codec.words.saturated(codes), qparams.contiguous(), *extras


def _dequantized(codec: Codec, codes: Tensor, qparams: Tensor, *extras: Tensor) -> Tensor:
    """float32 ``[B, H, T, D]`` from codes of that shape."""
    if codec.axis == "token":
        qparams = qparams.transpose(2, 3)
    scale, minimum = _spread(codec, qparams, codes)
    values = codec.groups.split(codes)
    if codec.decoded_codebook is None:
        values = values.float()
    else:
        values = _constant(codec.decoded_codebook, str(codes.device))[values.long()]
    out = torch.addcmul(minimum, values, scale).reshape(codes.shape)
    if codec.scale_by_token:
        return out * _by_token(extras[0])
    return _with_outliers(out, extras[0]) if codec.outliers else out


def _token_scales(x: Tensor) -> Tensor:
    """The root mean square of each token's channels in all heads, half ``[B, T, 1]``; 1 where that
    is 0."""
    scales = rounded_to(x.square().mean((1, 3)).sqrt(), torch.float16)
    return torch.where(scales > 0, scales, 1.0).unsqueeze(2)


def _by_token(scales: Tensor) -> Tensor:
    """``scales``, to be multiplied with ``[B, H, T, D]``."""
    return scales.float().unsqueeze(1)


def _ranges(codec: Codec, x: Tensor, qparams: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The qparams of the groups of ``x``, not yet as they lie in memory, and its outliers."""
    if codec.static_ranges:
        assert qparams is not None
        qparams = qparams.view(-1, *qparams.shape[-3:])
        return qparams, _outliers_beyond(codec, x, qparams) if codec.outliers else None
    if codec.outliers:
        outliers, low, high = _extreme_outliers(x, codec.outliers)
        return _range(codec, low, high), outliers
    return _range(codec, *codec.groups.extremes(x)), None


def _range(codec: Codec, low: Tensor, high: Tensor) -> Tensor:
    """The qparams of groups between ``low`` and ``high``: scale and minimum, or with a codebook
    half the width and the centre (KVQuant, section 3.3). Those of a group that holds what is
    infinite or no number are none, and so is what it decodes to."""
    low = torch.where((low > -torch.inf) & (high < torch.inf), low, torch.nan)
    if codec.codebook is not None:
        scale, minimum = (high - low) / 2, (high + low) / 2
    else:
        clip: Tensor | float | tuple[float, ...] = codec.clip
        if isinstance(clip, tuple):
            clip = _constant(clip, str(low.device)).view(low.shape[1], 1, -1)
        # The range is clipped as a whole, so that no sum follows a product: compilers that join
        # them would round differently.
        scale, minimum = (high - low) * clip / codec.max_code, low * clip
    number = _NUMBERS[codec.qparam_dtype]
    return join_qparams(rounded_to(scale, number), rounded_to(minimum, number))


def _extreme_outliers(x: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The ``count`` outliers of each token, half of them the largest and half the smallest elements
    of all heads; and the range ``[B, 1, T, 1]`` of the others."""
    b, h, t, d = x.shape
    flat = x.transpose(1, 2).reshape(b, t, h * d)
    low, high = (flat.topk(count // 2 + 1, dim=2, largest=largest) for largest in (False, True))
    taken = torch.cat([low.indices[..., :-1], high.indices[..., :-1]], dim=2)
    least, most = (found.values[..., -1].view(b, 1, t, 1) for found in (low, high))
    return _join_outliers(taken, flat.gather(2, taken)), least, most


def _outliers_beyond(codec: Codec, x: Tensor, qparams: Tensor) -> Tensor:
    """The outliers of each token: those that lie furthest beyond the ranges of their channels."""
    b, h, t, d = x.shape
    scale, minimum = split_qparams(qparams)
    if codec.codebook is not None:
        low, high = minimum - scale, minimum + scale
    else:
        low, high = minimum, minimum + scale * codec.max_code
    excess = torch.maximum(low - x, x - high).transpose(1, 2).reshape(b, t, h * d)
    found = excess.topk(codec.outliers, dim=2)
    values = x.transpose(1, 2).reshape(b, t, h * d).gather(2, found.indices)
    # A NaN is beyond any range, and must show.
    return _join_outliers(found.indices.masked_fill(found.values <= 0, NOWHERE), values)


def _with_outliers(x: Tensor, outliers: Tensor) -> Tensor:
    """``x`` ``[B, H, T, D]`` with the elements that ``outliers`` ``[B, T, N]`` hold."""
    b, h, t, d = x.shape
    positions, values = split_outliers(outliers)
    # Those that are nowhere go behind the last element.
    flat = torch.cat([x.transpose(1, 2).reshape(b, t, h * d), x.new_empty(b, t, 1)], dim=2)
    flat = flat.scatter(2, positions.clamp(max=h * d), values.to(x.dtype))
    return flat[..., :-1].reshape(b, t, h, d).transpose(1, 2)


def _spread(codec: Codec, qparams: Tensor, x: Tensor) -> list[Tensor]:
    """Scale and minimum, to be broadcast with the groups of ``x``."""
    return [codec.groups.spread(n, x.shape[1], x.shape[3]) for n in split_qparams(qparams)]


def _normal(codec: Codec, x: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """``x`` in units of codes, or of a codebook; split into groups."""
    return (codec.groups.split(x) - minimum) / scale


def _nearest(codec: Codec, x: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """Codes are chosen against the rounded numbers: those are what decoding will use."""
    normal = _normal(codec, x, scale, minimum)
    if codec.codebook is None:
        codes = normal.round_().nan_to_num_().clamp_(0, codec.max_code)
        return torch.where(scale > 0, codes, 0.0).to(torch.int32)
    midpoints = _constant(codec.midpoints, str(x.device))
    return torch.bucketize(normal.contiguous(), midpoints, out_int32=True)


@lru_cache(maxsize=1024)
def _constant(numbers: tuple[float, ...], device: str) -> Tensor:
    # Neither fake nor an inference tensor, wherever it is asked for first.
    with torch.inference_mode(False):
        return torch.tensor(numbers, device=device)
