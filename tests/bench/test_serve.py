"""``kvpass bench serve``: the same requests from packed pools and from transformers' own."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from kvpass.cli import main
from kvpass.serving.serve import is_known_version
from tests.command import failure
from tests.models import tiny_model

if not is_known_version():
    pytest.skip("another continuous batching", allow_module_level=True)

from kvpass.bench import serve
from kvpass.bench.serve import Served, ServeSetting, line, make_requests, shortfall

RECIPE = "kivi-2bit,group=16,residual=16"
# A tiny model takes 512 bytes for a token as it is.
SETTING = ServeSetting(6, 1 << 19, scale=0.2, batch_tokens=64)


@pytest.fixture
def served() -> list[Served]:
    return serve.bench_serve(tiny_model(), SETTING, ["fp", RECIPE])


def test_serves_the_same_requests_from_each_pool(served: list[Served]) -> None:
    assert [one.name for one in served] == ["transformers", "kvpass fp", f"kvpass {RECIPE}"]
    requests = make_requests(SETTING, 128, 2048)
    for one in served:
        assert one.status == "timed", one.error
        assert one.tokens == sum(request.answer for request in requests)
        assert len(one.first_token_s) == len(requests)
        assert len(one.gaps) == one.tokens - len(requests)
        assert one.seconds > max(one.first_token_s) > min(one.first_token_s) > 0
        assert max(held for held, _ in one.gaps) <= sum(request.tokens for request in requests)
    assert "exact ones of 6 requests in the bytes of 1,0" in served[2].room
    section = serve.serve_section(SETTING, served)
    assert all(len(row) == len(section.header) for row in section.rows)
    assert section.rows[0][3] == "1.00"


def test_a_wrong_answer_has_no_speed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here requests get the answers to others."""
    right = serve._serve

    def spoilt(model: Any, name: str, *rest: Any) -> Any:
        found, answers = right(model, name, *rest)
        return found, answers if name == serve.PLAIN else answers[::-1]

    monkeypatch.setattr(serve, "_serve", spoilt)
    monkeypatch.setattr("kvpass.cli.models.load_or_make_model", lambda *_: tiny_model())
    file, sizes = tmp_path / "a.json", ["--requests", "3", "--memory", "1", "--scale", "0.2"]
    asked = ["bench", "serve", *sizes, "--recipes", "fp", "--device", "cpu", "--json", str(file)]
    assert main(asked) == 1
    assert "WRONG: a logit is" in capsys.readouterr().out
    rows = json.loads(file.read_text())["results"]
    assert [row["status"] for row in rows] == ["timed", "wrong"]


def test_lengths_are_those_of_sharegpt() -> None:
    setting = ServeSetting(2000, 1, rate=5.0)
    requests = make_requests(setting, 100, 10**6)
    assert requests == make_requests(setting, 100, 10**6)
    assert statistics.mean(len(r.prompt) for r in requests) == pytest.approx(161, rel=0.1)
    assert statistics.mean(r.answer for r in requests) == pytest.approx(338, rel=0.1)
    assert requests[-1].at == pytest.approx(2000 / 5, rel=0.1)
    assert max(r.tokens for r in make_requests(setting, 100, 500)) <= 500


def test_gaps_are_beside_what_all_requests_hold() -> None:
    """Of a prompt of 10 with tokens at 0, 2 and 4 seconds, and one of 20 at 1, 2.5 and 6."""
    gaps = serve._gaps([10, 20], [[0.0, 2.0, 4.0], [1.0, 2.5, 6.0]])
    assert gaps == [(32, 2.0), (33, 1.5), (34, 2.0), (22, 3.5)]
    assert line([(0, 1.0), (10, 2.0)]) == pytest.approx((0.1, 1.0))
    assert line([(5, 3.0)]) == (0.0, 3.0)


def test_a_token_falls_short_of_the_best_one() -> None:
    logits = torch.tensor([[3.0, 1.0, -1.0], [0.0, 2.0, 4.0]])
    assert shortfall(logits, torch.tensor([0, 2])) == 0
    assert shortfall(logits, torch.tensor([0, 1])) == pytest.approx(2 / 2)


def test_refuses_what_a_pool_cannot_hold(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvpass.cli.models.load_or_make_model", lambda *_: tiny_model())
    said = failure(capsys, "bench", "serve", "--memory", "0.01")
    assert "A pool of 10,485 bytes does not hold a request of" in said
    said = failure(capsys, "bench", "serve", "--rate", "0")
    assert said == "kvpass: rate=0.0 is not supported; allowed: positive numbers."
