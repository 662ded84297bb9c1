"""Plans from texts: what they hold, what they cost, whose they are."""

from __future__ import annotations

import copy
from importlib.metadata import version
from typing import Any

import pytest
import tokenizers
import torch

import kvpass
from kvpass import Plan, Recipe, RetentionPolicy, calibrate, explain, recipe
from kvpass.calibration.clipping import ClipSearch
from kvpass.calibration.data import token_batches
from kvpass.errors import OptionError, PlanError
from tests.harness import compiled, error_to_oracle, run_steps
from tests.models import prompt, tiny_model
from tests.test_folding import assert_folded
from tests.tolerances import LOGITS_CODES_FP32

IDS = [prompt(1, 60, seed=i) for i in range(4)]
FIELDS = {"group": 8, "window": 8, "sinks": 3}


@pytest.fixture
def all_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Orders are kept whatever their error."""
    monkeypatch.setattr(ClipSearch, "error", lambda self, kind: -bool(self.plan.stored(kind)[1]))


def plan_for(model: Any, name: str = "skvq-k2v2", **fields: Any) -> Plan:
    torch._dynamo.reset()
    return calibrate(model, name, IDS, progress=False, batch=2, **(FIELDS | fields))


@pytest.mark.usefixtures("all_orders")
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "glm4", "gpt2"])
def test_compiled_equals_the_oracle_and_every_order_is_folded(family: str) -> None:
    model = tiny_model(family, layers=1)
    before = copy.deepcopy(model.state_dict())
    plan = plan_for(model)
    assert all(
        torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True)
    )
    orders = [o for layer in plan.layers.values() for o in (layer.key_basis, layer.value_basis)]
    assert len(orders) == 2
    assert None not in orders
    steps = [20, 1, 1, 5, 1, 1, 1]
    ids = prompt(2, sum(steps), seed=9)
    twin = compiled(model, plan, strict=True)
    assert error_to_oracle(twin, model, plan, ids, steps) <= LOGITS_CODES_FP32
    for report in explain(twin).graphs:
        assert_folded(report, layers=1)


def test_keys_before_their_rotary_embedding() -> None:
    """Their groups are clipped as well, and the compiled model reads what the oracle does."""
    model = tiny_model("llama", layers=1)
    plan = plan_for(model, before_rope=True)
    (layer,) = plan.layers.values()
    assert layer.before_rope
    assert layer.key_basis is None
    assert isinstance(layer.keys.codec.clip, tuple)
    ids, steps = prompt(2, 50, seed=9), [40, *[1] * 10]
    twin = compiled(model, plan, strict=True)
    assert error_to_oracle(twin, model, plan, ids, steps) <= LOGITS_CODES_FP32
    assert "attention: cpp" in str(explain(twin))


@pytest.mark.usefixtures("all_orders")
def test_every_switch_changes_the_plan() -> None:
    model = tiny_model("llama", layers=1)
    layer = plan_for(model).layers["model.layers.0.self_attn"]
    assert layer.keys.codec.half_split
    assert not layer.values.codec.half_split
    assert isinstance(layer.keys.codec.clip, tuple)
    assert len(layer.values.codec.clip) == 4
    assert layer.keys.retention == RetentionPolicy(window=8, pack_every=1, sinks=3)
    plain = plan_for(model, reorder=False).layers["model.layers.0.self_attn"]
    assert plain.key_basis is plain.value_basis is None
    unclipped = plan_for(model, "skvq-k2v1.5", clip=False, reorder="clusters", fp8=False)
    found = unclipped.layers["model.layers.0.self_attn"]
    assert str(found.values).startswith("int1.5.token8.sizes")
    assert found.values.codec.clip == 1
    assert found.keys.codec.qparams == "half"
    assert found.keys.codec.half_split
    assert sum(found.keys.codec.sizes) == 32


@pytest.mark.parametrize("better", [True, False])
def test_orders_are_kept_where_they_lessen_the_error(
    better: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of keys or of values alone, by what the search for clips has measured."""
    errors = {"keys": 1.0 + better, "values": 2.0 - better}
    found = {True: errors, False: dict.fromkeys(errors, 1.5)}
    monkeypatch.setattr(
        ClipSearch, "error", lambda self, kind: found[self.plan.stored(kind)[1] is not None][kind]
    )
    (layer,) = plan_for(tiny_model("llama", layers=1)).layers.values()
    assert (layer.value_basis is not None) == better
    assert (layer.key_basis is not None) != better
    assert layer.keys.codec.half_split != better


def test_equal_seeds_make_equal_plans() -> None:
    model = tiny_model("llama", layers=1)
    assert plan_for(model) == plan_for(model)


def test_saved_plans_load_back(tmp_path: Any) -> None:
    model = tiny_model("llama", layers=1)
    plan, path = plan_for(model), str(tmp_path / "plan.safetensors")
    plan.save(path)
    assert Plan.load(path) == plan
    assert plan.calibration is not None
    assert plan.calibration.tokens == 240
    assert plan.calibration.versions["torch"] == version("torch")
    twin = compiled(model, path)
    assert error_to_oracle(twin, model, plan, prompt(1, 30), [29, 1]) <= LOGITS_CODES_FP32


