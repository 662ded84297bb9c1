"""Copies that share what they have in common: none sees another's tokens, none holds them twice."""

from __future__ import annotations

import copy
import gc
import io
import os
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvpass import recipe
from kvpass.evaluate import cache_bytes
from kvpass.format.parse import parse_plan
from kvpass.format.retention import MAX_STEP
from kvpass.ops import logical
from kvpass.tensor import copies
from kvpass.tensor.packed import PackedKV
from kvpass.tensor.size import held_bytes
from tests.harness import compiled, graphs_compiled, run_steps
from tests.models import prompt, tiny_model
from tests.strategies import SEEDS, poisoned, randn, tensor_plans

RATIOS = (
    "int2.channel8/window=8,pack_every=8,pivotal=0.1",
    "int4.token8/window=8,pack_every=1,fraction=0.2",
)
KEYS = "int2.channel8/window=0,pack_every=16"
ROW = torch.tensor([1, 0])


def reserved(handle: PackedKV, new: Tensor) -> None:
    handle.check()
    if new.shape[2] > MAX_STEP or handle.written + new.shape[2] > handle.reserved:
        handle.reserve(new.shape[2])


def step(handle: PackedKV, new: Tensor, fails: bool = False) -> PackedKV:
    """What a step of a compiled model does."""
    reserved(handle, new)
    before = handle.snapshot(new.shape[2])
    torch.ops.kvpass.append.default(handle.own, new, str(handle.plan))
    if not fails:
        return handle.extended(new.shape[2])
    handle.undo(before)
    return handle


@dataclass
class Pair:
    """A branch, and a cache tensor that shares nothing and ought to be equal."""

    branch: PackedKV
    alone: PackedKV

    def do(self, operation: Callable[[PackedKV], Any]) -> Pair:
        return Pair(operation(self.branch), operation(self.alone))

    def check(self) -> None:
        assert self.branch.shape == self.alone.shape
        assert self.branch.row_ends == self.alone.row_ends
        assert torch.equal(self.branch.decode(), self.alone.decode())


KINDS = [*["step"] * 4, *["fork"] * 2, "crop", "long", *["reorder"] * 2, "drop", "zero", "fail"]


