"""`Plan`: lookup, and files."""

from __future__ import annotations

import json
import math
import pickle
import tempfile
import warnings
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from kvpass.errors import PlanError
from kvpass.format.channels import ChannelOrder, ChannelRanges
from kvpass.format.chunked_plan import ChunkedPlan
from kvpass.format.codec import Codec
from kvpass.format.parse import parse_plan
from kvpass.format.retention import RetentionPolicy
from kvpass.format.tensor_plan import TensorPlan
from kvpass.plan import Calibration, LayerPlan, Plan
from kvpass.recipes import recipe
from kvpass.zoo.families import tiny_config
from tests.bases import free, rotation
from tests.strategies import SEEDS, tensor_plans

SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 9), SEEDS.map(torch.Generator().manual_seed))
BASES = st.none() | SHAPES.map(lambda x: ChannelOrder.of(free(*x)))
BASES |= SHAPES.map(lambda x: rotation(*x))
LAYERS = st.builds(LayerPlan, tensor_plans(64), tensor_plans(64), BASES, BASES)
PLANS = st.builds(
    Plan, LAYERS, st.dictionaries(st.text(max_size=20), LAYERS, max_size=3), st.text()
)
KIVI = LayerPlan(
    TensorPlan(Codec(2, "channel", 32), RetentionPolicy(0, 128)),
    TensorPlan(Codec(2, "token", 32), RetentionPolicy(128, 1)),
)


def write(path, header, key="kvpass"):
    save_file(
        {}, str(path), metadata={key: header if isinstance(header, str) else json.dumps(header)}
    )
    return path


@given(PLANS)
def test_saved_plan_loads_back(plan):
    with tempfile.TemporaryDirectory() as folder:
        plan.save(f"{folder}/plan.safetensors")
        loaded = Plan.load(f"{folder}/plan.safetensors")
        assert loaded == plan
        assert hash(loaded.default) == hash(plan.default)


def test_lookup_by_path_and_index():
    other = LayerPlan()
    plan = Plan(KIVI, {"model.layers.1.self_attn": other})
    assert plan.layer("model.layers.1.self_attn") is other
    assert plan.layer("model.layers.0.self_attn") is KIVI
    assert plan.layer_at(1) is other
    assert plan.layer_at(0) is KIVI
    assert plan.layer_at(11) is KIVI


def test_fields_that_need_no_calibration():
    """Window, sinks and Q-Norm are replaced in all layers, but for what they are calibrated by."""
    even = (-1.0, -0.3, 0.3, 1.0)
    keys = Codec(2, "channel", 0, codebook=even, qnorm=(1.1, 0.0))
    policy = RetentionPolicy(8, 1, 3)
    ranges = ChannelRanges.of(torch.zeros(2, 1, 32, dtype=torch.int32))
    layer = LayerPlan(
        TensorPlan(keys, policy),
        TensorPlan(Codec(2, "token", 32, codebook=even), policy),
        before_rope=True,
        key_ranges=ranges,
    )
    plan = Plan(layers={"a": layer, "b": KIVI}, recipe="mine")
    assert plan.with_() == plan
    changed = plan.with_(window=64, sinks=5, qnorm=False)
    assert changed.layers["a"].keys == TensorPlan(
        replace(keys, qnorm=None), RetentionPolicy(64, 1, 5)
    )
    assert changed.layers["a"].key_ranges is ranges
    assert changed.layers["b"].keys.retention == RetentionPolicy(64, 128, 5)
    assert (changed.default, changed.recipe) == (LayerPlan(), "mine")
    with pytest.raises(
        PlanError, match=r"sinks=2 needs calibration: .* leave out the first 3 tokens"
    ):
        plan.with_(sinks=2)
    with pytest.raises(PlanError, match="qnorm=True needs calibration: the plan has no numbers"):
        plan.with_(qnorm=True)


