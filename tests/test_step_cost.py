"""What a decode step costs as the context grows: appends and memory nothing more, attention its
tokens."""

from __future__ import annotations

import statistics
import time
from functools import partial

import pytest
import torch

import lowering.providers  # noqa: F401  (registers the C++ ops)
from kvpass import recipe
from kvpass.bench.filling import Setting, packed_cache
from kvpass.format.parse import parse_plan
from kvpass.format.state import empty_state
from tests.harness import compiled, peak
from tests.models import tiny_model
from tests.triton_templates.kernel_reference import kivi

OPS = {"aten": torch.ops.kvpass, "cpp": torch.ops.kvpass_cpp}
SHORT, LONG = 1024, 65536


def random_state(plan, packed, exact, heads=8, dim=128):
    """A state of ``packed`` and ``exact`` random tokens, with room for one pack_every more."""
    p = parse_plan(plan)
    state = empty_state(torch.empty(1, heads, 1, dim), p, packed + p.retention.pack_every).tensors
    for x in state[:-1]:
        x.random_(-9999, 9999)
    if not p.codec.identity:
        # Scales of 0.01 and minima of 0.
        state[1].fill_(0x211F)
        state[-1][:, 0] = packed
    state[-1][:, -1] = packed + exact
    return state


def without_one_step(state, plan, packed, total):
    """Copies of the state's tensors, but zeros where a token at position ``total`` is stored and
    where a pack_every from position ``packed`` is packed."""
    p = parse_plan(plan)
    due = p.retention.due(total - packed)
    copies = dict(zip(p.layout.names, (x.clone() for x in state), strict=True))
    for field in p.layout.fields:
        if field.grows == "capacity":
            first, count = (total, 1) if p.codec.identity else (packed, due)
            field.tokens(copies[field.name], first, count).zero_()
    if not p.codec.identity:
        copies["window"][:, :, total % p.ring] = 0
    copies["segment_ends"].zero_()
    return list(copies.values())


# The exact tokens are so many that a pack_every is due where the plan has one.
PLANS = [(kivi(2)[0], 50), (kivi(2)[0], 128), (kivi(4)[1], 129)]
TABLE = "codebook-0.9,-0.5,-0.3,-0.1,0.05,0.2,0.55,0.95/window=0,pack_every=1"
OUTLIERS = [(f"nuq3.{axis}.outliers4.{TABLE}", 1) for axis in ("channel0", "token128")]
APPENDS = [(ops, *case) for ops in OPS for case in [*PLANS, *OUTLIERS, ("fp", 0)]]


@pytest.mark.parametrize(("ops", "plan", "exact"), APPENDS)
def test_an_append_touches_and_allocates_only_its_tokens(ops, plan, exact):
    """At 64K tokens as at 1K: all else keeps its place and its bytes."""
    new, allocated = torch.randn(1, 2, 1, 64), []
    # What is made once for a plan is not measured.
    OPS[ops].append(random_state(plan, SHORT, exact, heads=2, dim=64), new, plan)
    for packed in (SHORT, LONG):
        total = packed + exact
        state = random_state(plan, packed, exact, heads=2, dim=64)
        before = without_one_step(state, plan, packed, total)
        places = [x.data_ptr() for x in state]
        allocated.append(peak(lambda state=state: OPS[ops].append(state, new, plan)))
        assert [x.data_ptr() for x in state] == places
        assert state[-1][0, -1] == total + 1
        after = without_one_step(state, plan, packed, total)
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert allocated[0] == allocated[1]


@pytest.fixture
def one_thread():
    """Two would wait for one another, and so for the machine's other work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def interleaved(calls, rounds):
    """Seconds of each call, round by round."""
    times = [[] for _ in calls]
    for _ in range(rounds):
        for call, seconds in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
    return times


@pytest.mark.parametrize(("ops", "plan", "exact"), [a for a in APPENDS if a[1] != "fp"])
@pytest.mark.usefixtures("one_thread")
def test_an_append_takes_no_longer_at_64k_tokens(ops, plan, exact):
    """Measured 1.0; a pass over the packed tokens would take many times as long."""
    new = torch.randn(1, 8, 1, 128)

    def step(state):
        state[-1].copy_(ends[state[0].shape[2]])
        OPS[ops].append(state, new, plan)

    states = [random_state(plan, packed, exact) for packed in (SHORT, LONG)]
    ends = {state[0].shape[2]: state[-1].clone() for state in states}
    calls = [partial(step, state) for state in states]
    short, long = (statistics.median(t) for t in interleaved(calls, 60))
    assert long < 2 * short, (short, long)


@pytest.mark.usefixtures("one_thread")
def test_attention_time_is_linear_in_tokens():
    """Four times the tokens take four times as long; quadratic time would be 16."""
    plans, q = kivi(2), torch.randn(1, 8, 1, 64)
    attention = torch.ops.kvpass_cpp.attention
    calls = []
    for n in (LONG // 4, LONG):
        keys, values = random_state(plans[0], n, 10, 2, 64), random_state(plans[1], n, 128, 2, 64)
        calls.append(partial(attention, q, keys, values, None, 0.125, *plans))
    short, long = (min(seconds) for seconds in interleaved(calls, 40))
    assert 2 < long / short < 8, (short, long)


def test_a_compiled_step_allocates_the_same_at_any_context():
    """Its buffers have room: growing, once in many steps, is not measured here."""
    model = tiny_model("llama", head_dim=64, max_position_embeddings=16384)
    packed, ids = compiled(model, "kivi-2bit", "inductor"), torch.tensor([[5]])
    highest = []
    for context in (1024, 8192):
        setting = Setting(model.config, context, 1, torch.float32, torch.device("cpu"))
        cache = packed_cache(setting, recipe("kivi-2bit").layer_plan("*", 64, 64))
        with torch.no_grad():
            # The first step is compiled, the second makes room for values.
            for _ in range(3):
                packed(ids, past_key_values=cache, use_cache=True)
            highest.append(peak(lambda c=cache: packed(ids, past_key_values=c, use_cache=True)))
    assert abs(highest[0] - highest[1]) < 1024