@pytest.fixture
def rows_share_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little it is."""
    monkeypatch.setattr(copies, "_saves", lambda x, fields, common: common > 0)


@pytest.mark.usefixtures("rows_share_all")
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_branch_sees_the_tokens_of_another(data: Any) -> None:
    plan = data.draw(st.one_of(tensor_plans(16), st.sampled_from(RATIOS).map(parse_plan)))
    seed = data.draw(SEEDS)

    def fresh(*lengths: int) -> Tensor:
        nonlocal seed
        seed += 1
        # With 4 heads windows are whole pages, and rows share them.
        return randn(2, 4, data.draw(st.sampled_from(lengths)), 16, seed=seed)

    with poisoned():
        first = logical.append(None, fresh(10, 33, 100, 250), str(plan))
        pairs = [Pair(first, first.clone())]
        for _ in range(data.draw(st.integers(1, 24))):
            at = data.draw(st.integers(0, len(pairs) - 1))
            pair, kind = pairs[at], data.draw(st.sampled_from(KINDS))
            if kind in ("step", "long", "fail"):
                new = fresh(17, 60, 200) if kind == "long" else fresh(1, 2, 16)
                fails = kind == "fail"
                pairs[at] = pair.do(lambda x, new=new, fails=fails: step(x, new, fails))
            elif kind == "fork":
                pairs.append(Pair(copy.deepcopy(pair.branch), pair.alone.clone()))
            elif kind == "crop":
                left = max(1, pair.branch.shape[2] - data.draw(st.sampled_from([1, 3, 30])))
                pairs[at] = pair.do(lambda x, left=left: x[..., :left, :])
            elif kind == "reorder":
                rows = torch.tensor(data.draw(st.sampled_from([[1, 0], [0, 0], [1, 1]])))
                pairs[at] = pair.do(lambda x, rows=rows: x.index_select(0, rows))
                # Rows that share nothing.
                pairs[at].alone = pairs[at].alone.clone()
            elif kind == "zero":
                pairs[at] = pair.do(PackedKV.zero_)
            elif len(pairs) > 1:
                del pairs[at], pair
                continue
            pairs[at].check()
        for pair in pairs:
            pair.check()


def forks(plan: str, count: int, tokens: int = 100) -> list[Pair]:
    first = logical.append(None, randn(1, 2, tokens, 16), plan)
    return [Pair(copy.deepcopy(first), first.clone()) for _ in range(count)]


def test_threads_may_run_branches_at_the_same_time() -> None:
    pairs = forks(KEYS, 4)
    text = randn(4, 60, 1, 2, 1, 16, seed=1)
    together = threading.Barrier(4)

    def run(at: int) -> None:
        together.wait()
        for new in text[at]:
            pairs[at] = Pair(step(pairs[at].branch, new), pairs[at].alone)

    threads = [threading.Thread(target=run, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for pair, news in zip(pairs, text, strict=True):
        for new in news:
            pair.alone = step(pair.alone, new)
        pair.check()


@pytest.mark.usefixtures("rows_share_all")
def test_branches_and_rows_are_saved_as_copies() -> None:
    pairs = forks(KEYS, 4)
    pairs[3] = pairs[3].do(lambda x: x.repeat_interleave(2, dim=0).index_select(0, ROW))
    for seed, pair in enumerate(pairs[:3]):
        pairs[seed] = pair.do(lambda x, seed=seed: step(x, randn(1, 2, 1, 16, seed=seed)))
    file = io.BytesIO()
    torch.save([pair.branch for pair in pairs], file)
    file.seek(0)
    for pair, loaded in zip(pairs, torch.load(file), strict=True):
        Pair(loaded, pair.alone).check()
        pair.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eight_branches_hold_little_more_than_one(dtype: torch.dtype) -> None:
    """16,384 tokens, and 16 of each branch's own, which are exact."""
    plan = recipe("kivi-2bit").layer_plan("*", 64, 64)
    text = randn(1, 2, 16384, 64, dtype=dtype)
    caches = [[logical.append(None, text, str(p)) for p in (plan.keys, plan.values)]]
    one = held_bytes(caches[0])
    assert one == sum(x.nbytes for x in caches[0])
    caches += [copy.deepcopy(caches[0]) for _ in range(7)]

    def held() -> int:
        return held_bytes([x for cache in caches for x in cache])

    assert held() < 1.001 * one
    for own in (1, 15):
        for seed, cache in enumerate(caches):
            caches[seed] = [step(x, randn(1, 2, own, 64, seed=seed, dtype=dtype)) for x in cache]
    assert one < held_bytes(caches[3]) < held() < 1.1 * held_bytes(caches[3])
    del caches[1:]
    gc.collect()
    assert held() < 1.02 * held_bytes([x.clone() for x in caches[0]])


def resident(tensors: Sequence[Tensor]) -> int:
    """Bytes in memory where these tensors are; a page that is mapped n times counts n times 1/n."""
    ranges = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors]
    found, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if (area := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)) is not None:
            start, end = (int(x, 16) for x in area.groups())
            counts = any(first <= start and end <= last for first, last in ranges)
        elif counts and line.startswith("Pss:"):
            found += 1024 * int(line.split()[1])
    return found


