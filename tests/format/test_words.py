"""Codes in 16-bit words: exact inverses, and the documented sizes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpass.format.words import BY_BITS, PACK11, TERNARY
from tests.strategies import SEEDS

LEVELS = {TERNARY: 3, PACK11: 8, **{words: 1 << bits for bits, words in BY_BITS.items()}}
WORDS = st.sampled_from(list(LEVELS))


def random_codes(shape, words, seed):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, LEVELS[words], shape, generator=generator, dtype=torch.int32)
    return words.saturated(codes)


@given(st.data(), WORDS, SEEDS)
def test_packing_has_an_exact_inverse(data, words, seed):
    shape = data.draw(st.lists(st.integers(0, 4), max_size=3))
    d = data.draw(st.integers(1, 300).filter(lambda d: words.unsupported_reason(d) is None))
    codes = random_codes((*shape, d), words, seed)
    packed = words.pack(codes)
    assert packed.dtype == torch.int16
    assert packed.shape == (*shape, words.count(d))
    unpacked = words.unpack(packed)
    assert torch.equal(unpacked[..., :d], codes.float())
    assert not unpacked[..., d:].any()


@given(WORDS, st.integers(1, 400))
def test_words_are_as_full_as_documented(words, d):
    if words is TERNARY:
        assert 0 <= 10 * words.count(d) - d < 10
    elif words is PACK11:
        assert 0 <= 11 * words.count(d) - 2 * d < 22
    elif words.unsupported_reason(d) is None:
        assert 16 * words.count(d) == d * words.bits
    else:
        assert d * words.bits % 16


@pytest.mark.parametrize("words", LEVELS, ids=lambda words: words.struct)
def test_every_pair_of_codes_survives_in_neighbouring_places(words):
    codes = torch.arange(LEVELS[words], dtype=torch.int32)
    pairs = torch.cartesian_prod(codes, codes)
    tokens = pairs.repeat(1, 40)[:, : 80 if words is TERNARY else 48]
    tokens = words.saturated(tokens)
    assert torch.equal(words.unpack(words.pack(tokens))[:, : tokens.shape[1]], tokens)


def test_five_trits_share_a_byte():
    codes = torch.tensor([1, 0, 2, 1, 2, 2, 2, 2, 2, 2], dtype=torch.int32)
    (word,) = TERNARY.pack(codes).tolist()
    assert word & 0xFF == 1 + 0 * 3 + 2 * 9 + 1 * 27 + 2 * 81
    assert word >> 8 & 0xFF == 242


def test_three_bits_are_two_low_ones_and_a_high_one():
    codes = torch.arange(16, dtype=torch.int32) % 8
    low, more, high = (w & 0xFFFF for w in BY_BITS[3].pack(codes).tolist())
    for channel in range(16):
        word, plane = (low, more)[channel % 2], channel // 2
        assert word >> 2 * plane & 3 == channel % 8 % 4
        assert high >> channel & 1 == channel % 8 // 4


# saturated(): the codes of plane 10, at most an eleventh of the channels, become 3 at most; others
# stay.
@given(st.integers(1, 300), SEEDS)
def test_the_last_of_eleven_codes_saturates(d, seed):
    codes = torch.randint(0, 8, (5, d), generator=torch.Generator().manual_seed(seed))
    kept = PACK11.saturated(codes)
    words = -(-d // 11)
    assert torch.equal(kept[:, : 10 * words], codes[:, : 10 * words])
    assert torch.equal(kept[:, 10 * words :], codes[:, 10 * words :].clamp(max=3))
    assert d - 10 * words <= d / 11


def test_eleven_codes_share_32_bits():
    codes = torch.tensor([1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3], dtype=torch.int32)
    low, high = (w & 0xFFFF for w in PACK11.pack(codes).tolist())
    assert high << 16 | low == sum(code << 3 * i for i, code in enumerate(codes.tolist()))
