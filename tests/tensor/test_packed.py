"""`PackedKV` is the tensor it stands for: native operations, steps, stale handles, bytes."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from kvpass.errors import StaleHandleError
from kvpass.format.parse import parse_plan
from kvpass.ops import logical
from kvpass.oracle import OracleLayer
from kvpass.plan import LayerPlan
from kvpass.recipes import recipe
from kvpass.tensor.dispatch import DECODES
from kvpass.tensor.packed import PackedKV
from tests.strategies import SEEDS, poisoned, randn, rounded, tensor_plans

KEYS = "int2.channel8/window=0,pack_every=16"
VALUES = "int4.token8/window=8,pack_every=1"
PLANS = pytest.mark.parametrize("plan", ["fp", KEYS, VALUES])


def packed(plan=KEYS, tokens=37, batch=2, seed=0, dtype=torch.float32) -> PackedKV:
    return logical.append(None, randn(batch, 2, tokens, 16, seed=seed, dtype=dtype), plan)


def saved_and_loaded(x: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def equal(x: PackedKV, plain: torch.Tensor) -> None:
    assert type(x) is PackedKV
    assert x.shape == plain.shape
    assert x.dtype == plain.dtype
    assert_close(x.decode(), plain, rtol=0, atol=0)


# The same operation on the packed and on the plain tensor. All of them stay packed.
NATIVE = {
    "crop": lambda x: x[:, :, :21],
    "crop from the end": lambda x: x[..., :-5, :],
    "crop to one": lambda x: x[:, :, :1],
    "crop to none": lambda x: x[:, :, :0],
    "crop into the window": lambda x: x[:, :, :36],
    "slice of everything": lambda x: x[:],
    "slice beyond the end": lambda x: x[:, :, :99],
    "rows": lambda x: x[1:],
    "row from the end": lambda x: x[-1:],
    "index_select": lambda x: x.index_select(0, torch.tensor([1, 0, 0])),
    "index": lambda x: x[torch.tensor([1, -2, 1])],
    "index with a mask": lambda x: x[torch.tensor([False, True])],
    "index with three dims": lambda x: x[torch.tensor([1]), ...],
    "repeat_interleave": lambda x: x.repeat_interleave(3, dim=0),
    "repeat_interleave by row": lambda x: x.repeat_interleave(torch.tensor([0, 2]), dim=0),
    "clone": lambda x: x.clone(),
    "deepcopy": copy.deepcopy,
    "detach": lambda x: x.detach(),
    "contiguous": lambda x: x.contiguous(),
    "cat of one": lambda x: torch.cat([x], 2),
    "cat": lambda x: torch.cat([x, randn(2, 2, 3, 16, seed=5)], -2),
    "cat of three": lambda x: torch.cat([x, randn(2, 2, 3, 16), randn(2, 2, 1, 16)], 2),
    "batch cat": lambda x: torch.cat([x, x]),
    "batch cat of a clone": lambda x: torch.cat([x[:1], x.clone()], 0),
    "to": lambda x: x.to(torch.float32, copy=True),
    "to cpu": lambda x: x.to("cpu"),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "save and load": saved_and_loaded,
}


@PLANS
@pytest.mark.parametrize("op", NATIVE.values(), ids=NATIVE)
def test_native_op_equals_the_plain_one(op, plan):
    source = packed(plan)
    plain = source.decode()
    with poisoned():
        result = op(source)
    if plan == KEYS and op in (NATIVE["cat"], NATIVE["cat of three"]):
        # 37 tokens: 32 packed, 5 exact; nothing is due before 48.
        assert source.row_ends == [32, 37]
    if plan == VALUES and op is NATIVE["cat of three"]:
        # After three more tokens, the next step packs those beyond a window of eight.
        plain = rounded(plain, parse_plan(plan), 32)
    equal(result, op(plain))
    assert not DECODES


@PLANS
@pytest.mark.parametrize("op", NATIVE.values(), ids=NATIVE)
def test_results_own_their_storage(op, plan):
    source = packed(plan)
    before = source.decode()
    result = op(source)
    shared = {"slice of everything", "slice beyond the end", "detach", "contiguous", "to cpu"}
    views = [NATIVE[name] for name in shared]
    if op not in views and result.numel():
        result.zero_()
        assert not result.decode().any()
    assert not source.stale
    equal(source, before)


@PLANS
def test_no_rows(plan):
    x = packed(plan)
    equal(x[:0], x.decode()[:0])
    equal(x[torch.tensor([False, False])], x.decode()[:0])


@PLANS
def test_conversion_rounds_once(plan):
    half = packed(plan, dtype=torch.bfloat16)
    wide = half.to(torch.float32)
    # Codes decode in float32: widening shows what bf16 had rounded, and narrowing gives it back.
    assert wide.dtype == torch.float32
    assert torch.equal(wide.decode().to(torch.bfloat16), half.decode())
    full = packed(plan)
    equal(full.to(torch.bfloat16), full.decode().to(torch.bfloat16))
    equal(full.half(), full.decode().half())
    assert not DECODES


@PLANS
def test_zero(plan):
    x = packed(plan)
    result = x.zero_()
    assert result is x
    equal(x, torch.zeros(2, 2, 37, 16))
    new = randn(2, 2, 1, 16, seed=9)
    equal(torch.cat([x, new], 2), torch.cat([torch.zeros(2, 2, 37, 16), new], 2))


@pytest.mark.parametrize("index", [[2], [0, -3], [5, 1]])
def test_index_out_of_range_raises(index):
    with pytest.raises(IndexError):
        packed().decode()[torch.tensor(index)]
    with pytest.raises(IndexError):
        packed()[torch.tensor(index)]


@pytest.mark.parametrize("mask", [[True, False, True], [True]])
def test_mask_of_another_length_raises(mask):
    with pytest.raises(IndexError):
        packed().decode()[torch.tensor(mask)]
    with pytest.raises(IndexError):
        packed()[torch.tensor(mask)]


@PLANS
@pytest.mark.parametrize("shape", [(1, 2, 3, 16), (2, 1, 3, 16), (2, 2, 3, 1), (2, 2, 3, 8)])
def test_cat_of_other_shapes_raises(shape, plan):
    with pytest.raises(RuntimeError):
        torch.cat([packed(plan).decode(), randn(*shape)], 2)
    with pytest.raises(RuntimeError):
        torch.cat([packed(plan), randn(*shape)], 2)


def test_saved_tensor_loads_with_default_settings():
    x, file = packed(), io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    equal(torch.load(file), x.decode())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(st.data())
def test_operations_and_steps_equal_the_oracle(dtype, data):
    dim = data.draw(st.sampled_from([16, 80]))
    plan, seed = data.draw(tensor_plans(dim)), data.draw(SEEDS)
    layer = OracleLayer(LayerPlan(plan, plan))

    def fresh(batch: int, tokens: int) -> torch.Tensor:
        nonlocal seed
        seed += 1
        return randn(batch, 2, tokens, dim, seed=seed, dtype=dtype)

    first = fresh(2, data.draw(st.integers(1, 40)))
    layer.update(first, first.clone())
    with poisoned():
        handle = logical.append(None, first, str(plan))
        for name in data.draw(st.lists(st.sampled_from(sorted(MOVES)), max_size=8)):
            source, before = handle, handle.decode()
            handle = MOVES[name](handle, layer, data, fresh)
            equal(handle, layer.keys)
            if name != "step in place":
                equal(source, before)
    assert not DECODES


def step(handle, layer, data, fresh):
    new = fresh(handle.shape[0], data.draw(st.integers(1, 20)))
    layer.update(new, new.clone())
    return torch.cat([handle, new], 2)


def step_in_place(handle, layer, data, fresh):
    new = fresh(handle.shape[0], data.draw(st.integers(1, 40)))
    layer.update(new, new.clone())
    handle = handle.clone()
    handle.reserve(new.shape[2])
    torch.ops.kvpass.append.default(handle.state, new, str(handle.plan))
    return handle.extended(new.shape[2])


def crop(handle, layer, data, fresh):
    # What is left of a group that is cut through is exact from then on, as rounded as it was.
    less = data.draw(st.integers(0, handle.shape[2] - 1))
    if less:
        layer.crop(-less)
    return handle[..., : handle.shape[2] - less, :]


def reorder(handle, layer, data, fresh):
    rows = st.integers(0, handle.shape[0] - 1)
    index = torch.tensor(data.draw(st.lists(rows, min_size=1, max_size=3)))
    layer.reorder_cache(index)
    return handle.index_select(0, index)


def select(handle, layer, data, fresh):
    rows = st.integers(0, handle.shape[0] - 1)
    index = torch.tensor(data.draw(st.lists(rows, min_size=1, max_size=3)))
    layer.batch_select_indices(index)
    return handle[index, ...]


def repeat(handle, layer, data, fresh):
    if handle.shape[0] > 3:
        return handle.clone()
    layer.batch_repeat_interleave(2)
    return handle.repeat_interleave(2, dim=0)


def join(handle, layer, data, fresh):
    if handle.shape[0] > 3:
        return copy.deepcopy(handle)
    layer.keys, layer.values = (torch.cat([x, x[:1]]) for x in (layer.keys, layer.values))
    return torch.cat([handle, handle[:1]])


def store(handle, layer, data, fresh):
    return saved_and_loaded(handle)


def convert(handle, layer, data, fresh):
    return handle.to("cpu", copy=True)


MOVES = {
    "step": step,
    "step in place": step_in_place,
    "crop": crop,
    "reorder": reorder,
    "select": select,
    "repeat": repeat,
    "join": join,
    "store": store,
    "convert": convert,
}


def test_crop_through_a_group_keeps_its_rounded_tokens():
    x = packed(KEYS)
    cut = x[:, :, :21]
    assert x.row_ends == [32, 37]
    assert cut.row_ends == [16, 21]
    assert torch.equal(cut.window.roll(0)[:, :, 16:21], x.decode()[:, :, 16:21])


def test_rows_of_other_boundaries_decode_to_join():
    x = packed(VALUES, tokens=40)
    lagging = torch.cat([packed(VALUES, tokens=37), randn(2, 2, 3, 16)], 2)
    assert x.row_ends != lagging.row_ends
    with pytest.warns(UserWarning, match="cat.default decoded a packed cache tensor"):
        joined = torch.cat([x, lagging])
    assert type(joined) is torch.Tensor
    assert torch.equal(joined, torch.cat([x.decode(), lagging.decode()]))


@given(tensor_plans(16), st.integers(1, 60), st.integers(0, 3))
def test_growing_keeps_the_content(plan, tokens, tiles):
    with poisoned():
        x = packed(str(plan), tokens)
        before, capacity = x.decode(), x.capacity
        x.grow("capacity", capacity + tiles * plan.tile)
        assert x.capacity == capacity + tiles * plan.tile
        equal(x, before)
        assert not any(t.isnan().any() for t in (x.decode(),))


@PLANS
def test_capacity_grows_geometrically(plan):
    x, moves, capacities = packed(plan, 1), 0, []
    parsed = parse_plan(plan)
    while x.shape[2] < 6000:
        x.reserve(1)
        if not capacities or x.capacity != capacities[-1]:
            capacities.append(x.capacity)
            moves += 1
        assert x.capacity >= x.shape[2] + 1 - parsed.retention.window - parsed.ring
        assert x.capacity % parsed.tile == 0
        x = x.extended(1)
    for before, after in pairwise(capacities):
        assert after >= before * 1.25
    # 256 tiles of 128 tokens by a quarter at least: log(6000 / 256) / log(1.25) = 14.1
    assert moves <= 16


@PLANS
def test_room_is_made_before_it_is_needed(plan):
    x = packed(plan, 250)
    for n in (1, 16, 17, 300, 1, 1, 16):
        x.reserve(n)
        torch.ops.kvpass.append.default(x.state, randn(2, 2, n, 16, seed=n), plan)
        x = x.extended(n)
        assert x.row_ends[0] <= x.capacity
        assert x.decode().isfinite().all()


def test_stale_handle_raises():
    old = packed()
    alias = old.detach()
    old.reserve(1)
    torch.ops.kvpass.append.default(old.state, randn(2, 2, 1, 16), KEYS)
    new = old.extended(1)
    assert (old.stale, alias.stale, new.stale) == (True, True, False)
    uses = [
        old.decode,
        old.check,
        alias.clone,
        lambda: old + 1,
        lambda: old[:, :, :3],
        lambda: old[1:],
        lambda: old.index_select(0, torch.tensor([0])),
        lambda: old[torch.tensor([0])],
        lambda: old.repeat_interleave(2, dim=0),
        lambda: torch.cat([old, randn(2, 2, 1, 16)], 2),
        lambda: torch.cat([old, old]),
        lambda: old.to(torch.bfloat16),
        old.zero_,
        lambda: old.bits_per_element,
        lambda: copy.deepcopy(old),
        lambda: old[:].decode(),
    ]
    for use in uses:
        with pytest.raises(StaleHandleError) as caught:
            use()
        assert str(caught.value) == (
            "This cache tensor of 37 tokens is stale: a later step has extended its storage. "
            "Use the tensor that the cache holds now, or clone() before the step."
        )
    assert "stale" in repr(old)
    assert "stale" not in repr(new)
    assert new.decode().shape[2] == 38


@PLANS
def test_a_clone_outlives_the_step(plan):
    old = packed(plan)
    kept, before = old.clone(), old.decode()
    old.reserve(1)
    torch.ops.kvpass.append.default(old.state, randn(2, 2, 1, 16), plan)
    new = old.extended(1)
    equal(kept, before)
    assert not kept.stale
    assert new.decode().shape[2] == 38


def test_decoding_warns_once_and_is_counted():
    x = packed()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [x + 1, x * 2, x[:, :, 3:5], x[:, 1], x * 2]
    plain = x.decode()
    for result, expected in zip(
        results, [plain + 1, plain * 2, plain[:, :, 3:5], plain[:, 1], plain * 2], strict=True
    ):
        assert type(result) is torch.Tensor
        assert torch.equal(result, expected)
    assert [str(w.message) for w in caught] == [
        "aten.add.Tensor decoded a packed cache tensor (2, 2, 37, 16) to torch.float32. kvpass "
        "warns once; kvpass.explain counts them all."
    ]
    assert DECODES["aten.mul.Tensor"] == 2
    assert DECODES["__getitem__"] == 2
    assert sum(DECODES.values()) == 5


def test_the_warning_points_at_the_user():
    x = packed()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _ = x + 1
    assert caught[0].filename == __file__


def test_attributes_do_not_decode():
    x = packed()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert x.numel() == 2 * 2 * 37 * 16
        assert x.shape[-2] == x.size(2) == 37
        assert x.dim() == 4
        assert x.is_contiguous()
        assert x.stride() == (2 * 37 * 16, 37 * 16, 16, 1)
        assert x.device.type == "cpu"
        assert not x.requires_grad
        assert repr(x) == (f"PackedKV(shape=(2, 2, 37, 16), dtype=torch.float32, plan='{KEYS}')")
    assert not DECODES


def test_tensors_of_its_shape_do_not_decode():
    x = packed(dtype=torch.bfloat16)
    plain = torch.zeros(2, 2, 37, 16, dtype=torch.bfloat16)
    assert torch.equal(torch.zeros_like(x), plain)
    assert torch.equal(torch.full_like(x, 3, dtype=torch.float32), plain.float() + 3)
    assert torch.equal(x.new_ones(2), plain.new_ones(2))
    assert torch.empty_like(x, device="meta").stride() == x.stride()
    assert not DECODES


@given(tensor_plans(80), st.integers(1, 3), st.integers(1, 400))
def test_nbytes_is_the_sum_of_the_formula(plan, batch, tokens):
    x = logical.append(None, torch.zeros(batch, 3, tokens, 80), str(plan))
    rows, codec = batch * 3, plan.codec
    capacity = plan.capacity(plan.packed(tokens))
    if codec.identity:
        expected = rows * capacity * 80 * 4 + batch * 4
    else:
        codes = rows * capacity * 2 * codec.words.count(80)
        params = rows * capacity * 80 // codec.group * (2 if codec.qparams == "fp8" else 4)
        exact = rows * (plan.ring + plan.sinks) * 80 * 4
        scales = 2 * batch * capacity * codec.scale_by_token
        expected = codes + params + scales + exact + batch * len(plan.segments) * 4
    assert x.nbytes == expected


@pytest.mark.parametrize("role", ["keys", "values"])
def test_kivi_2bit_takes_at_most_3_3_bits(role):
    plan = getattr(recipe("kivi-2bit").layer_plan("*", 128, 128), role)
    x = logical.append(None, randn(1, 1, 8192, 128, dtype=torch.bfloat16), str(plan))
    assert 2.0 < x.bits_per_element <= 3.3
    assert x.bits_per_element <= 8 * x.nbytes / x.numel() <= 3.3


@given(tensor_plans(16), st.integers(1, 300))
@settings(max_examples=20)
def test_bits_per_element_counts_what_is_used(plan, tokens):
    x = packed(str(plan), tokens, batch=1)
    count = plan.packed(tokens)
    stored = x.plan.codec.bits_per_element(16, 2) if not plan.codec.identity else 32
    bits = count * stored + (tokens - count) * 32
    ends = 8 * 4 * len(plan.segments) / (2 * 16 * tokens)
    assert x.bits_per_element == pytest.approx(bits / tokens + ends)


def test_flatten_and_unflatten():
    """To a stand-in for compilers, of the same plan, shape and dtype."""
    x = packed()
    names, meta = x.__tensor_flatten__()
    inner = {name: getattr(x, name) for name in names}
    y = PackedKV.__tensor_unflatten__(inner, meta, x.shape, x.stride())
    assert (y.shape, y.stride(), y.dtype, y.plan) == (x.shape, x.stride(), x.dtype, x.plan)
    assert y.__tensor_flatten__()[1] is meta
