"""The measurement of sizes, with kernels and a GPU that only pretend."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lowering.triton import timing
from lowering.triton.heuristics import attention_candidates, attention_sizes
from lowering.triton.launch import launch
from lowering.triton.layouts import layout_of
from lowering.triton.tuning import Workload

CPU = torch.device("cpu")
WORKLOAD = Workload("fp", "fp", 64, 64, torch.float16, 1, 1, 2, 256)
STATE_BYTES = 2 * (2 * 256 * 64 + 4)
LAYOUT = layout_of("fp", 64)
TABLE = attention_sizes(LAYOUT, LAYOUT, 2, 1, 256, torch.empty(0, dtype=torch.float16))
CANDIDATES = attention_candidates(TABLE, LAYOUT, LAYOUT)


class Gpu:
    """What is asked of `torch.cuda`; the clock is the milliseconds that launches add up to."""

    def __init__(self, monkeypatch, cache=0):
        self.now, self.captured, self.replays = 0.0, None, 0
        gpu = self

        class Graph:
            def replay(self):
                gpu.replays += 1
                for run in self.launches:
                    run()

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = gpu.now

            def synchronize(self):
                pass

            def elapsed_time(self, end):
                return end.at - self.at

        class Capture:
            def __init__(self, graph, stream, capture_error_mode):
                self.graph = graph

            def __enter__(self):
                gpu.captured = self.graph.launches = []

            def __exit__(self, *_):
                gpu.captured = None

        properties = SimpleNamespace(L2_cache_size=cache)
        for name, value in {
            "CUDAGraph": Graph, "Event": Event, "graph": Capture, "Stream": lambda: None,
            "device": lambda device: nullcontext(), "synchronize": lambda: None,
            "get_device_properties": lambda device: properties,
            "mem_get_info": lambda device: (1 << 40, 1 << 40),
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, value)

    def kernel(self, sizes, milliseconds=1.0, result=2.0, broken="", too_large=""):
        """A kernel that fills its output with ``result``."""
        gpu = self

        class Kernel:
            __name__, arg_names = "kernel", ["out"]

            def warmup(self, *, grid, out, num_warps):
                assert num_warps == sizes.warps
                if broken:
                    raise ValueError(broken)

            def __getitem__(self, grid):
                def run(out, num_warps):
                    if too_large:
                        raise RuntimeError(too_large)

                    def go():
                        out.fill_(result)
                        gpu.now += milliseconds

                    go() if gpu.captured is None else gpu.captured.append(go)

                assert grid == (1, sizes.splits)
                return run

        return Kernel()

    def attend(self, of):
        """`lowering.triton.attention.attend`, whose kernels differ as ``of`` says."""

        def attend(sizes, q, keys, values, mask, scale, *plans):
            assert not q.isnan().any()
            out = torch.empty_like(q)
            kernel = self.kernel(sizes, **of.get(sizes, {}))
            launch(kernel, (1, sizes.splits), out, num_warps=sizes.warps)
            return out

        return attend


def test_medians_of_calls(monkeypatch):
    gpu = Gpu(monkeypatch)
    attend = gpu.attend({CANDIDATES[1]: {"milliseconds": 0.25}})
    times = timing.time_attention(attend, WORKLOAD, CANDIDATES, CPU)
    assert times == [1.0, 0.25, *[1.0] * (len(CANDIDATES) - 2)]
    # One replay to warm up, then the rounds.
    assert gpu.replays == len(CANDIDATES) * 21


@pytest.mark.parametrize(("fault", "reason"), [
    ({"broken": "a tile\nat line 3"}, "ValueError: a tile"),
    ({"too_large": "shared memory"}, "RuntimeError: shared memory"),
    ({"result": 2.2}, "the result differs from that of others by 1.0e-01"),
    ({"result": float("nan")}, "the result differs from that of others by nan"),
])  # fmt: skip
def test_what_fails_has_a_reason(fault, reason, monkeypatch):
    attend = Gpu(monkeypatch).attend({CANDIDATES[2]: fault})
    times = timing.time_attention(attend, WORKLOAD, CANDIDATES, CPU)
    assert times[2] == reason
    assert all(t == 1.0 for i, t in enumerate(times) if i != 2)


def test_results_are_compared_where_the_table_fails(monkeypatch):
    of = {CANDIDATES[0]: {"broken": "x"}, CANDIDATES[2]: {"result": 7.0}}
    times = timing.time_attention(Gpu(monkeypatch).attend(of), WORKLOAD, CANDIDATES, CPU)
    assert [isinstance(t, str) for t in times[:4]] == [True, False, True, False]


@pytest.mark.parametrize(("cache", "count"), [(0, 1), (2 * STATE_BYTES, 4), (1 << 40, 256)])
def test_buffers_exceed_the_cache(cache, count, monkeypatch):
    Gpu(monkeypatch, cache)
    states = timing._states(replace(WORKLOAD, capacity=256), CPU)
    assert len(states) == count
    assert sum(t.nbytes for t in (*states[0][0], *states[0][1])) == STATE_BYTES
    assert len({t.data_ptr() for state in states for part in state for t in part}) == 4 * count
