"""Copies that share what they have in common: none sees another's tokens, none holds them twice."""

from __future__ import annotations

import copy
import gc
import io
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvpass import recipe
from kvpass.evaluate import cache_bytes
from kvpass.format.parse import parse_plan
from kvpass.format.retention import MAX_STEP
from kvpass.ops import logical
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


KINDS = [*["step"] * 4, *["fork"] * 2, "crop", "long", "reorder", "drop", "zero", "fail"]


@settings(max_examples=150)
@given(st.data())
def test_no_branch_sees_the_tokens_of_another(data: Any) -> None:
    plan = data.draw(st.one_of(tensor_plans(16), st.sampled_from(RATIOS).map(parse_plan)))
    seed = data.draw(SEEDS)

    def fresh(*lengths: int) -> Tensor:
        nonlocal seed
        seed += 1
        return randn(2, 2, data.draw(st.sampled_from(lengths)), 16, seed=seed)

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
                pairs[at] = pair.do(lambda x: x.index_select(0, torch.tensor([1, 0])))
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


def test_branches_are_saved_as_copies() -> None:
    pairs = forks(KEYS, 3)
    for seed, pair in enumerate(pairs):
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
