"""``kvpass::append`` and ``pack``: any chunking of the same tokens stores the same."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from kvpass.format.parse import parse_plan
from kvpass.format.quantize import decode
from kvpass.format.retention import MAX_STEP, RetentionPolicy
from kvpass.format.state import empty_state
from kvpass.format.tensor_plan import TensorPlan
from kvpass.ops.ring import read_ring, write_ring
from kvpass.tensor.packed import PackedKV
from tests.strategies import DTYPES, SEEDS, poisoned, randn, rounded, steps, tensor_plans

ops = torch.ops.kvpass
CASES = st.sampled_from([16, 64, 80]).flatmap(
    lambda d: st.tuples(st.just(d), tensor_plans(d), steps(), SEEDS, DTYPES)
)


def packed_in_steps(x, plan: TensorPlan, lengths) -> PackedKV:
    """Tokens of ``x``: the first length packed, the others appended in place, with room made."""
    text, first = str(plan), lengths[0]
    handle = PackedKV(ops.pack.default(x[:, :, :first], text), plan, first, x.dtype)
    for n in lengths[1:]:
        start = handle.shape[2]
        handle.reserve(n)
        ops.append.default(handle.state, x[:, :, start : start + n], text)
        handle = handle.extended(n)
    return handle


def packed_end(plan: TensorPlan, lengths) -> int:
    """Where packed tokens end after steps of these lengths, from `append`'s docstring."""
    if plan.codec.identity:
        return sum(lengths)
    total = lengths[0]
    packed = plan.sinks + plan.retention.due(total - plan.sinks)
    for n in lengths[1:]:
        counted = total if n <= MAX_STEP else total + n
        packed += plan.retention.due(counted - packed)
        total += n
    return min(packed, total)


def packed_slots(handle: PackedKV) -> int:
    """Slots of the packed segment that are written."""
    ends = handle.row_ends
    return ends[0] if handle.plan.codec.identity else max(0, ends[-2] - handle.plan.sinks)


# Whatever the chunks were, a state is its tokens with those behind the sinks and before ends[-2]
# rounded by the codec, and the rest exact. ends[-2] alone may depend on the chunks, since a step of
# up to MAX_STEP tokens leaves what it makes due to the next step.
@given(CASES)
def test_state_is_a_rounded_prefix_and_an_exact_rest(case):
    d, plan, lengths, seed, dtype = case
    x = randn(2, 2, sum(lengths), d, seed=seed, dtype=dtype)
    with poisoned():
        handle = packed_in_steps(x, plan, lengths)
        decoded = handle.decode()
    packed, total = packed_end(plan, lengths), sum(lengths)
    ends = [min(plan.sinks, total), packed, total][-len(plan.segments) :]
    assert handle.segment_ends.tolist() == [ends] * 2
    assert_close(decoded, rounded(x, plan, packed), rtol=0, atol=0)


# A step of up to MAX_STEP tokens packs everything that was due before it. So after one common such
# step any two chunkings agree: flushes start at multiples of the pack_every length in both.
@given(CASES, st.integers(1, MAX_STEP))
def test_any_chunking_equals_packing_at_once(case, last):
    d, plan, lengths, seed, dtype = case
    total = sum(lengths)
    x = randn(1, 2, total + last, d, seed=seed, dtype=dtype)
    with poisoned():
        chunked = packed_in_steps(x, plan, [*lengths, last])
        at_once = packed_in_steps(x, plan, [total, last])
    assert chunked.segment_ends.tolist() == at_once.segment_ends.tolist()
    assert_close(chunked.decode(), at_once.decode(), rtol=0, atol=0)
    packed = packed_slots(chunked)
    assert torch.equal(at_once.codes[:, :, :packed], chunked.codes[:, :, :packed])


# pack(x) = append(empty, x) for a prompt of more than MAX_STEP tokens; after a shorter one the
# append lags by what is due, until the next step.
@given(CASES)
def test_pack_is_empty_and_append(case):
    d, plan, lengths, seed, dtype = case
    total = sum(lengths)
    x = randn(2, 1, total + 1, d, seed=seed, dtype=dtype)
    text = str(plan)
    with poisoned():
        packed = ops.pack.default(x[:, :, :total], text)
        state = empty_state(x, plan, total).tensors
        state[-1].zero_()
        ops.append.default(state, x[:, :, :total], text)
        if total <= MAX_STEP:
            for each in (packed, state):
                ops.append.default(each, x[:, :, total:], text)
    assert state[-1].tolist() == packed[-1].tolist()
    count = int(state[-1][0, -1])
    assert_close(
        ops.unpack.default(state, count, text, dtype),
        ops.unpack.default(packed, count, text, dtype),
        rtol=0,
        atol=0,
    )