def test_layer_plan_is_checked_against_the_heads():
    plan = Plan(KIVI)
    assert plan.layer_plan("a", 64, 64) is KIVI
    with pytest.raises(PlanError) as caught:
        plan.layer_plan("model.layers.0.self_attn", 64, 80)
    assert str(caught.value) == (
        "The values of layer 'model.layers.0.self_attn' cannot be stored as int2.token32: "
        "group 32 does not divide head_dim 80."
    )
    with pytest.raises(PlanError) as caught:
        plan.layer_plan("b", 20, 64)
    assert str(caught.value) == (
        "The keys of layer 'b' cannot be stored as int2.channel32: "
        "head_dim 20 at 2 bits does not fill whole 16-bit words."
    )


def test_missing_file(tmp_path):
    path = tmp_path / "none.safetensors"
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    assert str(caught.value) == f"Plan file '{path}' does not exist."


def test_other_format(tmp_path):
    path = write(tmp_path / "p", {"format": 2})
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    assert str(caught.value) == f"Plan file '{path}' has format 2; this version reads 1."


GOOD = {"format": 1, "recipe": "r", "default": {"keys": "fp", "values": "fp"}, "layers": {}}
DAMAGED = {
    "not json": "{",
    "a number": 3,
    "a list": [1],
    "null": None,
    "no default": {k: v for k, v in GOOD.items() if k != "default"},
    "no recipe": {k: v for k, v in GOOD.items() if k != "recipe"},
    "default is text": {**GOOD, "default": "fp"},
    "keys are missing": {**GOOD, "default": {"values": "fp"}},
    "keys are a list": {**GOOD, "default": {"keys": ["fp"], "values": "fp"}},
    "keys are a number": {**GOOD, "default": {"keys": 3, "values": "fp"}},
    "layers is a list": {**GOOD, "layers": [1]},
    "a layer is text": {**GOOD, "layers": {"a": "fp"}},
    "unreadable plan": {**GOOD, "default": {"keys": "int2", "values": "fp"}},
    "5 bits": {**GOOD, "default": {"keys": "int5.token32/window=0,pack_every=1", "values": "fp"}},
    "group of 1": {
        **GOOD,
        "default": {"keys": "int2.token1/window=0,pack_every=1", "values": "fp"},
    },
    "pack_every of 0": {
        **GOOD,
        "default": {"keys": "int2.token32/window=0,pack_every=0", "values": "fp"},
    },
    "infinite tokens": {
        **GOOD,
        "calibration": {"weights": {}, "versions": {}, "seed": 0, "tokens": math.inf},
    },
    "brackets in brackets": "[" * 100_000,
    "a long name": {**GOOD, "default": {"keys": "int2" * 9999, "values": "fp"}},
    "group over pack_every": {
        **GOOD,
        "default": {"keys": "int2.channel32/window=0,pack_every=16", "values": "fp"},
    },
}


def one_sentence(message: str, path) -> bool:
    return (
        message.startswith(f"Plan file '{path}' ") and message.endswith(".") and "\n" not in message
    )


@pytest.mark.parametrize("header", DAMAGED.values(), ids=DAMAGED)
def test_damaged_header(tmp_path, header):
    path = write(tmp_path / "p.safetensors", header)
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    assert one_sentence(str(caught.value), path), str(caught.value)
    assert len(str(caught.value)) < 500


def test_what_is_printed_of_a_plan_is_short():
    ranges = ChannelRanges.of(torch.zeros(8, 1, 128, dtype=torch.int32))
    codec = Codec(2, "token", 32, clip=(0.5,) * 4)
    layer = LayerPlan(TensorPlan(codec, RetentionPolicy(128, 1)), key_ranges=ranges)
    calibration = Calibration(0, 65536, {}, {})
    layers = {str(i): layer for i in range(31)} | {"31": LayerPlan()}
    text = repr(Plan(LayerPlan(), layers, "skvq-k2v2", calibration))
    assert text == (
        "Plan(recipe='skvq-k2v2', default=LayerPlan(keys='fp', values='fp'), 31 x LayerPlan("
        "keys='int2.token32.clip0.5..0.5/window=128,pack_every=1', values='fp', key_ranges), 1 x "
        "LayerPlan(keys='fp', values='fp'), calibrated on 65536 tokens)"
    )
    assert "\n" not in text