def test_rows_of_a_batch_hold_what_they_begin_with_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """16,384 tokens, 8 rows, and 16 of each row's own; a step, as beams take it, in between."""
    plan = recipe("kivi-4bit").layer_plan("*", 64, 64)
    text = randn(1, 2, 16384, 64, dtype=torch.bfloat16)
    first = [logical.append(None, text, str(p)) for p in (plan.keys, plan.values)]
    one = held_bytes(first)
    rows = [x.repeat_interleave(8, dim=0) for x in first]
    alone = [torch.cat([x] * 8) for x in first]
    assert held_bytes(alone) > 7.9 * one
    assert held_bytes(rows) < 1.001 * one
    order = torch.tensor([1, 1, 2, 0, 4, 5, 6, 7])
    # Each row's tensors have pages for themselves where it has written.
    for count, index, most in ((1, order, 1.05), (15, torch.arange(8), 1.13)):
        new = randn(8, 2, count, 64, seed=count, dtype=torch.bfloat16)
        rows, alone = ([step(x, new).index_select(0, index) for x in c] for c in (rows, alone))
        assert held_bytes(rows) < most * one
    left = [[x[..., :16300, :] for x in cache] for cache in (rows, alone)]
    # Decoded into each row's window: the group that is cut through.
    assert held_bytes(left[0]) < 1.3 * one
    # Beyond the room that there is.
    for x in (*rows, *alone):
        x.reserve(9000)
    for cache in ((rows, alone), left):
        assert all(torch.equal(*(x.decode() for x in pair)) for pair in zip(*cache, strict=True))
    assert held_bytes(rows) < most * one
    # Where the system gives no more files.
    with monkeypatch.context() as patched:
        patched.setattr("os.memfd_create", Mock(side_effect=OSError))
        assert held_bytes([x.repeat_interleave(8, dim=0) for x in first]) > 7.9 * one
    mapped = [t for x in rows for t in (x.codes, x.qparams, x.window)]
    assert 0.9 * one < resident(mapped) <= held_bytes(rows)
    assert held_bytes([x.clone() for x in rows]) > 8 * one
    files = len(os.listdir("/proc/self/fd"))
    del rows, left, mapped, cache
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= files - 2


@pytest.mark.usefixtures("rows_share_all")
def test_a_model_goes_on_with_rows_that_share(monkeypatch: pytest.MonkeyPatch) -> None:
    model = compiled(tiny_model("llama", layers=1), recipe("kivi-2bit", group=8, residual=16))
    torch._dynamo.reset()
    caches = [run_steps(model, prompt(1, 250), [250])[1] for _ in range(2)]
    caches[0].batch_repeat_interleave(3)
    with monkeypatch.context() as patched:
        patched.setattr(copies, "_saves", lambda *_: False)
        caches[1].batch_repeat_interleave(3)
    assert [c.layers[0].keys._line.rows is not None for c in caches] == [True, False]
    for turn in range(4):
        ids = prompt(3, 6, turn)
        wanted, _ = run_steps(model, ids, [1] * 6, cache=caches[1])
        graphs = graphs_compiled()
        found, _ = run_steps(model, ids, [1] * 6, cache=caches[0])
        assert torch.equal(found, wanted)
        assert graphs_compiled() == graphs
        for c in caches:
            c.reorder_cache(torch.tensor([2, 2, 0]))
            c.crop(-1 - 9 * (turn % 2))


@pytest.mark.parametrize("before_rope", [False, True])
def test_a_model_goes_on_in_several_ways(before_rope: bool) -> None:
    """Beyond the room for 256 tokens, turn by turn, and last with two caches in one call."""
    model, text = tiny_model("llama", layers=1), prompt(1, 250)
    chosen = recipe("kivi-2bit", group=8, residual=16, before_rope=before_rope)
    twin = compiled(model, chosen)
    torch._dynamo.reset()
    alone = [run_steps(twin, text, [250])[1] for _ in range(3)]
    _, cache = run_steps(twin, text, [250])
    caches = [cache, copy.deepcopy(cache), copy.deepcopy(cache)]
    assert cache_bytes(*caches)[0] < 1.01 * cache_bytes(cache)[0]
    for turn in range(6):
        ids = prompt(1, 4, turn)
        at, other = turn % 3, alone[turn % 3]
        wanted, _ = run_steps(twin, ids, [1] * 4, cache=other)
        graphs = graphs_compiled()
        found, _ = run_steps(twin, ids, [1] * 4, cache=caches[at])
        assert torch.equal(found, wanted)
        assert graphs_compiled() == graphs
        for c in (other, caches[at]):
            c.crop(-1 - turn % 3)
    # Crops share what they can; cosines and sines of a cropped cache are its own.
    assert before_rope or cache_bytes(*caches)[0] < 1.5 * cache_bytes(cache)[0]

    def both(ids: Tensor, *pair: Any) -> list[Tensor]:
        return [model(ids, past_key_values=c, use_cache=True).logits for c in pair]

    both = torch.compile(both, backend="kvpass", options={"recipe": chosen, "inner": "eager"})
    with torch.no_grad():
        for _ in range(2):
            results = (both(prompt(1, 1), *pair) for pair in (caches[:2], alone[:2]))
            assert all(torch.equal(*same) for same in zip(*results, strict=True))