@given(CASES)
def test_append_touches_only_its_own_slots(case):
    d, plan, lengths, seed, dtype = case
    x = randn(1, 1, sum(lengths) + 1, d, seed=seed, dtype=dtype)
    handle = packed_in_steps(x, plan, lengths)
    handle.reserve(1)
    before, old = [t.clone() for t in handle.state], packed_slots(handle)
    ops.append.default(handle.state, x[:, :, -1:], str(plan))
    new = packed_slots(handle)
    codes, codes_before = (codes.view(torch.int16) for codes in (handle.codes, before[0]))
    assert torch.equal(codes[:, :, :old], codes_before[:, :, :old])
    assert torch.equal(codes[:, :, new:], codes_before[:, :, new:])
    if not plan.codec.identity:
        bits, bits_before = (w.view(torch.uint8) for w in (handle.window, before[2]))
        changed = (bits != bits_before).any(-1).any(0).any(0).nonzero().flatten().tolist()
        assert changed in ([], [sum(lengths) % plan.ring])


@given(st.integers(1, 20), st.integers(0, 100), st.data())
def test_window_is_a_ring(ring, start, data):
    n = data.draw(st.integers(0, ring))
    window, x = torch.full((1, 2, ring, 4), torch.nan), randn(1, 2, n, 4)
    write_ring(window, start, x)
    assert torch.equal(read_ring(window, start, start + n), x)
    assert int(window.isnan().all(-1).sum()) == 2 * (ring - n)
    for token in range(n):
        assert torch.equal(window[:, :, (start + token) % ring], x[:, :, token])


def test_token_is_attended_exactly_in_its_own_step():
    plan = parse_plan("int2.token8/window=0,pack_every=1")
    x = randn(1, 1, 60, 16)
    handle = packed_in_steps(x, plan, [40, 1, 3])
    assert torch.equal(handle.decode()[:, :, 41:44], x[:, :, 41:44])
    assert torch.equal(handle.decode()[:, :, :41], rounded(x[:, :, :41], plan, 41))


def test_poison_reaches_every_kind_of_memory():
    plan = parse_plan("int2.channel8/window=4,pack_every=8")
    with poisoned():
        codes, params, window, ends = empty_state(randn(1, 1, 1, 16), plan, 8).tensors
        grown = codes.new_empty(3)
    assert window.isnan().all()
    assert (params == torch.iinfo(torch.int32).max).all()
    for words in (codes, grown):
        assert (words == torch.iinfo(torch.int16).max).all()
    assert (ends == torch.iinfo(torch.int32).max).all()
    assert decode(plan.codec, (codes[:, :, :8], params[:, :, :1]), torch.float32).isnan().all()


def test_sinks_stay_exact():
    plan = parse_plan("int1.token8/sinks=5,window=0,pack_every=1")
    x = randn(2, 1, 120, 16)
    for lengths in ([120], [3, 1, 1, 1, 114], [1, 16, 3, 100], [2, 100, 18], [4]):
        handle = packed_in_steps(x[:, :, : sum(lengths)], plan, [*lengths])
        assert torch.equal(handle.decode()[:, :, :5], x[:, :, : min(5, sum(lengths))])
        assert handle.sinks.shape == (2, 1, 5, 16)
    assert not torch.equal(packed_in_steps(x, plan, [120]).decode()[:, :, 5:6], x[:, :, 5:6])


def test_residency_of_the_window_is_exact():
    plan = TensorPlan(parse_plan("int2.token8/window=0,pack_every=1").codec, RetentionPolicy(5, 1))
    x = randn(1, 1, 30, 16)
    handle = packed_in_steps(x, plan, [30])
    assert torch.equal(handle.decode()[:, :, 25:], x[:, :, 25:])
    assert not torch.equal(handle.decode()[:, :, :25], x[:, :, :25])
