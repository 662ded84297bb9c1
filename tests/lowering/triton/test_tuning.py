"""Sizes of attention by measurement: with timers that only pretend, since there is no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import warnings
from dataclasses import asdict, replace

import pytest
import torch
import triton
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from kvpass.errors import KernelError, OptionError
from kvpass.ops.pack import pack_fake
from lowering import lower
from lowering.codegen import CACHE_VARIABLE
from lowering.triton import attention, tuning
from lowering.triton.heuristics import attention_candidates, attention_sizes
from lowering.triton.inspection import inspect_launch
from lowering.triton.launch import record_launches
from lowering.triton.layouts import layout_of
from lowering.triton.timing import filled_state, query, record
from lowering.triton.tuning import Workload, tuned_sizes
from tests.lowering.test_choice import KEYS, VALUES, FakeDriver, decode_graph

GPU = torch.device("cuda:0")
WORKLOAD = Workload(KEYS, VALUES, 128, 128, torch.float16, 1, 8, 4, 8192)
K, V = layout_of(KEYS, 128), layout_of(VALUES, 128)


def table_of(workload=WORKLOAD, device="cpu"):
    k, v = layout_of(workload.k_plan, workload.key_dim), layout_of(workload.v_plan, 128)
    q = torch.empty(0, dtype=workload.dtype, device=device)
    return attention_sizes(k, v, workload.rows, workload.kv_heads, workload.capacity, q)


TABLE = table_of()


@pytest.fixture(autouse=True)
def _fresh(tmp_path, monkeypatch):
    """No memory of other tests, and a GPU that is asked for nothing but its name."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setenv(tuning.TUNE_VARIABLE, "1")
    monkeypatch.setattr(tuning, "device_facts", lambda device: {"device": "a GPU"})
    monkeypatch.setattr(tuning, "_tuned", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


class FakeTimer:
    """Times that are given; counts the measurements."""

    def __init__(self, times=(), default=1.0):
        self.times, self.default, self.calls = dict(times), default, 0

    def __call__(self, workload, candidates, device):
        self.calls += 1
        return [self.times.get(c, self.default) for c in candidates]


def choose(timer, workload=WORKLOAD, table=TABLE, source=str):
    return tuned_sizes(workload, table, GPU, source, timer)


def forget():
    """As a new process begins."""
    tuning._tuned.clear()


def test_candidates_are_few_and_legal():
    for k_plan, v_plan in (("fp", "fp"), (KEYS, VALUES), (VALUES, VALUES)):
        for rows in (1, 8, 9, 128):
            for dtype in (torch.float16, torch.float32):
                k, v = layout_of(k_plan, 128), layout_of(v_plan, 128)
                table = attention_sizes(k, v, rows, 8, 8192, torch.empty(0, dtype=dtype))
                found = attention_candidates(table, k, v)
                assert found[0] == table
                assert 4 <= len(found) == len(set(found)) <= 8
                for s in found:
                    assert s.columns == table.columns
                    assert s.edge_splits == table.edge_splits
                    assert s.tile % s.part == 0
                    assert s.part >= s.edge_tile >= 16
                    assert s.part % s.edge_tile == 0
                    assert not k.by_channel or k.group % s.part == 0
                    assert s.splits & (s.splits - 1) == s.tile & (s.tile - 1) == 0
                    assert s.warps in (1, 2, 4)
                    assert s.stages in (2, 3)


def test_the_fastest_is_chosen_once():
    best = attention_candidates(TABLE, K, V)[2]
    timer = FakeTimer({best: 0.5})
    assert choose(timer) == best != TABLE
    assert choose(timer) == best
    assert timer.calls == 1
    (found,) = tuning.tunings()
    assert (found.table, found.chosen, found.table_ms, found.chosen_ms) == (TABLE, best, 1.0, 0.5)


def test_the_table_stays_where_others_gain_nothing():
    other = attention_candidates(TABLE, K, V)[1]
    assert choose(FakeTimer({other: 0.99})) == TABLE


def test_short_caches_are_not_measured():
    timer = FakeTimer()
    assert choose(timer, replace(WORKLOAD, capacity=2048)) == TABLE
    assert timer.calls == 0


def test_another_process_measures_nothing(tmp_path):
    best = attention_candidates(TABLE, K, V)[3]
    assert choose(FakeTimer({best: 0.5})) == best
    (file,) = tmp_path.glob("attention_sizes_*.json")
    program = (
        "import torch, tests.lowering.triton.test_tuning as t\n"
        "t.tuning.device_facts = lambda device: {'device': 'a GPU'}\n"
        "t.torch.cuda.is_current_stream_capturing = lambda: False\n"
        "timer = t.FakeTimer()\n"
        "print(t.choose(timer), timer.calls, t.tuning.tunings()[0].chosen_ms)\n"
    )
    done = subprocess.run((sys.executable, "-c", program), capture_output=True, text=True)
    assert done.stdout.strip() == f"{best} 0 0.5", done.stderr
    assert json.loads(file.read_text())["sizes"] == asdict(best)


@pytest.mark.parametrize("damage", [
    lambda text: "",
    lambda text: text[:100],
    lambda text: "[1, 2]",
    lambda text: text.replace("a GPU", "another"),
    lambda text: text.replace('"ms"', '"microseconds"'),
    lambda text: json.dumps(json.loads(text) | {"sizes": asdict(replace(TABLE, tile=7))}),
    lambda text: json.dumps(json.loads(text) | {"sizes": {"tile": 64}}),
])  # fmt: skip
def test_a_file_that_cannot_be_used_is_written_again(damage, tmp_path):
    choose(FakeTimer())
    (file,) = tmp_path.iterdir()
    good = file.read_text()
    file.write_text(damage(good))
    forget()
    timer = FakeTimer()
    with warnings.catch_warnings(record=True) as caught:
        choose(timer)
        choose(timer)
    (message,) = (str(w.message) for w in caught)
    assert message.startswith(f"kvpass: {file} does not hold the measured sizes")
    assert timer.calls == 1
    assert file.read_text() == good


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file" / "folder"))
    with pytest.warns(UserWarning, match="measured sizes cannot be kept in .*: Not a directory"):
        assert choose(FakeTimer()) == TABLE


def test_what_a_file_holds_for(monkeypatch):
    """Another GPU, another version of the kernels, another launch or other candidates."""
    timer = FakeTimer()
    choose(timer)
    for other in ({"k_plan": "fp"}, {"dtype": torch.bfloat16}, {"batch": 2}, {"kv_heads": 4},
                  {"rows": 8}, {"capacity": 16384}, {"value_dim": 64}):  # fmt: skip
        choose(timer, replace(WORKLOAD, **other))
    choose(timer, table=replace(TABLE, splits=TABLE.splits * 2))
    forget()
    choose(timer, source=lambda sizes: "edited")
    forget()
    monkeypatch.setattr(tuning, "device_facts", lambda device: {"device": "another GPU"})
    choose(timer)
    assert timer.calls == 11


def test_sizes_that_do_not_compile_are_left_out():
    candidates = attention_candidates(TABLE, K, V)
    timer = FakeTimer({TABLE: "OutOfResources: shared memory", candidates[1]: 0.7})
    assert choose(timer) == candidates[1]
    (found,) = tuning.tunings()
    assert found.table_ms is None
    forget()
    assert choose(timer) == candidates[1]
    assert timer.calls == 1


def test_no_sizes_work(tmp_path):
    message = (
        r"None of \d sizes of kvpass::attention works on cuda:0 for keys int2\.channel32.*, "
        r"values int2\.token32.*; the first: OutOfResources: shared memory\."
    )
    with pytest.raises(KernelError, match=message):
        choose(FakeTimer(default="OutOfResources: shared memory"))
    assert list(tmp_path.iterdir()) == []


def test_too_little_memory_to_measure(tmp_path):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    reason = r"cannot be measured on cuda:0 \(CUDA out of memory\.\); a table gives them"
    with pytest.warns(UserWarning, match=reason) as w:
        assert choose(full) == choose(full) == TABLE
    assert len(w) == 1
    assert list(tmp_path.iterdir()) == []


def test_not_while_a_graph_is_captured(monkeypatch):
    timer = FakeTimer({attention_candidates(TABLE, K, V)[1]: 0.5})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert choose(timer) == TABLE
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    best = choose(timer)
    assert best != TABLE
    forget()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert choose(timer) == best
    assert timer.calls == 1


def test_where_nothing_is_measured(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not tuning.measurable(GPU)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tuning, "interpreted", lambda: False)
    assert tuning.measurable(GPU)
    assert not tuning.measurable(cpu)
    with record_launches():
        assert not tuning.measurable(GPU)
    monkeypatch.setattr(tuning, "interpreted", lambda: True)
    assert not tuning.measurable(GPU)


def test_the_switch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    on = tuning.cache_tag()
    monkeypatch.delenv(tuning.TUNE_VARIABLE)
    assert not tuning.measurable(GPU)
    off = tuning.cache_tag()
    assert off != on
    monkeypatch.setenv(tuning.TUNE_VARIABLE, "0")
    assert tuning.cache_tag() == off
    monkeypatch.setenv(tuning.TUNE_VARIABLE, "1")
    assert tuning.measurable(GPU)
    assert tuning.cache_tag() == on
    monkeypatch.setenv(tuning.TUNE_VARIABLE, "no")
    with pytest.raises(OptionError, match="KVPASS_TUNE='no' is not supported; allowed: 0, 1"):
        tuning.measurable(GPU)


def test_nominal_sizes():
    assert [tuning.nominal_capacity(n) for n in (256, 4095, 4096, 40000)] == [
        256, 2048, 4096, 32768
    ]  # fmt: skip
    assert tuning.nominal_batch(3) == 3


def test_measured_while_tracing_outside_of_it(monkeypatch):
    """AOTAutograd's modes are on where sizes are asked for; the timer's tensors are real."""
    seen = []

    def timer(attend, workload, candidates, device):
        modes = _get_current_dispatch_mode_stack()
        state = filled_state(KEYS, 128, workload, torch.device("cpu"), 0)
        kinds = {type(t) for t in state} | {type(query(workload, torch.device("cpu")))}
        seen.append((workload, modes, kinds, threading.current_thread()))
        return [0.5 if sizes.splits == 1 else 1.0 for sizes in candidates]

    monkeypatch.setattr(tuning, "_MIN_CAPACITY", 256)
    monkeypatch.setattr(attention, "measurable", lambda device: device.type == "cuda")
    monkeypatch.setattr(attention, "time_attention", timer)
    monkeypatch.setattr(triton.runtime.driver, "_active", FakeDriver())
    mode, graphs = FakeTensorMode(), []

    def keep(module, _):
        graphs.append(module)
        return make_boxed_func(module.forward)

    graph = decode_graph(mode, dim=128)
    lower(graph)
    inputs = [n.meta["example_value"] for n in graph.nodes if n.op == "placeholder"]
    with torch.no_grad(), tracing(TracingContext(mode)):
        module = torch.fx.GraphModule({}, graph)
        aot_module_simplified(module, inputs, fw_compiler=keep, inference_compiler=keep)
    ((workload, modes, kinds, thread),) = seen
    assert (workload.batch, workload.kv_heads, workload.rows, workload.capacity) == (1, 2, 4, 256)
    assert modes == []
    assert kinds == {torch.Tensor}
    assert thread is not threading.main_thread()
    (split,) = (
        n
        for n in graphs[0].graph.nodes
        if n.kwargs.get("tensors_to_clone") == ["partial", "statistics"]
    )
    # One split of the whole tiles, four of each of the four other regions.
    assert split.kwargs["grid"] == [(2, 1 + 16, 1)]


def test_a_filled_state_is_what_a_prompt_leaves():
    workload = replace(WORKLOAD, batch=2, kv_heads=1, capacity=1024)
    like = torch.empty(2, 1, 1024, 128, dtype=torch.float16)
    for plan, ends in ((KEYS, [1024, 1024]), (VALUES, [896, 1024]), ("fp", [1024])):
        state = filled_state(plan, 128, workload, torch.device("cpu"), 3)
        expected = pack_fake(like, plan)
        assert [(t.shape, t.dtype) for t in state] == [(t.shape, t.dtype) for t in expected]
        assert state[-1].tolist() == [ends, ends]
        assert len(state[0].unique()) > 1000
        again = torch.ops.kvpass.unpack(state, 1024, plan, torch.float32)
        assert again.isfinite().all()


def test_candidates_compile():
    """The table's choice has no spills; others may, since they are measured."""
    # Values as they are: a third of the time.
    k_plan, v_plan = "int4.channel32/window=0,pack_every=128", "fp"
    dim, capability = 64, 90
    with FakeTensorMode():
        x = torch.empty(1, 8, 8192, dim, dtype=torch.float16, device="cuda")
        keys, values = pack_fake(x, k_plan), pack_fake(x, v_plan)
        workload = replace(WORKLOAD, k_plan=k_plan, v_plan=v_plan, key_dim=dim, value_dim=dim)
        q = x.new_empty(1, 32, 1, dim)
        k, v = layout_of(k_plan, dim), layout_of(v_plan, dim)
        table = attention_sizes(k, v, 4, 8, keys[0].shape[2], q)
        launches = [
            record(attention.attend, workload, sizes, q, [(keys, values)])[0][0]
            # Splits are a number in the code, nothing else.
            for sizes in attention_candidates(table, k, v) if sizes.splits == table.splits
        ]  # fmt: skip
    assert 4 <= len(launches) <= 6
    first, *others = (inspect_launch(launch, capability) for launch in launches)
    assert not first.spills
    assert all(report.tensor_core_instructions > 0 for report in others)
