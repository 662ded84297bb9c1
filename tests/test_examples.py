"""The examples run, and refuse bad input with a sentence."""

from __future__ import annotations

import argparse
import copy
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

import kvpass
from examples import (
    add_a_filter,
    add_a_rule,
    chunk_switching,
    cocktail,
    frontier,
    judging,
    kvmix_parts,
    kvquant_ladder,
    plot_peak_memory,
    prefilled_documents,
    quickstart,
    resumed_chat,
    rotation_ablation,
    skvq_ablation,
)
from kvpass import KvpassError
from kvpass.bench.contenders import Case
from kvpass.cocktail import ChunkBits
from kvpass.estimate.cache import ModelCache
from kvpass.estimate.shapes import model_shape
from kvpass.evaluate import Evaluation, Settings
from kvpass.evaluate.results import Results
from kvpass.format.filters import FILTERS
from kvpass.recipes import RECIPES
from kvpass.rules import RULES

ROOT = Path(__file__).parents[1]


def test_quickstart_prints_what_readme_says(capsys: pytest.CaptureFixture[str]) -> None:
    """Of bytes and bits, for which few tokens have to be scored."""
    quickstart.main(["--texts", "1", "--scored", "2", "--questions", "1", "--inner", "eager"])
    out = capsys.readouterr().out
    assert "fuse_attention" in out
    rows = re.findall(r"^(plain|kivi-.bit) +([\d,]+) +(\d+\.\d\d) ", out, re.M)
    assert len(rows) == 3
    for page in ("README.md", "examples/RESULTS.md"):
        told = (ROOT / page).read_text().replace("`", "")
        for row in rows:
            assert f"| {' | '.join(row)} |" in told, page


def test_tables_say_the_bits_of_recipes() -> None:
    """Of packed tokens in README; in RESULTS of 4,095 tokens in float32, exact ones included."""
    readme, results = ((ROOT / f).read_text() for f in ("README.md", "examples/RESULTS.md"))
    config = AutoConfig.from_pretrained(quickstart.LARGER_MODEL)
    shape = model_shape(config, torch.float32)
    sizes = {str(i): (x.heads, x.key_dim, x.value_dim) for i, x in shape.layers.items()}
    packed: dict[str, set[float]] = {}
    # What `auto` chooses, and the chunk bits of a request, nothing but texts tells.
    for name in sorted(RECIPES.keys() - {"auto", "cocktail"}):
        plan = kvpass.recipe(name).sized(sizes)
        packed.setdefault(name.split("-")[0], set()).add(judging.bits_of(plan, config))
        bits, _ = ModelCache.packed(shape, plan, torch.float32).stored(1, 4095)
        told = re.search(rf"^\| `{re.escape(name)}` \| (\d+\.\d\d) \|", results, re.M)
        assert told is not None, name
        assert float(told[1]) == pytest.approx(bits, abs=0.011), name
    recipes = readme.split("\n## Recipes\n")[1]
    rows = re.findall(r"^\| `(\w+)-?[^|]*\|[^|]*\|[^|]*\|([^|]*)", recipes, re.M)
    rows = [row for row in rows if row[0] in packed and row[0] != "fp"]
    assert len(rows) == 6
    for method, cell in rows:
        stored = {float(number) for number in re.findall(r"(?<![kv.\d])\d+\.\d+", cell)}
        assert stored
        assert stored <= packed[method], method


def test_quickstart_names_a_missing_model() -> None:
    with pytest.raises(SystemExit, match="'nowhere' is not a model folder"):
        quickstart.main(["--model", "nowhere"])


def test_the_shipped_model_recalls() -> None:
    """At least 90 percent over 1,024 tokens in float32, as its page says."""
    model, tokenizer = quickstart.load(str(quickstart.SMALL_MODEL), "float32")
    prompts = [quickstart.recall_prompt(tokenizer, 1024, 40, seed) for seed in (1, 2)]
    assert quickstart.recall_accuracy(model, prompts) >= 0.9


