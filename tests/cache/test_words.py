"""Codes in 16-bit words: exact inverses, and the documented sizes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpass.cache.words import (
    ELEVENTHS,
    pack_words,
    saturated,
    unpack_words,
    word_count,
    word_misfit,
)
from tests.strategies import SEEDS

LEVELS = {1: 2, 1.5: 3, 2: 4, ELEVENTHS: 8, 3: 8, 4: 16, 8: 256}
BITS = st.sampled_from(sorted(LEVELS))


def random_codes(shape, bits, seed):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, LEVELS[bits], shape, generator=generator, dtype=torch.int32)
    return saturated(codes, bits)


@given(st.data(), BITS, SEEDS)
def test_packing_has_an_exact_inverse(data, bits, seed):
    shape = data.draw(st.lists(st.integers(0, 4), max_size=3))
    d = data.draw(st.integers(1, 300).filter(lambda d: word_misfit(d, bits) is None))
    codes = random_codes((*shape, d), bits, seed)
    words = pack_words(codes, bits)
    assert words.dtype == torch.int16
    assert words.shape == (*shape, word_count(d, bits))
    unpacked = unpack_words(words, bits)
    assert torch.equal(unpacked[..., :d], codes.float())
    assert not unpacked[..., d:].any()


@given(BITS, st.integers(1, 400))
def test_words_are_as_full_as_documented(bits, d):
    if bits == 1.5:
        assert 0 <= 10 * word_count(d, bits) - d < 10
    elif bits == ELEVENTHS:
        assert 0 <= 11 * word_count(d, bits) - 2 * d < 22
    elif word_misfit(d, bits) is None:
        assert 16 * word_count(d, bits) == d * bits
    else:
        assert d * bits % 16


@pytest.mark.parametrize("bits", LEVELS)
def test_every_pair_of_codes_survives_in_neighbouring_places(bits):
    codes = torch.arange(LEVELS[bits], dtype=torch.int32)
    pairs = torch.cartesian_prod(codes, codes)
    tokens = pairs.repeat(1, 80 if bits == 1.5 else 24)[:, : 80 if bits == 1.5 else 48]
    tokens = saturated(tokens, bits)
    assert torch.equal(unpack_words(pack_words(tokens, bits), bits)[:, : tokens.shape[1]], tokens)


def test_five_trits_share_a_byte():
    codes = torch.tensor([1, 0, 2, 1, 2, 2, 2, 2, 2, 2], dtype=torch.int32)
    (word,) = pack_words(codes, 1.5).tolist()
    assert word & 0xFF == 1 + 0 * 3 + 2 * 9 + 1 * 27 + 2 * 81
    assert word >> 8 & 0xFF == 242


def test_three_bits_are_two_low_ones_and_a_high_one():
    codes = torch.arange(16, dtype=torch.int32) % 8
    low, more, high = (w & 0xFFFF for w in pack_words(codes, 3).tolist())
    for channel in range(16):
        word, plane = (low, more)[channel % 2], channel // 2
        assert word >> 2 * plane & 3 == channel % 8 % 4
        assert high >> channel & 1 == channel % 8 // 4


# saturated(): the codes of plane 10, at most an eleventh of the channels, become 3 at most; others
# stay.
@given(st.integers(1, 300), SEEDS)
def test_the_last_of_eleven_codes_saturates(d, seed):
    codes = torch.randint(0, 8, (5, d), generator=torch.Generator().manual_seed(seed))
    kept = saturated(codes, ELEVENTHS)
    words = -(-d // 11)
    assert torch.equal(kept[:, : 10 * words], codes[:, : 10 * words])
    assert torch.equal(kept[:, 10 * words :], codes[:, 10 * words :].clamp(max=3))
    assert d - 10 * words <= d / 11


def test_eleven_codes_share_32_bits():
    codes = torch.tensor([1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3], dtype=torch.int32)
    low, high = (w & 0xFFFF for w in pack_words(codes, ELEVENTHS).tolist())
    assert high << 16 | low == sum(code << 3 * i for i, code in enumerate(codes.tolist()))
