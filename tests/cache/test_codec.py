"""`Codec`: layout, error bounds, edge values, names."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpass.cache.codec import (
    BITS,
    FP,
    Codec,
    join_params,
    pack_words,
    split_params,
    to_half,
    unpack_words,
)
from kvpass.errors import OptionError
from tests.strategies import HEAD_DIMS, SEEDS, codecs, randn, tensors

CODECS = st.sampled_from(HEAD_DIMS).flatmap(codecs)


def whole_groups(x: torch.Tensor, codec: Codec) -> torch.Tensor:
    return x.repeat(1, 1, codec.token_group, 1)


def by_group(x: np.ndarray, codec: Codec) -> tuple[np.ndarray, int]:
    b, h, t, d = x.shape
    if codec.axis == "channel":
        return x.reshape(b, h, t // codec.group, codec.group, d), 3
    return x.reshape(b, h, t, d // codec.group, codec.group), 4


def numpy_encode(x: np.ndarray, codec: Codec) -> tuple[np.ndarray, np.ndarray]:
    """The module's docstring, transcribed: words as int16, params as int32."""
    grouped, axis = by_group(x.astype(np.float32), codec)
    levels = np.float32(2**codec.bits - 1)
    low, high = grouped.min(axis, keepdims=True), grouped.max(axis, keepdims=True)
    half = np.finfo(np.float16)
    scale = np.clip((high - low) / levels, half.min, half.max).astype(np.float16)
    minimum = np.clip(low, half.min, half.max).astype(np.float16)
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.rint((grouped - minimum.astype(np.float32)) / scale.astype(np.float32))
    codes = np.where(scale > 0, np.clip(codes, 0, levels), 0).astype(np.uint16).reshape(x.shape)
    w = x.shape[3] * codec.bits // 16
    words = np.zeros((*x.shape[:3], w), np.uint16)
    for i in range(w):
        for j in range(16 // codec.bits):
            words[..., i] |= codes[..., j * w + i] << np.uint16(j * codec.bits)
    params = minimum.view(np.uint16).astype(np.uint32) << 16 | scale.view(np.uint16)
    params = params.squeeze(axis)
    if codec.axis == "token":
        params = params.swapaxes(2, 3)
    return words.view(np.int16), params.view(np.int32)


def numpy_decode(words: np.ndarray, params: np.ndarray, codec: Codec, d: int) -> np.ndarray:
    """Element by element, in float64, where a code times a scale plus a minimum is exact."""
    w, g = d * codec.bits // 16, codec.group
    b, h, t, _ = words.shape
    out = np.empty((b, h, t, d))
    unsigned, pair = words.view(np.uint16), params.view(np.uint32)
    scale = (pair & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float64)
    minimum = (pair >> 16).astype(np.uint16).view(np.float16).astype(np.float64)
    for token in range(t):
        for channel in range(d):
            j, i = divmod(channel, w)
            code = unsigned[:, :, token, i] >> (j * codec.bits) & (2**codec.bits - 1)
            at = (token // g, channel) if codec.axis == "channel" else (channel // g, token)
            out[:, :, token, channel] = code * scale[:, :, *at] + minimum[:, :, *at]
    return out


@given(st.data(), st.sampled_from(BITS), SEEDS)
def test_words_round_trip(data, bits, seed):
    shape = data.draw(st.lists(st.integers(0, 4), max_size=3))
    d = 16 // bits * data.draw(st.integers(1, 20))
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (*shape, d), generator=generator, dtype=torch.int32)
    words = pack_words(codes, bits)
    assert words.dtype == torch.int16
    assert words.shape == (*shape, d * bits // 16)
    assert torch.equal(unpack_words(words, bits), codes.float())


@pytest.mark.parametrize("bits", BITS)
def test_every_code_survives_in_every_plane(bits):
    codes = torch.arange(1 << bits, dtype=torch.int32)
    planes = torch.cartesian_prod(*[codes] * 2) if bits == 8 else torch.cartesian_prod(codes, codes)
    planes = planes.repeat(1, 16 // bits // 2)
    assert torch.equal(unpack_words(pack_words(planes, bits), bits), planes.float())


def test_params_round_trip_bit_for_bit():
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    halves = patterns.view(torch.float16)
    scale, minimum = split_params(join_params(halves, halves.flip(0)))
    torch.testing.assert_close(scale, halves.float(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(minimum, halves.flip(0).float(), rtol=0, atol=0, equal_nan=True)


@given(tensors(tokens=st.integers(1, 3)), st.data())
def test_layout_is_the_documented_one(x, data):
    d = x.shape[3]
    codec = data.draw(codecs(d))
    x = whole_groups(x, codec)
    words, params = codec.encode(x)
    expected_words, expected_params = numpy_encode(x.float().numpy(), codec)
    np.testing.assert_array_equal(words.numpy(), expected_words)
    np.testing.assert_array_equal(params.numpy(), expected_params)
    decoded = codec.decode(words, params, torch.float32)
    plain = numpy_decode(words.numpy(), params.numpy(), codec, d)
    # code * scale has 8 + 11 bits: exact in float32, so that only the addition rounds, once.
    np.testing.assert_array_equal(decoded.numpy(), plain.astype(np.float32))


# Let L = 2^bits - 1, lo and hi the ends of a group, s = (hi - lo) / L, s' and m' the halves stored
# for s and lo, ds = |s' - s|, dm = |m' - lo|. The code is q = clamp(round((x - m') / s'), 0, L).
#   not clamped:   |q s' + m' - x| <= s' / 2
#   clamped to 0:  x < m', and m' - x <= m' - lo <= dm
#   clamped to L:  x - m' - L s' <= (hi - lo) + (lo - m') - L s' <= L ds + dm
#   s' = 0:        |m' - x| <= max(dm, hi - lo + dm) = L s + dm = L ds + dm
# so the error is at most max(s' / 2, L ds + dm). Rounding v to half: dv <= max(|v| 2^-11, 2^-25),
# half a unit in the last place or half the least subnormal. Float32 adds 2^-22 of the largest.
@given(tensors(tokens=st.integers(1, 3)), st.data())
def test_error_is_half_a_step_plus_the_rounding_of_scale_and_minimum(x, data):
    codec = data.draw(codecs(x.shape[3]))
    x = whole_groups(x, codec)
    decoded = codec.decode(*codec.encode(x), torch.float32)
    exact, axis = by_group(x.double().numpy(), codec)
    low, high = exact.min(axis, keepdims=True), exact.max(axis, keepdims=True)
    levels = 2**codec.bits - 1
    s = (high - low) / levels
    ds = np.maximum(s * 2**-11, 2**-25)
    dm = np.maximum(np.abs(low) * 2**-11, 2**-25)
    slack = 2**-22 * (np.maximum(np.abs(low), np.abs(high)) + (high - low))
    bound = np.maximum((s + ds) / 2, levels * ds + dm) + slack
    error = np.abs(by_group(decoded.double().numpy(), codec)[0] - exact)
    assert (error <= bound).all()


@given(CODECS, st.floats(-60000, 60000, width=32))
def test_constant_groups_decode_to_the_stored_minimum(codec, value):
    x = torch.full((1, 2, codec.token_group * 2, 80 if 80 % codec.group == 0 else 128), value)
    decoded = codec.decode(*codec.encode(x), torch.float32)
    assert torch.equal(decoded, x.to(torch.float16).float())


@given(CODECS, st.floats(2.0**17, 2.0**127, width=32), st.booleans(), SEEDS)
def test_huge_values_saturate_and_never_decode_to_nan(codec, size, one_sided, seed):
    d = 80 if codec.axis == "token" and 80 % codec.group == 0 else 128
    x = randn(1, 1, codec.token_group, d, seed=seed).clamp(-1, 1) * size
    x = x.abs() if one_sided else x
    scale, minimum = split_params(codec.encode(x)[1])
    assert scale.isfinite().all()
    assert minimum.isfinite().all()
    assert codec.decode(*codec.encode(x), torch.float32).isfinite().all()


def test_to_half_saturates():
    x = torch.tensor([1e9, -1e9, float("inf"), 65519.0, -65519.0, 1.0])
    assert to_half(x).tolist() == [65504.0, -65504.0, 65504.0, 65504.0, -65504.0, 1.0]


@given(CODECS, st.integers(-45, -8), SEEDS)
def test_ranges_below_the_least_scale_decode_to_the_minimum(codec, exponent, seed):
    d = 80 if codec.axis == "token" and 80 % codec.group == 0 else 128
    x = randn(1, 1, codec.token_group, d, seed=seed) * 10.0**exponent
    words, params = codec.encode(x)
    decoded, levels = codec.decode(words, params, torch.float32), 2**codec.bits - 1
    assert decoded.isfinite().all()
    scale, minimum = split_params(params)
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


def test_identity():
    assert str(FP) == "fp"
    assert Codec.parse("fp") == FP
    assert FP.identity
    assert FP.token_group == 1
    assert FP.bits_per_element() == 16.0
    assert FP.misfit(7) is None


@pytest.mark.parametrize(
    "text", ["", "int2", "int2.head32", "int2.channel", "INT2.channel32", "int2.channel32 ", "fp16"]
)
def test_other_names_are_refused(text):
    with pytest.raises(OptionError) as caught:
        Codec.parse(text)
    assert str(caught.value) == (
        f"Codec {text!r} cannot be read; allowed: 'fp' or e.g. 'int2.channel32', 'int4.token32'."
    )


@pytest.mark.parametrize("bits", [0, 1, 3, 5, 16, "2", None])
def test_bits_are_2_4_or_8(bits):
    with pytest.raises(OptionError) as caught:
        Codec(bits, "token", 32)
    assert str(caught.value) == (
        f"bits={bits!r} is not supported; allowed: 2, 4, 8 (or the recipe 'fp')."
    )


def test_a_float_is_not_a_number_of_bits():
    # It would print as 'int2.0.channel32', which nothing can read.
    with pytest.raises(OptionError):
        Codec(2.0, "channel", 32)


@pytest.mark.parametrize("group", [0, 1, -4, 2.0, "32", None])
def test_groups_are_whole_numbers_of_at_least_2(group):
    with pytest.raises(OptionError) as caught:
        Codec(2, "token", group)
    assert str(caught.value) == (
        f"group={group!r} is not supported; allowed: a whole number of at least 2."
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
        (Codec(2, "channel", 32), 20, "head_dim 20 at 2 bits does not fill whole 16-bit words"),
        (Codec(4, "token", 3), 6, "head_dim 6 at 4 bits does not fill whole 16-bit words"),
        (Codec(8, "token", 2), 3, "head_dim 3 at 8 bits does not fill whole 16-bit words"),
    ],
)
def test_misfit_says_why(codec, head_dim, reason):
    assert codec.misfit(head_dim) == reason


@given(tensors(tokens=st.integers(1, 2)), st.data())
def test_bits_per_element_is_what_encode_returns(x, data):
    codec = data.draw(codecs(x.shape[3]))
    x = whole_groups(x, codec)
    stored = sum(8 * part.nbytes for part in codec.encode(x))
    assert codec.bits_per_element() == codec.bits + 32 / codec.group
    assert stored / x.numel() == pytest.approx(codec.bits_per_element())


@given(tensors(tokens=st.integers(1, 2), dtypes=st.just(torch.float32)), st.data())
def test_decoding_rounds_once_to_the_wanted_dtype(x, data):
    codec = data.draw(codecs(x.shape[3]))
    encoded = codec.encode(whole_groups(x, codec))
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(
            codec.decode(*encoded, dtype), codec.decode(*encoded, torch.float32).to(dtype)
        )