def test_plans_of_other_models_are_refused() -> None:
    model = tiny_model("llama", layers=1)
    plan = plan_for(model)

    def run(other: Any) -> None:
        torch._dynamo.reset()
        run_steps(compiled(other, plan), prompt(1, 30), [30])

    run(copy.deepcopy(model).bfloat16())
    with pytest.raises(PlanError, match=r"another model: the weight 'model\.layers\.0.* has other"):
        run(tiny_model("llama", layers=1, seed=1))
    deeper = tiny_model("llama", layers=2)
    deeper.load_state_dict(model.state_dict(), strict=False)
    with pytest.raises(PlanError, match=r"another model: it has no layer 'model\.layers\.1\."):
        run(deeper)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("skvq-k3v3", {}, "Unknown recipe 'skvq-k3v3'"),
        ("kivi-2bit", {}, "Recipe 'kivi-2bit' as given needs no calibration"),
        ("skvq-k2v2", {"clip": False, "reorder": False}, "'skvq-k2v2' as given needs no calib"),
        ("skvq-k2v2", {"grup": 3}, "Unknown option of recipe 'skvq-k2v2': 'grup'"),
        (
            "skvq-k2v2",
            {"samples": 0},
            "samples=0 is not supported; allowed: a whole number, at least 1",
        ),
        ("skvq-k2v2", {"length": -1}, "length=-1 is not supported"),
        ("skvq-k2v2", {"seed": -1}, "seed=-1 is not supported; allowed: a whole number"),
        (3, {}, "recipe=3 is not supported; allowed: a Recipe, or one of"),
        (
            "skvq-k2v2",
            {"length": 133},
            "The longest piece of text has 60 tokens, and recipe 'skvq-k2v2' keeps 133 exact",
        ),
    ],
)
def test_arguments_that_are_not_allowed(name: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        calibrate(None, name, IDS, **fields)


def test_groups_that_fit_no_head_are_refused() -> None:
    with pytest.raises(PlanError, match="group 24 does not divide head_dim 16"):
        plan_for(tiny_model("llama", layers=1), group=24)


def test_an_uncalibrated_recipe_is_one_sentence() -> None:
    with pytest.raises(PlanError, match=r"Recipe 'skvq-k2v2' is calibrated: use the plan that"):
        recipe("skvq-k2v2").plan(tiny_model("llama", layers=1).config)
    plain: Recipe = recipe("skvq-k2v2", clip=0.9, reorder=False)
    codec = plain.plan(tiny_model("llama", layers=1).config).default.keys.codec
    assert str(codec) == "int2.token16.fp8.clip0.9"


def tokenizer(text: str) -> dict[str, list[int]]:
    return {"input_ids": [ord(c) for c in text]}


@pytest.mark.parametrize(
    "data",
    [
        ["abcdefg", "hi"],
        ({"text": t} for t in ("abcdefg", "hi")),
        [{"input_ids": [ord(c) for c in "abcdefg"], "text": None}, {"input_ids": [104, 105]}],
        [torch.tensor([[ord(c) for c in "abcdefg"]]), [104, 105]],
    ],
    ids=["texts", "data set of texts", "data set of ids", "ids"],
)
def test_data_become_batches_without_padding(data: Any) -> None:
    batches = token_batches(data, tokenizer, samples=9, length=3, batch=1)
    assert ["".join(map(chr, row)) for b in batches for row in b.tolist()] == ["abc", "def", "hi"]


def test_no_more_samples_are_read_than_asked_for() -> None:
    endless = iter(lambda: "abcdefghij", None)
    batches = token_batches(endless, tokenizer, samples=5, length=4, batch=2)
    assert [b.shape for b in batches] == [(2, 4), (2, 4), (1, 4)]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "data is empty"),
        (["a"], "data is empty"),
        ("abc", "data of type str is not supported; allowed: texts, token ids"),
        (7, "data of type int is not supported"),
        ([object()], "An item of type object is no text"),
        ([torch.randn(4)], r"Token ids are float32 \[4\]; allowed: whole numbers"),
        ([torch.ones(2, 4).long()], r"Token ids are int64 \[2, 4\]"),
        ([{"label": 3}], "An item of the data set holds label; allowed: texts"),
    ],
)
def test_data_that_are_not_allowed(data: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        token_batches(data, tokenizer, 1, 8, 1)


def test_tokenizers_of_the_library_that_is_called_so() -> None:
    vocabulary = {chr(i): i for i in range(128)}
    own = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    own.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    (ids,) = token_batches(["abc"], own, 1, 8, 1)
    assert ids.tolist() == [[97, 98, 99]]
    for unknown in (object(), lambda text: text, 3):
        with pytest.raises(OptionError, match=r"tokenizer=.* cannot be used .*; allowed: a token"):
            token_batches(["abc"], unknown, 1, 8, 1)


def test_texts_need_a_tokenizer() -> None:
    with pytest.raises(OptionError, match="there is no tokenizer; pass tokenizer="):
        kvpass.calibrate(None, "skvq-k2v2", ["text"])