def test_the_example_rule_fuses_what_was_decoded(capsys: pytest.CaptureFixture[str]) -> None:
    rules = list(RULES)
    try:
        add_a_rule.main()
    finally:
        RULES[:] = rules
    without, with_rule = capsys.readouterr().out.split("With the rule:")
    assert "fired   decode_reader: decoded in front of getitem" in without
    assert "fuse_attention" not in without
    assert "fired   spell_out_einsum: bhqd,bhtd->bhqt is a matmul" in with_rule
    assert "fired   fuse_attention" in with_rule


def test_the_example_filter_is_compared_with_those_shipped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    try:
        add_a_filter.main(tokens=200, questions=2)
    finally:
        FILTERS.pop("variance", None)
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[1] for row in rows] == ["none", "variance", "heavy_hitters", "outliers"]


def test_documents_are_read_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--documents", "2", "--tokens", "200", "--questions", "1", "--inner", "eager"]
    prefilled_documents.main([*sizes, "--folder", str(tmp_path)])
    said = capsys.readouterr().out
    assert "2 documents read in " in said
    assert "from the store first token after " in said
    assert "4 of 4 prompts had a stored prefix" in said
    assert len(list(tmp_path.glob("*.prefix"))) == 2


def test_a_restarted_chat_reads_what_is_new(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resumed_chat.main(["--tokens", "200", "--inner", "eager", "--folder", str(tmp_path)])
    first, _, second, _ = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"(\d+) tokens, \1 of them read now", first)
    assert int(second.split(" tokens, ")[1].split()[0]) < 20


def test_the_ablation_adds_one_part_at_a_time() -> None:
    names, recipes = zip(*skvq_ablation.recipes(32, 64, clusters=True), strict=True)
    assert names[:6] == ("RTN", "+ window", "+ clip", "+ reorder", "+ sinks", "+ fp8")
    assert names[6:] == ("without reorder", "unequal groups", "before RoPE", "kivi-2bit")
    whole = dict(skvq_ablation.recipes(64, 64, clusters=True))
    assert set(names) - set(whole) == {"+ reorder", "without reorder", "unequal groups"}
    first, *_, last = recipes[:6]
    assert not first.calibrated
    with pytest.raises(KvpassError, match="is calibrated"):
        last.layer_plan("*", 64, 64)


def test_what_does_not_exist_is_said_in_one_sentence(tmp_path: Path) -> None:
    folder = ["--folder", str(tmp_path)]
    with pytest.raises(SystemExit, match=r"group 33 of int2\.channel33 does not divide"):
        skvq_ablation.main(["--groups", "33", *folder])
    with pytest.raises(SystemExit, match=r"bits=5 is not supported; allowed: 1, 1\.5, 2, 3"):
        kvquant_ladder.main(["--bits", "5", *folder])
    with pytest.raises(SystemExit, match=r"length=100 is not supported; .* at least 512"):
        kvmix_parts.main(["--length", "100", *folder])


def test_the_ablation_of_rotations_ends_with_the_recipe() -> None:
    found = dict(rotation_ablation.recipes())
    assert found["+ sinks"] == kvpass.recipe("rotated-2bit")
    layer = found["Hadamard"].layer_plan("*", 64, 64)
    assert layer.key_basis == layer.value_basis
    assert str(layer.keys) == "int2.token64.fp8/window=0,pack_every=1"
    assert found["skvq-k2v2,group=32"].group == 32


def test_the_ladder_adds_one_part_at_a_time() -> None:
    names, recipes = zip(*kvquant_ladder.recipes(2), strict=True)
    assert names[:4] == ("per channel", "before RoPE", "nuq", "+ 1% outliers")
    assert recipes[3].name == "kvquant-nuq2-1%"
    assert recipes[4].qnorm
    assert [r.window for r in recipes] == [0] * 5 + [128] * 2
    plan = kvquant_ladder.per_token(2, 128)
    assert str(plan.default.keys) == "int2.token128/sinks=1,window=0,pack_every=1"