def test_a_long_path_is_told_by_its_end():
    with pytest.raises(PlanError, match=r"^Plan file '\.\.\.x+/plan\.safetensors' ") as caught:
        Plan.load("x" * 9999 + "/plan.safetensors")
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        (None, "SafetensorError"),
        (torch.tensor([0, 1]), "A channel order is int64 [2]; allowed: int64 [heads, channels]."),
        (torch.tensor([[0, 1]]).int(), "A channel order is int32 [1, 2]; allowed: int64"),
        (torch.tensor([[0, 0]]), "A channel order is no permutation: each row must hold 0 to 1"),
    ],
    ids=["missing", "one row", "dtype", "twice"],
)
def test_damaged_orders(tmp_path, order, reason):
    path = tmp_path / "p.safetensors"
    header = {**GOOD, "default": {"keys": "fp", "values": "fp", "key_order": "order"}}
    tensors = {} if order is None else {"order": order}
    save_file(tensors, str(path), metadata={"kvpass": json.dumps(header)})
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    assert one_sentence(str(caught.value), path), str(caught.value)
    assert reason in str(caught.value)


def test_orders_are_checked_against_the_heads():
    plan = LayerPlan(key_basis=ChannelOrder.of(torch.tensor([[1, 0], [0, 1]])))
    plan.check("a", 2, 4, kv_heads=2)
    for dim, heads in ((4, 2), (2, 1)):
        with pytest.raises(PlanError) as caught:
            plan.check("a", dim, 4, heads)
        assert str(caught.value) == (
            "The channel order of the keys of layer 'a': it is for 2 heads of 2 channels, the "
            f"model has {heads} heads of {dim}."
        )


