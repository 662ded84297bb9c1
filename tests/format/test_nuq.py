"""KVQuant's formats against a plain NumPy transcription of the paper's equations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from kvpass.errors import OptionError
from kvpass.format.codec import Codec
from kvpass.format.quantize import (
    decode,
    encode,
    fake_quantize,
    split_outliers,
    split_qparams,
    static_qparams,
)
from tests.strategies import SEEDS, randn

TABLES = {
    2: (-0.75, -0.25, 0.125, 0.875),
    3: (-0.9, -0.5, -0.3, -0.1, 0.05, 0.2, 0.55, 0.95),
    4: tuple(round(x, 3) for x in np.tanh(np.linspace(-2, 2, 16)).tolist()),
}
H, D = 2, 16
KEYS = {
    "int": Codec(3, "channel", 0),
    "int-1%": Codec(3, "channel", 0, outliers=3),
    "nuq2": Codec(2, "channel", 0, codebook=TABLES[2]),
    "nuq3-1%": Codec(3, "channel", 0, outliers=2, codebook=TABLES[3]),
    "qnorm": Codec(2, "channel", 0, outliers=2, codebook=TABLES[2], qnorm=(1.25, -0.0625)),
}
VALUES = {
    "int-1%": Codec(3, "token", H * D, outliers=2),
    "nuq4": Codec(4, "token", H * D, codebook=TABLES[4]),
    "nuq3-1%": Codec(3, "token", H * D, outliers=4, codebook=TABLES[3]),
    "qnorm": Codec(2, "token", H * D, outliers=2, codebook=TABLES[2], qnorm=(1.25, -0.0625)),
}


def half(x: Any) -> Any:
    return np.float32(np.float16(x))


def decoded(normal: Any, codec: Codec) -> Any:
    """``normal``, numbers between -1 and 1, as the signpost nearest to each: section 3.3."""
    table = np.float32(codec.codebook)
    nearest = np.abs(normal[..., None] - table).argmin(-1)
    factor, offset = codec.qnorm or (1, 0)
    return (table * np.float32(factor) + np.float32(offset))[nearest]


def quantized(x: Any, low: Any, high: Any, codec: Codec) -> Any:
    """``x`` between two ends, section 3.3 and 3.5, uniform as in KIVI."""
    if codec.codebook is None:
        scale, least = half((high - low) / codec.max_code), half(low)
        return np.clip(np.round((x - least) / scale), 0, codec.max_code) * scale + least
    scale, centre = half((high - low) / 2), half((high + low) / 2)
    return decoded((x - centre) / scale, codec) * scale + centre


def keys_by_the_paper(x: Any, low: Any, high: Any, codec: Codec) -> Any:
    """``x`` and the outliers' places, per channel with thresholds ``[H, D]`` (section 3.4)."""
    low, high = (v[None, :, None] for v in (low, high))
    out = quantized(x, low, high, codec)
    tokens = x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)
    scale = half((high - low) / (2 if codec.codebook else 7))
    ends = (half((high + low) / 2) - scale, half((high + low) / 2) + scale)
    if codec.codebook is None:
        ends = (half(low), half(low) + 7 * scale)
    beyond = np.maximum(ends[0] - x, x - ends[1]).transpose(0, 2, 1, 3).reshape(tokens.shape)
    places = set()
    for b in range(tokens.shape[0]):
        for t in range(tokens.shape[1]):
            worst = np.argsort(-beyond[b, t], kind="stable")[: codec.outliers]
            for place in (p for p in worst if beyond[b, t, p] > 0):
                out[b, place // D, t, place % D] = half(tokens[b, t, place])
                places.add((b, t, int(place)))
    return out, places


def values_by_the_paper(x: Any, codec: Codec) -> Any:
    """Per token, over all heads; the largest and the least elements are outliers."""
    out, places, k = x.copy(), set(), codec.outliers // 2
    for b in range(x.shape[0]):
        for t in range(x.shape[2]):
            token = x[b, :, t].reshape(-1)
            order = np.argsort(token, kind="stable")
            apart = [*order[:k], *order[len(order) - k :]]
            others = np.delete(token, apart)
            rounded = quantized(token, others.min(), others.max(), codec)
            rounded[apart] = half(token[apart])
            out[b, :, t] = rounded.reshape(H, D)
            places |= {(b, t, int(p)) for p in apart}
    return out, places


def places_of(outliers: torch.Tensor) -> set[tuple[int, int, int]]:
    places, _ = split_outliers(outliers)
    found = set()
    for b, row in enumerate(places.tolist()):
        found |= {(b, t, p) for t, token in enumerate(row) for p in token if p != 0xFFFF}
    return found


@pytest.mark.parametrize("name", KEYS)
@given(SEEDS)
def test_keys_are_those_of_the_paper(name: str, seed: int) -> None:
    codec, x = KEYS[name], randn(2, H, 7, D, seed=seed)
    low, high = randn(H, D, seed=seed + 1) * 0.2 - 1, randn(H, D, seed=seed + 2) * 0.2 + 1
    params = static_qparams(codec, low, high)
    words, kept, *extra = encode(codec, x, params.unsqueeze(0))
    assert torch.equal(kept, params.unsqueeze(0))
    got = decode(codec, (words, kept, *extra), torch.float32)
    wanted, places = keys_by_the_paper(x.numpy(), low.numpy(), high.numpy(), codec)
    assert_close(got, torch.from_numpy(wanted), rtol=0, atol=1e-6)
    assert_close(fake_quantize(codec, x, params), got, rtol=0, atol=0)
    assert (places_of(extra[0]) if extra else set()) == places


@pytest.mark.parametrize("name", VALUES)
@given(SEEDS)
def test_values_are_those_of_the_paper(name: str, seed: int) -> None:
    codec, x = VALUES[name], randn(2, H, 7, D, seed=seed)
    words, params, *extra = encode(codec, x)
    got = decode(codec, (words, params, *extra), torch.float32)
    wanted, places = values_by_the_paper(x.numpy(), codec)
    assert_close(got, torch.from_numpy(wanted), rtol=0, atol=1e-6)
    assert_close(fake_quantize(codec, x), got, rtol=0, atol=0)
    assert (places_of(extra[0]) if extra else set()) == (places if codec.outliers else set())


def test_a_table_of_even_levels_is_uniform_quantization() -> None:
    """But for the ends, which a table has half a step further in or out: none with -1 to 1."""
    x = randn(1, H, 30, D, seed=3)
    even = Codec(3, "token", H * D, codebook=tuple(np.linspace(-1, 1, 8).tolist()))
    uniform = replace(even, codebook=None)
    step = split_qparams(encode(uniform, x)[1])[0].max().item()
    assert (fake_quantize(even, x) - fake_quantize(uniform, x)).abs().max().item() < 0.51 * step
    assert (fake_quantize(even, x) - x).abs().max().item() < 0.51 * step


def test_an_outlier_that_is_no_number_shows() -> None:
    codec, x = KEYS["nuq3-1%"], randn(1, H, 3, D, seed=0)
    x[0, 1, 2, 5] = torch.nan
    params = static_qparams(codec, torch.full((H, D), -1.0), torch.full((H, D), 1.0))
    assert fake_quantize(codec, x, params).isnan().nonzero().tolist() == [[0, 1, 2, 5]]


@pytest.mark.parametrize("codec", [*KEYS.values(), *VALUES.values()], ids=str)
def test_names(codec: Codec) -> None:
    assert Codec.parse(str(codec)) == codec
    assert codec.unsupported_reason(D, H) is None


def test_bits_are_counted() -> None:
    x = randn(1, H, 8, D, seed=0)
    for codec in VALUES.values():
        held = sum(8 * part.nbytes for part in encode(codec, x)) / x.numel()
        assert held == pytest.approx(codec.bits_per_element(D, H))
    assert KEYS["nuq2"].bits_per_element(D, H) == 2, "ranges do not grow"
    assert KEYS["nuq3-1%"].bits_per_element(D, H) == 3 + 2 * 32 / (H * D)
    with pytest.raises(ValueError, match="needs head_dim and heads"):
        KEYS["nuq3-1%"].bits_per_element(D)


BAD = {
    "outliers": {"outliers": 3},
    "clip": {"outliers": 2, "clip": 0.9},
    "codebook": {"codebook": (0.0, 1.0)},
    "qnorm": {"qnorm": (1.0, 0.0)},
    "group": {"axis": "channel", "group": 1},
}


@pytest.mark.parametrize("name", BAD)
def test_bad_fields_are_refused(name: str) -> None:
    with pytest.raises(OptionError, match=f"{name}="):
        Codec(**{"bits": 2, "axis": "token", "group": 32, **BAD[name]})  # type: ignore[arg-type]


def test_falling_tables_are_refused() -> None:
    with pytest.raises(OptionError, match="a rising tuple"):
        Codec(2, "token", 32, codebook=(0.0, 1.0, 0.5, 2.0))


@pytest.mark.parametrize(
    ("codec", "heads", "reason"),
    [
        (Codec(2, "token", 16, outliers=2), 2, "of all heads"),
        (Codec(2, "token", 32, outliers=2), 4, "of all heads"),
        (Codec(2, "channel", 0, outliers=40), 2, "do not have 40 outliers"),
    ],
)
def test_misfits(codec: Codec, heads: int, reason: str) -> None:
    assert reason in str(codec.unsupported_reason(16, heads))


@given(st.integers(1, 4), st.integers(1, 3), SEEDS)
def test_outliers_of_equal_values(batch: int, tokens: int, seed: int) -> None:
    """Ties: any of them are outliers, each once."""
    x = torch.full((batch, H, tokens, D), float(seed % 7))
    codec = VALUES["nuq3-1%"]
    words, params, outliers = encode(codec, x)
    assert torch.equal(decode(codec, (words, params, outliers), torch.float32), x)