def test_plans_are_made_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A recipe that does not fit the model says why."""
    parser = argparse.ArgumentParser()
    judging.add_arguments(parser, str(tmp_path))
    judge = judging.Judge(parser.parse_args([]))
    unfit = kvpass.recipe("skvq-k2v2", group=48, clip=False, reorder=False)
    plan = kvquant_ladder.per_token(4, 128)
    plans = judge.plans([("own", kvpass.recipe("kivi-4bit")), ("unfit", unfit), ("written", plan)])
    assert list(plans) == ["own", "written"]
    assert (
        "unfit: The keys of layer '*' cannot be stored as int2.token48" in capsys.readouterr().out
    )
    assert plans["written"] == plan
    assert judge.plans([("own", kvpass.recipe("kivi-2bit"))])["own"] == plans["own"]


def test_lots_have_as_many_bits() -> None:
    config = AutoConfig.for_model("llama", num_hidden_layers=2, head_dim=64, num_key_value_heads=2)
    two, four = (kvpass.recipe(f"kivi-{b}bit").plan(config).default for b in (2, 4))
    mixed = kvpass.Plan(two, {"0": two, "1": kvpass.LayerPlan(four.keys, two.values)})
    lots = list(kvmix_parts.by_lot(mixed, 8))
    assert {judging.bits_of(plan, config) for plan in lots} == {3.5}
    assert {plan.layer_at(0).keys.codec.bits for plan in lots} == {2, 4}
    assert all(plan.layer_at(i).values == two.values for plan in lots for i in range(2))


def test_the_frontier_says_what_a_budget_buys(tmp_path: Path) -> None:
    """Divergences of two texts: `auto`'s is less in both, or in one of them."""
    config = AutoConfig.from_pretrained(quickstart.SMALL_MODEL)
    plans = {
        name: kvpass.recipe(recipe).plan(config)
        for name, recipe in (
            ("kivi-4bit,group=32", "kivi-4bit"),
            ("rotated-k4v2", "rotated-k4v2"),
            ("auto,budget=3.5", "kivi-2bit"),
            ("auto,budget=5", "kivi-4bit"),
        )
    }
    costs = [(0, 0), (4, 5), (20, 21), (10, 12), (3, 7)]
    settings = Settings(tasks=(), length=512).of_model(config)
    records = [
        {"recipe": name, "task": "quality", "cached": 511, "bytes": 1, "bits": 1.0,
         "sums": [[[1000, 0, kl, 0]] for kl in kls]}
        for name, kls in zip(["plain", *plans], costs, strict=True)
    ]  # fmt: skip
    results = Results(Evaluation(settings, tuple(plans), records, ()))
    found = frontier.Frontier(plans, {name: name for name in plans}, results, config)
    # Keys are packed 128 tokens at a time, values one by one; 16 bits are an exact element.
    kivi = 5 + (16 - 5) * (127 + 128) / 2 / 511
    assert found.bits["kivi-4bit,group=32"] == pytest.approx(kivi, rel=0.02)
    first, second = found.verdicts([2, 3.5, 5])
    assert first.endswith("rotated-k4v2 20.50 ±0.50: less by 9.50 ±0.50")
    assert first.startswith("3.5 bits: auto 11.00 ±1.00")
    assert second.endswith("kivi-4bit,group=32 4.50 ±0.50: a tie by -0.50 ±1.50")
    assert "256-512" in found.table()
    found.plot(str(tmp_path / "a.svg"))
    assert "auto" in (tmp_path / "a.svg").read_text()
    names = frontier.candidates(config.head_dim)
    assert len(set(names)) == len(names)
    assert not set(names).intersection(frontier.OTHERS)


