"""`Codec`: layout, error bounds, edge values, names."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpass.errors import OptionError
from kvpass.format.codec import FP, Codec
from kvpass.format.quantize import decode, encode, join_qparams, rounded_to, split_qparams
from kvpass.format.words import BY_BITS, PACK11, TERNARY, WordFormat
from tests.strategies import HEAD_DIMS, SEEDS, codecs, randn, tensors

# Codecs whose codes and qparams say all of a token, whatever the other tokens.
ALONE = {"pack11": False, "scale_by_token": False}
CODECS = st.sampled_from(HEAD_DIMS).flatmap(codecs)
# The fp8-e4m3 numbers that are not negative, by their codes.
FP8 = np.array([m / 8 * 2.0**-6 for m in range(8)] + [
    (1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8 - (e == 15))
])  # fmt: skip


def fitting_dim(codec: Codec) -> int:
    return 80 if codec.axis == "channel" or 80 % codec.group == 0 else 128


def whole_groups(x: torch.Tensor, codec: Codec) -> torch.Tensor:
    return x.repeat(1, 1, codec.token_group, 1)


def by_group(x: np.ndarray, codec: Codec) -> tuple[np.ndarray, int]:
    b, h, t, d = x.shape
    if codec.axis == "channel":
        return x.reshape(b, h, t // codec.group, codec.group, d), 3
    return x.reshape(b, h, t, d // codec.group, codec.group), 4


def stored(x: np.ndarray, codec: Codec) -> tuple[np.ndarray, np.ndarray]:
    """The bits that stand for ``x`` in params, and their values in float32."""
    if codec.qparams == "half":
        half = np.finfo(np.float16)
        rounded = np.clip(x, half.min, half.max).astype(np.float16)
        return rounded.view(np.uint16).astype(np.uint32), rounded.astype(np.float32)
    size = np.minimum(np.abs(x.astype(np.float64)), FP8[-1])
    above = np.searchsorted(FP8, size)
    below = np.maximum(above - 1, 0)
    middle = (FP8[above] + FP8[below]) / 2
    code = np.where((size > middle) | ((size == middle) & (above % 2 == 0)), above, below)
    sign = np.signbit(x)
    value = np.where(sign, -FP8[code], FP8[code]).astype(np.float32)
    return (code + 128 * sign).astype(np.uint32), value


def numpy_words(codes: np.ndarray, words_as: WordFormat) -> np.ndarray:
    """The docstring of `kvpass.format.words`, transcribed."""
    d = codes.shape[-1]
    if words_as is BY_BITS[3]:
        low, high = numpy_words(codes & 3, BY_BITS[2]), numpy_words(codes >> 2, BY_BITS[1])
        return np.concatenate([low, high], -1)
    if words_as is PACK11:
        w = -(-d // 11)
        whole = np.zeros((*codes.shape[:-1], w), np.uint32)
        for channel in range(d):
            j, i = divmod(channel, w)
            code = codes[..., channel].astype(np.uint32)
            whole[..., i] |= np.minimum(code, 3 if j == 10 else 7) << 3 * j
        return np.concatenate([whole & 0xFFFF, whole >> 16], -1).astype(np.uint16)
    trits, bits = words_as is TERNARY, int(words_as.bits)
    w = -(-d // 10) if trits else d * bits // 16
    words = np.zeros((*codes.shape[:-1], w), np.uint16)
    for channel in range(d):
        j, i = divmod(channel, w)
        place = 3 ** (j % 5) << 8 * (j // 5) if trits else 1 << j * bits
        words[..., i] += codes[..., channel] * np.uint16(place)
    return words


def numpy_encode(x: np.ndarray, codec: Codec) -> tuple[np.ndarray, np.ndarray]:
    """The module's docstring, transcribed: words as int16, params as int32."""
    grouped, axis = by_group(x.astype(np.float32), codec)
    levels, clip = np.float32(levels_of(codec)), np.float32(codec.clip)
    low, high = grouped.min(axis, keepdims=True), grouped.max(axis, keepdims=True)
    scale_bits, scale = stored((high - low) * clip / levels, codec)
    minimum_bits, minimum = stored(low * clip, codec)
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.rint((grouped - minimum) / scale)
    codes = np.where(scale > 0, np.clip(codes, 0, levels), 0).astype(np.uint16).reshape(x.shape)
    words = numpy_words(codes, codec.words)
    params = minimum_bits << (16 if codec.qparams == "half" else 8) | scale_bits
    params = params.squeeze(axis)
    if codec.axis == "token":
        params = params.swapaxes(2, 3)
    if codec.qparams == "half":
        return words.view(np.int16), params.view(np.int32)
    return words.view(np.int16), params.astype(np.uint16).view(np.int16)


