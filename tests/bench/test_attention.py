"""`kvpass bench attention`: its contenders, and that the check can fail."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvpass.bench import contenders
from kvpass.bench.attention import PEERS, attention_json, attention_section, bench_attention
from kvpass.bench.contenders import HF_NAME, ROWS_NAME, Case, dense_attention, packed_contender
from kvpass.bench.report import speed_ups
from kvpass.bench.timing import Result
from kvpass.errors import OptionError, PlanError

CASE = Case(2, 4, 2, 64, 300, torch.float32, torch.device("cpu"))


@pytest.fixture(autouse=True)
def _small_cache(monkeypatch):
    monkeypatch.setattr(contenders, "cache_size", lambda device: 1 << 18)


@pytest.mark.parametrize(
    ("dtype", "recipes"),
    [
        (torch.float32, ["fp", "kivi-4bit"]),
        (torch.bfloat16, ["kivi-2bit", "cocktail"]),
        (torch.float16, ["kivi-2bit"]),
    ],
)
def test_all_contenders_are_right(dtype, recipes):
    (run,) = bench_attention([replace(CASE, dtype=dtype)], recipes, 3)
    names = [r.name for r in run.results]
    assert names == [*(f"kvpass {name}" for name in recipes), HF_NAME, ROWS_NAME]
    for result in run.results:
        assert not result.wrong, (result.name, result.error)
        assert len(result.times_ms) == 3
        assert result.spread_ms[0] <= result.median_ms <= result.spread_ms[1]
    assert run.copy_gb_s > 0
    table = str(attention_section(run))
    assert "300 tokens, batch 2, 4 query and 2 KV heads of 64" in table
    _, choice = contenders.provider(
        "pack", CASE.cached(1), "int2.channel32/window=0,pack_every=128"
    )
    assert f"kvpass {recipes[0]}: {choice.provider}, buffers: " in table


def test_bytes_and_buffers():
    q, k, v = CASE.query(0), CASE.cached(1), CASE.cached(2)
    packed = packed_contender(CASE, "kivi-2bit", q, k, v)
    # 256 keys and 172 values packed; the others exact.
    elements = 2 * 2 * 64
    bits = elements * (256 * 3 + 44 * 32 + 172 * 3 + 128 * 32)
    assert packed.bytes_read == bits // 8 + 2 * 2 * 8
    assert len(packed.calls) > 1
    first, second = (call.args[1][0].data_ptr() for call in packed.calls[:2])
    assert first != second


def test_dense_attention_is_sdpa():
    q, k, v = (x.double() for x in (CASE.query(0), CASE.cached(1), CASE.cached(2)))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, scale=CASE.scale, enable_gqa=True
    )
    got = dense_attention(q, zip(k.split(1), v.split(1), strict=True), CASE.scale)
    torch.testing.assert_close(got, expected)


def test_several_new_tokens():
    """Each sees those before it, packed or dense."""
    case = replace(CASE, queries=5)
    (run,) = bench_attention([case], ["kivi-2bit"], 1)
    assert [r.name for r in run.results] == ["kvpass kivi-2bit", HF_NAME, ROWS_NAME]
    assert not any(r.wrong for r in run.results)
    assert "300 tokens, of which 5 are new, batch 2" in str(attention_section(run))
    assert {row["queries"] for row in attention_json(run)} == {5}
    q, k, v = case.query(0), case.cached(1), case.cached(2)
    rows = list(zip(k.split(1), v.split(1), strict=True))
    last = [dense_attention(q[:, :, 4:], rows, case.scale), dense_attention(q, rows, case.scale)]
    seen = dense_attention(q, rows, case.scale, case.mask)
    torch.testing.assert_close(seen[:, :, 4:], last[0])
    assert not torch.allclose(seen[:, :, :4], last[1][:, :, :4], atol=1e-3)


def test_a_wrong_provider_is_caught(monkeypatch):
    """Values of one token are lost."""
    real = contenders.provider

    def broken(op, *args):
        target, choice = real(op, *args)

        def forgets(q, keys, values, *rest):
            values[-2][:, :, 0] = 0
            return target(q, keys, values, *rest)

        return forgets, choice

    monkeypatch.setattr(contenders, "provider", broken)
    (run,) = bench_attention([CASE], ["kivi-4bit"], 2)
    wrong, *others = run.results
    assert wrong.wrong
    assert wrong.times_ms == ()
    assert not any(r.wrong for r in others)
    assert "WRONG: relative error" in str(attention_section(run))


def test_peers_name_the_fastest():
    results = [
        Result(name, 1.0, times_ms=(time,))
        for name, time in (("kvpass fp", 1), (HF_NAME, 9), (ROWS_NAME, 5), ("sdpa flash rows", 4))
    ]
    names = [name for name, _ in speed_ups(results, PEERS)]
    assert names == [f"x {HF_NAME}", f"x {ROWS_NAME}", "x sdpa flash rows"]


def test_mistakes():
    with pytest.raises(OptionError, match="3 KV heads do not divide 4 query heads"):
        replace(CASE, kv_heads=3)
    with pytest.raises(OptionError, match="tokens=0 is not supported"):
        replace(CASE, tokens=0)
    with pytest.raises(OptionError, match="301 new tokens are more than 300 in the cache"):
        replace(CASE, queries=301)
    with pytest.raises(OptionError, match="queries=0 is not supported"):
        replace(CASE, queries=0)
    with pytest.raises(OptionError, match="Did you mean 'kivi-4bit'"):
        bench_attention([CASE], ["kivi-5bit"], 1)
    with pytest.raises(PlanError, match="head_dim 20 at 2 bits"):
        bench_attention([replace(CASE, head_dim=20)], ["kivi-2bit"], 1)
