"""The zoo: one family per way of writing attention and a cache, and how failures are reported."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace

import pytest
from transformers import DynamicCache
from transformers.models.gemma2.modeling_gemma2 import Gemma2PreTrainedModel

from kvpass.cli import main
from kvpass.report import Section
from kvpass.rules.fuse_attention import FuseAttention
from kvpass.zoo import run
from kvpass.zoo.families import family_names, tiny_config, tiny_model
from kvpass.zoo.outcome import Mode, Outcome
from kvpass.zoo.pool import Settings, run_families
from kvpass.zoo.run import run_mode
from kvpass.zoo.steps import random_text, run_steps
from kvpass.zoo.table import markdown, outcome_json, summary, zoo_section
from tests.command import failure

# (The recipe `fp`, and more families: tests/test_equivalence.py.)
RECIPE = "kivi-4bit"
# Every key and value is packed and read packed. (More of them: tests/test_equivalence.py.)
FUSED = {
    "llama": "half-split positions",
    "hunyuan_v1_dense": "keys normed after positions",
    "cohere": "interleaved positions",
    "glm": "interleaved positions on a part of the channels",
    "gpt2": "Conv1D",
    "gpt_bigcode": "one KV head",
    "bart": "an encoder's sibling",
    "qwen3_5_text": "recurrent and full",
}
# Any share may be packed; the result must be right.
# (``minimax`` has a cache class of its own, so that there is no oracle for what it packs.)
RIGHT = {
    "cohere2": "no positions in full layers",
    "gemma4_text": "shared keys and values, head dimension by layer",
    "llama4_text": "chunks, complex positions",
    "falcon_h1": "mamba and attention in one layer",
    "mistral_large4_text": "latent attention, and keys whose values have no channels",
    "minimax": "its own cache class",
}
# Attention written out, with no SDPA path. (More of them: tests/test_equivalence.py.)
WRITTEN_OUT = {
    "gpt_oss": "sinks",
    "gptj": "float32 scores",
}


@pytest.mark.parametrize("family", [*FUSED, *RIGHT, *WRITTEN_OUT])
def test_family(family: str) -> None:
    mode = Mode("eager" if family in WRITTEN_OUT else "sdpa")
    (outcome,) = run_mode(family, mode, [RECIPE])
    assert outcome.recipe == RECIPE
    assert outcome.status == ("unchecked" if family == "minimax" else "ok"), outcome.problem
    if family in FUSED:
        assert outcome.packed == outcome.tensors == outcome.fused > 0
        assert not [why for why in outcome.refused if not why.startswith("mask_to_bounds")]
        assert (outcome.breaks, outcome.outside) == (0, 0)
    if outcome.packed and outcome.status == "ok":
        # A recipe that changed nothing would make the comparison empty.
        assert outcome.effect > 10 * outcome.tolerance


@pytest.mark.parametrize("mode", [Mode("sdpa", "dynamic", True), Mode("sdpa", "static")], ids=str)
def test_modes(mode: Mode) -> None:
    outcomes = list(run_mode("llama", mode, ["kivi-4bit"]))
    assert [o.status for o in outcomes] == ["ok"]


def test_a_recipe_with_fields_is_small_where_they_do_not_say_otherwise() -> None:
    given = "rotated-4bit,key_rotation=hadamard,group=8"
    small, chosen = run.small_recipe(given), run.small_recipe("rotated-4bit")
    assert (small.key_rotation, small.group, chosen.group) == ("hadamard", 8, 16)
    (outcome,) = run_mode("llama", Mode("sdpa"), [given])
    assert (outcome.recipe, outcome.status) == (given, "ok"), outcome.problem
    assert outcome.packed == outcome.fused > 0


def test_an_attention_behind_a_graph_break_reads_what_was_not_packed() -> None:
    (outcome,) = run_mode("mpt", Mode("eager", "static"), ["kivi-4bit"])
    assert (outcome.status, outcome.packed, outcome.tensors) == ("ok", 2, 4)
    assert any("behind a graph break" in why for why in outcome.refused)


def test_a_cache_that_changes_the_plain_model_is_not_checked() -> None:
    (outcome,) = run_mode("gpt_neo", Mode("eager", "static"), ["kivi-4bit"])
    assert outcome.status == "unchecked"
    assert outcome.problem.startswith("without kvpass a StaticCache changes what the model answers")


def test_every_family_has_a_tiny_config() -> None:
    """Every decoder of the installed transformers has one; none is built."""
    for family in family_names():
        config = tiny_config(family)
        assert config.vocab_size <= 130, family


def test_one_layer_of_each_kind() -> None:
    assert tiny_config("llama").num_hidden_layers == 2
    kinds = {"gemma3_text": ["sliding_attention", "full_attention"],
             "qwen3_5_text": ["linear_attention", "full_attention"],
             "llama4_text": ["chunked_attention", "full_attention"]}  # fmt: skip
    for family, layers in kinds.items():
        assert tiny_config(family).layer_types == layers


def test_the_text_crosses_the_window_and_is_packed() -> None:
    text, padded = random_text(Mode()), random_text(Mode(padded=True))
    assert text.prompt < 40 < text.ids.shape[1]
    assert padded.prompt > 40
    assert padded.visible.sum(1).tolist() == [42, 59, 62]
    model = tiny_model("mistral", "sdpa")
    assert model.config.sliding_window == 40
    _, cache = run_steps(model, text, None)
    assert isinstance(cache, DynamicCache)
    assert cache.layers[0].keys.shape[2] == 39


def failing(monkeypatch, error: Exception) -> None:
    def match(*args):
        raise error

    monkeypatch.setattr(FuseAttention, "match", match)


def test_a_crash_is_reported_in_one_line(monkeypatch) -> None:
    failing(monkeypatch, RuntimeError("first\nsecond"))
    (outcome,) = run_mode("llama", Mode(), ["fp"])
    assert outcome.failed
    assert outcome.status == "crash"
    assert "RuntimeError: first second" in outcome.problem
    assert "\n" not in outcome.problem


def test_a_wrong_result_is_reported(monkeypatch) -> None:
    original = FuseAttention.rewrite

    def rewrite(self, node, found, context):
        found["site"] = replace(found["site"], scale=found["site"].scale * 1.1)
        return original(self, node, found, context)

    monkeypatch.setattr(FuseAttention, "rewrite", rewrite)
    outcomes = list(run_mode("llama", Mode(), [RECIPE]))
    assert [o.status for o in outcomes] == ["wrong"]
    assert "allowed 1e-04" in outcomes[0].problem


def test_a_plain_model_that_fails_is_not_our_failure(monkeypatch) -> None:
    # Versions of transformers differ in which families have SDPA.
    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", False)
    (lacking,) = run_mode("gemma2", Mode("sdpa"), ["fp"])
    assert (lacking.status, lacking.failed) == ("no such attention", False)
    monkeypatch.setattr(run, "tiny_model", lambda *args: 1 / 0)
    (outcome,) = run_mode("llama", Mode(), ["fp"])
    assert (outcome.status, outcome.failed) == ("plain fails", False)
    assert outcome.problem == "ZeroDivisionError: division by zero"


def test_a_model_that_does_not_compile_is_not_our_failure(monkeypatch) -> None:
    failing(monkeypatch, RuntimeError("ours"))
    monkeypatch.setattr(run, "_compiler_problem", lambda *args: "theirs")
    (outcome,) = run_mode("llama", Mode(), ["fp"])
    assert (outcome.status, outcome.failed) == ("compile fails", False)
    assert outcome.problem == "theirs"


def test_what_the_compiler_does_without_kvpass() -> None:
    subject = run._subject("llama", Mode())
    assert run._compiler_problem(subject, Mode()) is None
    other = replace(subject, plain=1.1 * subject.plain)
    assert "without kvpass" in run._compiler_problem(other, Mode())


@pytest.mark.parametrize("comes_back", [False, True])
def test_flipped_codes_do_not_come_back(comes_back: bool, monkeypatch) -> None:
    def compiled(family, mode, name, subject, inner):
        error = 1e-3 if subject == 0 or comes_back else 1e-6
        status = "wrong" if error > run.TOLERANCE else "ok"
        return Outcome(family, mode, name, status, error=error, problem="relative error")

    monkeypatch.setattr(run, "_subject", lambda family, mode, seed=0: seed)
    monkeypatch.setattr(run, "_compiled", compiled)
    (outcome,) = run_mode("llama", Mode(), ["kivi-4bit"])
    assert outcome.error == 1e-3
    assert outcome.status == ("wrong" if comes_back else "ok")
    assert comes_back or outcome.problem == "a code flipped: relative error"


def failing_work(family, mode, recipes, inner):
    """Ends a process, or never ends, after a first outcome."""
    yield Outcome(family, mode, recipes[0], "ok")
    if family == "dies":
        os._exit(3)
    if family == "hangs":
        time.sleep(60)
    yield Outcome(family, mode, recipes[1], "ok")


def test_processes_that_die_or_hang() -> None:
    settings = Settings(limit=8)
    families = ["hangs", "dies", "ends"]
    outcomes = run_families(families, settings, jobs=3, work=failing_work)
    assert [o.family for o in outcomes] == ["hangs"] * 2 + ["dies"] * 2 + ["ends"] * 2
    assert [o.status for o in outcomes] == ["ok", "timeout", "ok", "crash", "ok", "ok"]
    assert outcomes[1].problem == "the family took more than 8 s"
    assert outcomes[3].problem == "the process ended with code 3"


PADDED = Mode("eager", "dynamic", True)
OUTCOMES = [
    Outcome("a", Mode(), "fp", "ok", tensors=4, packed=4, fused=4, graphs=2, error=1e-7),
    Outcome("a", Mode(), "kivi-4bit", "ok", tensors=4, packed=4, fused=4, graphs=3, error=2e-6),
    Outcome("a", PADDED, "fp", "ok", tensors=4, packed=4, fused=2, decoded=2, graphs=2),
    Outcome("b", Mode(), "fp", "ok", tensors=4, refused={"quantize_cache: no": 2}),
    Outcome("b", PADDED, "fp", "no such attention"),
    Outcome("c", Mode(), "fp", "ok", tensors=4),
    Outcome("c", PADDED, "fp", "plain fails", problem="ValueError: x"),
]
WRONG = Outcome("d", Mode(), "fp", "wrong", tensors=4, packed=4, error=0.5, problem="relative")


def test_table() -> None:
    section = zoo_section(OUTCOMES)
    assert isinstance(section, Section)
    assert section.title == "3 families: 1 wholly packed, 0 packed in part, 2 not packed, 0 failed"
    assert section.header == ["family", "sdpa/dynamic", "eager/dynamic/padded", "graphs", "error"]
    assert section.rows == [
        ["a", "4/4", "4/4 +2", "3", "2e-06"],
        ["b", "0/4", "-", "0", "0e+00"],
        ["c", "0/4", "plain fails", "0", "0e+00"],
    ]
    assert section.notes[1:] == [
        "refused in 1 (b): quantize_cache: no",
        "cache updates not recognised in 1: c",
        "c: plain fails: ValueError: x",
    ]


def test_failures_come_first() -> None:
    section = zoo_section([*OUTCOMES, WRONG])
    assert section.rows[-1] == ["d", "WRONG", "-", "0", "5e-01"]
    assert section.notes[1] == "d sdpa/dynamic fp: wrong: relative"
    assert summary([WRONG]).endswith("0 not packed, 1 failed")


def test_markdown_and_json() -> None:
    lines = markdown(OUTCOMES).splitlines()
    assert lines[2] == "| family | sdpa/dynamic | eager/dynamic/padded | graphs | error |"
    assert lines[3] == "| --- | --- | --- | --- | --- |"
    assert lines[5] == "| b | 0/4 | - | 0 | 0e+00 |"
    assert lines[-1] == "- c: plain fails: ValueError: x"
    found = json.loads(json.dumps(outcome_json(OUTCOMES[3])))
    assert found["mode"] == "sdpa/dynamic"
    assert found["refused"] == {"quantize_cache: no": 2}


def test_command(tmp_path, capsys) -> None:
    out, table = tmp_path / "zoo.json", tmp_path / "zoo.md"
    arguments = f"zoo --families opt --recipes fp --json {out} --markdown {table}"
    assert main(arguments.split()) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("1 families: 1 wholly packed")
    assert "opt" in table.read_text()
    (result,) = json.loads(out.read_text())["results"]
    assert (result["family"], result["packed"], result["status"]) == ("opt", 4, "ok")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--families lama", "Unknown family 'lama'. Did you mean 'llama'"),
        ("--families mamba", "The family 'mamba' is not supported: it keeps no keys and values"),
        ("--recipes kivi", "Unknown recipe 'kivi'. Did you mean"),
        ("--recipes kvquant-nuq3", "Recipe 'kvquant-nuq3' is calibrated; allowed:"),
        ("--markdown /nowhere/x.md", "'/nowhere/x.md' cannot be written"),
    ],
)
def test_errors_are_one_sentence(arguments: str, sentence: str, capsys) -> None:
    assert failure(capsys, "zoo", *arguments.split()).startswith(f"kvpass: {sentence}")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--attention flash", "'flash' is not one of 'sdpa', 'eager'"),
        ("--cache big", "'big' is not one of 'dynamic', 'static'"),
        ("--inner triton", "'triton' is not one of 'eager', 'inductor'"),
        ("--jobs 0", "0 is not in the range x>=1"),
    ],
)
def test_wrong_values_are_one_sentence(arguments: str, reason: str, capsys) -> None:
    option, _ = arguments.split()
    said = failure(capsys, "zoo", *arguments.split())
    assert said == f"kvpass zoo: Invalid value for '{option}': {reason}; see kvpass zoo --help."