def test_peaks_are_those_of_the_process() -> None:
    before = plot_peak_memory.resident("VmRSS")
    plot_peak_memory.forget_peak()
    held = torch.ones(2**24)
    del held
    peak = plot_peak_memory.resident("VmHWM")
    assert peak - before > 60 * 2**20
    plot_peak_memory.forget_peak()
    assert plot_peak_memory.resident("VmHWM") < peak - 50 * 2**20


def test_the_parts_of_kvmix_are_named_and_measured() -> None:
    names, fields = zip(*kvmix_parts.retentions([0.1]), strict=True)
    assert names == ("window 32", "window 128", "pivotal 10%", "fraction 10%")
    for options in fields:
        assert kvpass.recipe("kvmix", **options).calibrated
    x = torch.randn(100, 160, generator=torch.Generator().manual_seed(0))
    plain, pack11 = (kvpass.Codec(3, "token", 32, pack11=e) for e in (False, True))
    errors = [kvmix_parts.relative_error(x, codec, 64) for codec in (plain, pack11)]
    assert 0.05 < errors[0] < errors[1] < 0.5


def test_bits_of_a_plan_are_a_mean_over_its_layers() -> None:
    config = AutoConfig.for_model("llama", num_hidden_layers=2, head_dim=64, num_key_value_heads=2)
    two, four = (kvpass.recipe(f"kivi-{b}bit").plan(config).default for b in (2, 4))
    plan = kvpass.Plan(two, {"0": two, "1": kvpass.LayerPlan(two.keys, four.values)})
    # Scales of groups of 32 are a bit for each element.
    assert judging.bits_of(plan, config) == 3.5


def test_cocktail_shows_a_question(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawn = tmp_path / "relevance.svg"
    # The quickstart's test runs the others.
    monkeypatch.setattr(cocktail, "COMPARED", ())
    cocktail.main(["--tokens", "200", "--plot", str(drawn)])
    out = capsys.readouterr().out
    for part in ("relevance  ", "bits       ", "plain", "cocktail, clipped"):
        assert part in out
    assert drawn.read_text().startswith("<?xml")
    with pytest.raises(SystemExit, match=r"context has \d+ tokens, less than a chunk of 500"):
        cocktail.main(["--tokens", "200", "--chunk", "500"])


def test_cocktail_counts_bits_and_right_answers() -> None:
    table = cocktail.Table(cocktail.arguments(["--tokens", "150", "--documents", "1"]))
    bits = ChunkBits([[2, 4, 16]], [1])
    plan = kvpass.recipe("cocktail").plan(table.config)
    # Scales of groups of 32 are a bit for each element; six tokens are in no chunk.
    assert cocktail.bits_stored(plan, 102, 64, bits) == (32 * (3 + 5 + 16) + 6 * 16) / 102
    kivi = kvpass.recipe("kivi-2bit").plan(table.config)
    assert cocktail.bits_stored(kivi, 300, 64) == 16 - 13 * (256 + 172) / 300 / 2
    clipped = kvpass.recipe("cocktail", clip=0.8).plan(table.config).default
    assert [codec.clip for codec in clipped.keys.chunk_codecs] == [0.8, 1.0]
    assert clipped.values == plan.default.values
    # One step gives the answers that one token at a time gives.
    (read,) = table.read
    prompt = quickstart.recall_prompt(table.tokenizer, 150, cocktail.QUESTIONS, cocktail.FIRST)
    right = [
        table._right(copy.deepcopy(read.cache), read.document, i) for i in range(cocktail.QUESTIONS)
    ]
    assert sum(right) / len(right) == quickstart.recall_accuracy(table.model, [prompt])


def test_chunks_in_the_order_of_the_text_are_attended_to_alike() -> None:
    case = Case(1, 4, 2, 32, 500, torch.float32, torch.device("cpu"))
    contender = chunk_switching.in_order(case, case.query(0), case.cached(1), case.cached(2))
    assert int(contender.note.split()[0]) > 3
    assert contender.error(contender.calls[0]()) <= contender.tolerance