def test_other_safetensors_file(tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file({"w": torch.zeros(2)}, str(path))
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    assert one_sentence(str(caught.value), path)


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("a plan file was unpickled",)


@pytest.mark.parametrize(
    "content", [b"", b"\x00", b"not a plan", b"\xff" * 64, pickle.dumps(Bomb())]
)
def test_other_files_are_refused_and_never_unpickled(tmp_path, content):
    path = tmp_path / "p.safetensors"
    path.write_bytes(content)
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    assert one_sentence(str(caught.value), path)


def test_folder_is_refused(tmp_path):
    with pytest.raises(PlanError) as caught:
        Plan.load(tmp_path)
    assert one_sentence(str(caught.value), tmp_path)


@given(st.data())
def test_truncated_and_altered_files(data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "p.safetensors"
        order = ChannelOrder.of(torch.tensor([[1, 0]]))
        plan = Plan(KIVI, {"a.0": LayerPlan(key_basis=order)}, "kivi-2bit")
        plan.save(path)
        content = bytearray(path.read_bytes())
        size = len(content)
        if data.draw(st.booleans()):
            content = content[: data.draw(st.integers(0, len(content) - 1))]
        else:
            content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(
                st.integers(0, 7)
            )
        path.write_bytes(bytes(content))
        found = load_or_error(path)
        # An altered name or number may still be a plan; a truncated file never is.
        if isinstance(found, Plan):
            assert len(content) == size
            found.save(path)
            assert Plan.load(path) == found
        else:
            assert one_sentence(str(found), path), str(found)


def load_or_error(path: Path) -> Plan | PlanError:
    try:
        return Plan.load(path)
    except PlanError as error:
        return error


def test_layers_are_named_by_path_or_by_number():
    by_path = LayerPlan(values=KIVI.values)
    plan = Plan(layers={"1": KIVI, "model.layers.2.self_attn": by_path})
    assert plan.layer("model.layers.1.self_attn") == plan.layer_at(1) == KIVI
    assert plan.layer("model.layers.2.self_attn") == plan.layer_at(2) == by_path
    assert plan.layer("model.layers.11.self_attn") == plan.layer_at(11) == LayerPlan()


def test_layers_with_head_dimensions_of_their_own():
    plan = recipe("kivi-4bit").plan(tiny_config("gemma4_text"))
    groups = [plan.layer_at(i).values.codec.group for i in range(4)]
    assert groups == [16, 32, 16, 32]


def plan_of_0_1() -> Plan:
    """What the file holds, by today's names."""
    order = ChannelOrder.of(torch.tensor([[4, 0, 7, 3, 2, 5, 1, 6], [7, 5, 1, 4, 6, 2, 0, 3]]))
    qparams = [
        [-312250, -737832, 170584, -209524, -444102, -507199, -98842, -374233],
        [-677801, 1034414, -303528, -160943, 255653, -441831, -38067, 1022024],
    ]
    ranges = ChannelRanges.of(torch.tensor(qparams, dtype=torch.int32).unsqueeze(1))
    ternary = Codec(
        1.5, "token", 8, clip=0.92, qparams="fp8", ternary_in_2bit=True, half_split=True
    )
    default = LayerPlan(
        TensorPlan(Codec(2, "channel", 32), RetentionPolicy(0, 128, sinks=4)),
        TensorPlan(ternary, RetentionPolicy(128, 1)),
    )
    codebook = (-1.0, -0.3, 0.3, 1.0)
    keys = Codec(2, "channel", 0, outliers=2, codebook=codebook, qnorm=(1.1, 0.05))
    values = Codec(2, "token", 16, outliers=2, codebook=codebook)
    calibrated = LayerPlan(
        TensorPlan(keys), TensorPlan(values), before_rope=True, key_ranges=ranges
    )
    ratios = LayerPlan(
        TensorPlan(Codec(3, "channel", 32, pack11=True), RetentionPolicy(0, 32, pivotal=0.1)),
        TensorPlan(Codec(3, "token", 8), RetentionPolicy(0, 32, fraction=0.2)),
    )
    sizes = Codec(2, "token", 4, sizes=(2, 6, 4, 4), clip=(0.9, 0.8, 0.7, 1.0))
    retained = RetentionPolicy(16, 1, retained=8, filter="heavy_hitters")
    ordered = LayerPlan(
        TensorPlan(sizes, retained),
        TensorPlan(Codec(2, "token", 4), RetentionPolicy(16, 1)),
        order,
        order,
    )
    by_channel = (Codec(2, "channel", 32), Codec(4, "channel", 32))
    by_token = (Codec(2, "token", 8), Codec(4, "token", 8))
    chunked = LayerPlan(
        ChunkedPlan(chunk_codecs=by_channel, chunk=32), ChunkedPlan(chunk_codecs=by_token, chunk=32)
    )
    layers = {"0": calibrated, "1": ratios, "2": ordered, "3": chunked}
    return Plan(
        default, layers, "custom", Calibration(7, 4096, {"w": (1.0, 2.0)}, {"torch": "2.13.0"})
    )


def test_files_of_kvpass_0_1_are_read() -> None:
    """One with every word that is another one today, as version 0.1 has written it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = Plan.load(Path(__file__).parent / "format" / "plan_of_0.1.safetensors")
    wanted = plan_of_0_1()
    assert loaded.layers.keys() == wanted.layers.keys()
    for name in wanted.layers:
        for field in fields(LayerPlan):
            got, expected = (getattr(plan.layers[name], field.name) for plan in (loaded, wanted))
            assert got == expected, (name, field.name)
    for field in fields(Plan):
        assert getattr(loaded, field.name) == getattr(wanted, field.name), field.name


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("int2.channel32/window=0,flush=128", "int2.channel32/window=0,pack_every=128"),
        (
            "int1.5.token8.slots.pairs/window=1,flush=1",
            "int1.5.token8.ternary_in_2bit.half_split/window=1,pack_every=1",
        ),
        (
            "nuq2.token16.table-1.0,-0.3,0.3,1.0/window=0,flush=1,kept=8,filter=outliers",
            "nuq2.token16.codebook-1.0,-0.3,0.3,1.0/window=0,pack_every=1,retained=8,"
            "filter=outliers",
        ),
        ("int3x11.channel32|fp/chunk=32", "int3.channel32.pack11|fp/chunk=32"),
    ],
)
def test_words_of_kvpass_0_1_warn(old: str, new: str) -> None:
    parse_plan.cache_clear()
    with pytest.warns(FutureWarning, match="the old words are read by this release only"):
        plan = parse_plan(old)
    assert plan == parse_plan(new)
    assert str(plan) == new