def levels_of(codec: Codec) -> int:
    return {1: 1, 1.5: 2, 2: 3, 3: 7, 4: 15, 8: 255}[codec.bits]


def numpy_decode(words: np.ndarray, params: np.ndarray, codec: Codec, d: int) -> np.ndarray:
    """Element by element, in float64, where a code times a scale plus a minimum is exact."""
    g = codec.group
    b, h, t, _ = words.shape
    out = np.empty((b, h, t, d))
    if codec.qparams == "half":
        pair = params.view(np.uint32)
        scale = (pair & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float64)
        minimum = (pair >> 16).astype(np.uint16).view(np.float16).astype(np.float64)
    else:
        pair = params.view(np.uint16)
        signed = np.concatenate([FP8, [np.nan], -FP8, [np.nan]])
        scale, minimum = signed[pair & 0xFF], signed[pair >> 8]
    for token in range(t):
        for channel in range(d):
            code = numpy_code(words.view(np.uint16)[:, :, token], channel, codec.words, d)
            at = (token // g, channel) if codec.axis == "channel" else (channel // g, token)
            out[:, :, token, channel] = code * scale[:, :, *at] + minimum[:, :, *at]
    return out


def numpy_code(words: np.ndarray, channel: int, words_as: WordFormat, d: int) -> np.ndarray:
    """One channel's code from the words ``[..., W]`` of a token."""
    if words_as is BY_BITS[3]:
        low = numpy_code(words[..., : d // 8], channel, BY_BITS[2], d)
        return low + 4 * numpy_code(words[..., d // 8 :], channel, BY_BITS[1], d)
    if words_as is PACK11:
        half = words.shape[-1] // 2
        j, i = divmod(channel, half)
        whole = words[..., half + i].astype(np.uint32) << 16 | words[..., i]
        return whole >> 3 * j & 7
    j, i = divmod(channel, words.shape[-1])
    if words_as is TERNARY:
        return (words[..., i] >> 8 * (j // 5) & 0xFF) // 3 ** (j % 5) % 3
    bits = int(words_as.bits)
    return words[..., i] >> (j * bits) & (2**bits - 1)


def test_params_round_trip_bit_for_bit():
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    eighths = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    for numbers, dtype in ((halves, torch.int32), (eighths, torch.int16)):
        other = numbers.float().flip(0).to(numbers.dtype)
        joined = join_qparams(numbers, other)
        assert joined.dtype == dtype
        scale, minimum = split_qparams(joined)
        torch.testing.assert_close(scale, numbers.float(), rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(minimum, other.float(), rtol=0, atol=0, equal_nan=True)


@given(tensors(tokens=st.integers(1, 3)), st.data())
def test_layout_is_the_documented_one(x, data):
    d = x.shape[3]
    codec = replace(data.draw(codecs(d)), scale_by_token=False)
    x = whole_groups(x, codec)
    words, params = encode(codec, x)
    expected_words, expected_params = numpy_encode(x.float().numpy(), codec)
    np.testing.assert_array_equal(words.numpy(), expected_words)
    np.testing.assert_array_equal(params.numpy(), expected_params)
    decoded = decode(codec, (words, params), torch.float32)
    plain = numpy_decode(words.numpy(), params.numpy(), codec, d)
    # code * scale has 8 + 11 bits: exact in float32, so that only the addition rounds, once.
    np.testing.assert_array_equal(decoded.numpy(), plain.astype(np.float32))


@given(tensors(tokens=st.integers(1, 3)), st.data())
def test_tokens_are_scaled_to_one_variance(x, data):
    codec = replace(data.draw(codecs(x.shape[3])), scale_by_token=True)
    plain, x = replace(codec, scale_by_token=False), whole_groups(x, codec)
    x[:, :, :1] = 0
    *parts, scales = encode(codec, x)
    norms = x.double().square().mean((1, 3)).sqrt()
    factors = torch.where(norms.half() > 0, norms, 1)
    torch.testing.assert_close(scales[..., 0].double(), factors, rtol=2**-10, atol=2**-24)
    factors = scales.float().unsqueeze(1)
    for part, wanted in zip(parts, encode(plain, x / factors), strict=True):
        assert torch.equal(part, wanted)
    decoded = decode(plain, parts, torch.float32) * factors
    assert torch.equal(decode(codec, (*parts, scales), torch.float32), decoded)


# Let L = 2^bits - 1, lo and hi the ends of a group, s = (hi - lo) / L, s' and m' the halves stored
# for s and lo, ds = |s' - s|, dm = |m' - lo|. The code is q = clamp(round((x - m') / s'), 0, L).
#   not clamped:   |q s' + m' - x| <= s' / 2
#   clamped to 0:  x < m', and m' - x <= m' - lo <= dm
#   clamped to L:  x - m' - L s' <= (hi - lo) + (lo - m') - L s' <= L ds + dm
#   s' = 0:        |m' - x| <= max(dm, hi - lo + dm) = L s + dm = L ds + dm
# so the error is at most max(s' / 2, L ds + dm). Rounding v to half: dv <= max(|v| 2^-11, 2^-25),
# half a unit in the last place or half the least subnormal; to fp8, max(|v| 2^-4, 2^-10). Float32
# adds 2^-22 of the largest.
@given(tensors(tokens=st.integers(1, 3)), st.data())
def test_error_is_half_a_step_plus_the_rounding_of_scale_and_minimum(x, data):
    # (Where 11 codes share 32 bits, some saturate: tests/format/test_words.py.)
    codec = replace(data.draw(codecs(x.shape[3])), clip=1.0, **ALONE)
    fp8 = codec.qparams == "fp8"
    # Numbers and ranges beyond 448 saturate.
    x = whole_groups(x.clamp(-200, 200) if fp8 else x, codec)
    decoded = decode(codec, encode(codec, x), torch.float32)
    exact, axis = by_group(x.double().numpy(), codec)
    low, high = exact.min(axis, keepdims=True), exact.max(axis, keepdims=True)
    levels = levels_of(codec)
    s = (high - low) / levels
    relative, least = (2**-4, 2**-10) if fp8 else (2**-11, 2**-25)
    ds = np.maximum(s * relative, least)
    dm = np.maximum(np.abs(low) * relative, least)
    slack = 2**-22 * (np.maximum(np.abs(low), np.abs(high)) + (high - low))
    bound = np.maximum((s + ds) / 2, levels * ds + dm) + slack
    error = np.abs(by_group(decoded.double().numpy(), codec)[0] - exact)
    assert (error <= bound).all()


# With the stored s' and m': |q s' + m' - x| <= s' / 2 inside [m', m' + L s'], and outside of it,
# where clipping puts the ends of a group, x comes back as the nearer end.
@given(tensors(tokens=st.integers(1, 3)), st.data())
def test_clipped_elements_come_back_as_the_end_of_the_range(x, data):
    codec = replace(data.draw(codecs(x.shape[3])), **ALONE)
    x = whole_groups(x, codec)
    words, params = encode(codec, x)
    if codec.axis == "token":
        params = params.transpose(2, 3)
    step, low = (p.double().numpy() for p in split_qparams(params))
    axis = by_group(x.double().numpy(), codec)[1]
    step, low = np.expand_dims(step, axis), np.expand_dims(low, axis)
    high = low + levels_of(codec) * step
    if codec.axis == "token":
        params = params.transpose(2, 3)
    exact, decoded = (
        by_group(t.double().numpy(), codec)[0]
        for t in (x, decode(codec, (words, params), torch.float32))
    )
    slack = 2**-22 * (np.abs(low) + np.abs(high) + np.abs(exact))
    assert (np.abs(decoded - np.clip(exact, low, high)) <= step / 2 + slack).all()
    if codec.clip < 1 and codec.qparams == "half":
        ends = [f(exact, axis=axis, keepdims=True) * codec.clip for f in (np.min, np.max)]
        # Rounding of minimum and scale, as above.
        rounding = (1 + levels_of(codec)) * 2**-11 * (np.abs(ends[0]) + np.abs(ends[1])) + 2**-15
        assert (decoded >= ends[0] - rounding).all()
        assert (decoded <= ends[1] + rounding).all()


def test_clipping_of_skvq():
    x = (
        torch.tensor([-1.0, -0.8, -0.1, 0.0, 0.3, 0.6, 0.9, 2.0])
        .view(1, 1, 1, 8)
        .repeat(1, 1, 1, 2)
    )
    codec = Codec(2, "token", 8, clip=0.5)
    decoded = decode(codec, encode(codec, x), torch.float32)[0, 0, 0, :8]
    # ChunkFormat from -0.5 to 1 in steps of 0.5.
    assert decoded.tolist() == [-0.5, -0.5, 0.0, 0.0, 0.5, 0.5, 1.0, 1.0]


@given(CODECS.map(lambda c: replace(c, scale_by_token=False)), st.floats(-60000, 60000, width=32))
def test_constant_groups_decode_to_the_stored_minimum(codec, value):
    x = torch.full((1, 2, codec.token_group * 2, fitting_dim(codec)), value)
    decoded = decode(codec, encode(codec, x), torch.float32)
    number = torch.float16 if codec.qparams == "half" else torch.float8_e4m3fn
    assert torch.equal(decoded, rounded_to(x * codec.clip, number).float())


@given(CODECS, st.floats(2.0**17, 2.0**127, width=32), st.booleans(), SEEDS)
def test_huge_values_saturate_and_never_decode_to_nan(codec, size, one_sided, seed):
    d = fitting_dim(codec)
    x = randn(1, 1, codec.token_group, d, seed=seed).clamp(-1, 1) * size
    x = x.abs() if one_sided else x
    scale, minimum = split_qparams(encode(codec, x)[1])
    assert scale.isfinite().all()
    assert minimum.isfinite().all()
    assert decode(codec, encode(codec, x), torch.float32).isfinite().all()


def test_rounding_saturates():
    x = torch.tensor([1e9, -1e9, float("inf"), 65519.0, -65519.0, 1.0])
    half = rounded_to(x, torch.float16)
    assert half.tolist() == [65504.0, -65504.0, 65504.0, 65504.0, -65504.0, 1.0]
    fp8 = rounded_to(x, torch.float8_e4m3fn)
    assert fp8.float().tolist() == [448.0, -448.0, 448.0, 448.0, -448.0, 1.0]


@given(
    CODECS.map(lambda c: replace(c, clip=1.0, qparams="half", **ALONE)),
    st.integers(-45, -8),
    SEEDS,
)
def test_ranges_below_the_least_scale_decode_to_the_minimum(codec, exponent, seed):
    d = fitting_dim(codec)
    x = randn(1, 1, codec.token_group, d, seed=seed) * 10.0**exponent
    words, params = encode(codec, x)
    decoded, levels = decode(codec, (words, params), torch.float32), levels_of(codec)
    assert decoded.isfinite().all()
    scale, minimum = split_qparams(params)
    dead = scale == 0
    if exponent < -10:
        assert dead.all()
    if dead.all():
        assert (words == 0).all()
        assert torch.equal(decoded.unique(), minimum.unique())
    # max(s' / 2, L ds + dm) of the bound above, for scales and minima in the subnormal range
    spread = float(x.max() - x.min())
    low = float(x.abs().max())
    assert float((decoded - x).abs().max()) <= max(
        (spread / levels + 2**-25) / 2,
        levels * max(spread / levels * 2**-11, 2**-25) + max(low * 2**-11, 2**-25),
    ) * (1 + 2**-18)


@given(CODECS)
def test_name_parses_back(codec):
    assert Codec.parse(str(codec)) == codec
    assert hash(Codec.parse(str(codec))) == hash(codec)


@pytest.mark.parametrize(
    ("text", "codec"),
    [
        ("int2.channel32", Codec(2, "channel", 32)),
        ("int1.token128", Codec(1, "token", 128)),
        ("int1.5.token128", Codec(1.5, "token", 128)),
        ("int1.5.token128.ternary_in_2bit", Codec(1.5, "token", 128, ternary_in_2bit=True)),
        ("int3.channel64", Codec(3, "channel", 64)),
        ("int3.token32.pack11", Codec(3, "token", 32, pack11=True)),
        ("int2.token128.fp8.clip0.92", Codec(2, "token", 128, 0.92, "fp8")),
        (
            "int1.5.channel32.ternary_in_2bit.fp8.clip0.5",
            Codec(1.5, "channel", 32, clip=0.5, qparams="fp8", ternary_in_2bit=True),
        ),
    ],
)
def test_names(text, codec):
    assert str(codec) == text
    assert Codec.parse(text) == codec


@given(st.floats(0, 1, exclude_min=True))
def test_every_clip_parses_back(clip):
    codec = Codec(2, "token", 32, clip=clip)
    assert Codec.parse(str(codec)) == codec


def test_identity():
    assert str(FP) == "fp"
    assert Codec.parse("fp") == FP
    assert FP.identity
    assert FP.token_group == 1
    assert FP.bits_per_element() == 16.0
    assert FP.unsupported_reason(7) is None


@pytest.mark.parametrize(
    "text",
    [
        *["", "int2", "int2.head32", "int2.channel", "INT2.channel32", "int2.channel32 ", "fp16"],
        *[
            "int2.channel32.clip",
            "int2.channel32.clip.5",
            "int2.channel32.clip0.9.fp8",
            "int2.5.token8",
        ],
        *["int2.channel32.fp4", "int2.channel32.half"],
    ],
)
def test_other_names_are_refused(text):
    with pytest.raises(OptionError) as caught:
        Codec.parse(text)
    assert str(caught.value) == (
        f"Codec {text!r} cannot be read; allowed: 'fp' or e.g. 'int2.channel32', 'int4.token32'."
    )


@pytest.mark.parametrize("bits", [0, 5, 2.5, 16, "2", None, True, 1.0])
def test_bits_that_are_not_allowed(bits):
    with pytest.raises(OptionError) as caught:
        Codec(bits, "token", 32)
    assert str(caught.value) == (
        f"bits={bits!r} is not supported; allowed: 1, 1.5, 2, 3, 4, 8 (or the recipe 'fp')."
    )


CLIPS = (
    ": a number above 0, at most 1, or per token a tuple of them, one for each group of all heads; "
    "1 with outliers, calibrated ranges or a codebook"
)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("clip", 0, CLIPS),
        ("clip", 1.01, CLIPS),
        ("clip", -0.5, CLIPS),
        ("clip", float("nan"), CLIPS),
        ("clip", True, CLIPS),
        ("clip", "0.9", CLIPS),
        ("qparams", "fp4", ": 'half', 'fp8'"),
        ("qparams", None, ": 'half', 'fp8'"),
        ("ternary_in_2bit", True, ": False, and True at bits=1.5"),
        ("ternary_in_2bit", 1, ": False, and True at bits=1.5"),
    ],
)
def test_other_fields_that_are_not_allowed(field, value, allowed):
    with pytest.raises(OptionError) as caught:
        Codec(2, "token", 32, **{field: value})
    assert str(caught.value) == f"{field}={value!r} is not supported; allowed{allowed}."


@pytest.mark.parametrize("fields", [{"clip": 0.9}, {"qparams": "fp8"}, {"ternary_in_2bit": True}])
def test_the_identity_has_no_scales(fields):
    with pytest.raises(OptionError):
        Codec(**fields)


def test_a_float_is_not_a_number_of_bits():
    # It would print as 'int2.0.channel32', which nothing can read.
    with pytest.raises(OptionError):
        Codec(2.0, "channel", 32)


@pytest.mark.parametrize("group", [0, 1, -4, 2.0, "32", None])
def test_groups_are_whole_numbers_of_at_least_2(group):
    with pytest.raises(OptionError) as caught:
        Codec(2, "token", group)
    assert str(caught.value) == (
        f"group={group!r} is not supported; allowed: a whole number of at least 2, and per channel "
        "0, for calibrated ranges."
    )


def test_axis_is_channel_or_token():
    with pytest.raises(OptionError) as caught:
        Codec(2, "head", 32)
    assert str(caught.value) == "axis='head' is not supported; allowed: 'channel', 'token'."


@pytest.mark.parametrize(
    ("codec", "head_dim", "reason"),
    [
        (Codec(2, "channel", 32), 80, None),
        (Codec(2, "token", 16), 80, None),
        (Codec(8, "channel", 32), 2, None),
        (Codec(2, "token", 32), 80, "group 32 does not divide head_dim 80"),
        (Codec(2, "token", 32), 0, "group 32 does not divide head_dim 0"),
        (Codec(2, "channel", 32), 20, "head_dim 20 at 2 bits does not fill whole 16-bit words"),
        (Codec(4, "token", 3), 6, "head_dim 6 at 4 bits does not fill whole 16-bit words"),
        (Codec(8, "token", 2), 3, "head_dim 3 at 8 bits does not fill whole 16-bit words"),
        (Codec(3, "channel", 32), 80, None),
        (Codec(3, "channel", 32), 40, "head_dim 40 at 3 bits does not fill whole 16-bit words"),
        (Codec(1, "channel", 32), 24, "head_dim 24 at 1 bits does not fill whole 16-bit words"),
        (Codec(1.5, "channel", 32), 12, None),
        (Codec(1.5, "token", 8), 12, "group 8 does not divide head_dim 12"),
        (
            Codec(1.5, "token", 4, ternary_in_2bit=True),
            12,
            "head_dim 12 at 2 bits does not fill whole 16-bit words",
        ),
    ],
)
def test_reason_why_a_codec_does_not_fit(codec, head_dim, reason):
    assert codec.unsupported_reason(head_dim) == reason


@given(tensors(tokens=st.integers(1, 2)), st.data())
def test_bits_per_element_is_what_encode_returns(x, data):
    codec = data.draw(codecs(x.shape[3]))
    x = whole_groups(x, codec)
    held = sum(8 * part.nbytes for part in encode(codec, x))
    assert held / x.numel() == pytest.approx(codec.bits_per_element(x.shape[3], x.shape[1]))
    plain = replace(codec, scale_by_token=False)
    assert plain.bits_per_element(x.shape[3]) >= plain.bits_per_element() - 1e-9


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("int2.channel32", 3.0),
        ("int2.token128", 2.25),
        ("int2.token128.fp8", 2.125),
        ("int3.token128", 3.25),
        ("int1.token128", 1.25),
        ("int1.5.token128.ternary_in_2bit.fp8", 2.125),
        ("int1.5.token80.fp8", 1.8),
        # Thirteen words for 128 channels.
        ("int1.5.token128.fp8", 1.75),
    ],
)
def test_bits_per_element(text, bits):
    codec = Codec.parse(text)
    assert codec.bits_per_element(80 if "80" in text else 128) == pytest.approx(bits)


@given(tensors(tokens=st.integers(1, 2), dtypes=st.just(torch.float32)), st.data())
def test_decoding_rounds_once_to_the_wanted_dtype(x, data):
    codec = data.draw(codecs(x.shape[3]))
    encoded = encode(codec, whole_groups(x, codec))
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(
            decode(codec, encoded, dtype), decode(codec, encoded, torch.float32).to(dtype)
        )
