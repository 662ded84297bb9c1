"""`measure`: checked first, then in turns."""

from __future__ import annotations

import pytest
import torch

from kvpass.bench import timing
from kvpass.bench.report import timing_cells
from kvpass.bench.timing import Contender, measure

CPU = torch.device("cpu")


def contender(name, log, value=0.0, calls=1, **options):
    def call(i):
        def run():
            log.append((name, i))
            return torch.tensor(value)

        return run

    return Contender(name, [call(i) for i in range(calls)], float, 0.5, **options)


def test_contenders_take_turns_on_rotating_buffers():
    log = []
    pair = [contender("a", log, calls=2), contender("b", log)]
    a, b = measure(pair, 3, CPU, warm_up=0)
    assert log[:3] == [("a", 0), ("a", 1), ("b", 0)]
    turns = [("a", 0), ("b", 0), ("a", 1), ("b", 0), ("a", 0), ("b", 0)]
    assert log[3:] == turns
    assert len(a.times_ms) == len(b.times_ms) == 3
    assert a.first_call_s > 0


def test_a_pause_before_each_turn_whose_last_call_is_timed(monkeypatch):
    log = []
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: log.append(seconds))
    pair = [contender("a", log, calls=2), contender("b", log)]
    results = measure(pair, 2, CPU, warm_up=0, lead=1, pause=0.5)
    turns = [0.5, ("a", 0), ("a", 1), 0.5, ("b", 0), ("b", 0)]
    assert log == [("a", 0), ("a", 1), ("b", 0), *turns, *turns]
    assert [len(r.times_ms) for r in results] == [2, 2]


@pytest.mark.parametrize("value", [0.6, float("nan"), float("inf")])
def test_a_wrong_result_is_not_timed(value):
    log = []
    (result,) = measure([contender("a", log, value)], 3, CPU)
    assert result.wrong
    assert result.times_ms == ()
    assert log == [("a", 0)]
    assert timing_cells(result)[1].startswith("WRONG: relative error")


def test_every_buffer_is_checked():
    good, bad = (contender("a", [], value).calls[0] for value in (0.0, 1.0))
    (result,) = measure([Contender("a", [good, bad], float, 0.5)], 1, CPU)
    assert result.wrong
    assert result.error == 1.0


def test_a_peer_that_cannot_run_says_why():
    def fails():
        raise RuntimeError("no kernel for this\nmore")

    peer = Contender("peer", [fails], float, 0.5)
    results = measure([peer, contender("a", [])], 1, CPU)
    assert timing_cells(results[0]) == ["peer", "not run: RuntimeError: no kernel for this"]
    assert results[1].times_ms
    peer.required = True
    with pytest.raises(RuntimeError, match="no kernel"):
        measure([peer], 1, CPU)
