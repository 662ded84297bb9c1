"""Tasks of lm-evaluation-harness, from YAML files to the table, and one sentence for each error."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import huggingface_hub
import pytest
from lm_eval.tasks import TaskManager

from kvpass.cli import main
from kvpass.errors import OptionError
from kvpass.evaluate import harness
from kvpass.evaluate.harness import HarnessTasks, load_tasks, run_tasks
from kvpass.evaluate.harness_report import harness_section
from tests.command import failure
from tests.evaluate.test_tasks import tokenizer
from tests.harness import compiled
from tests.models import tiny_model

CHOICE = """
task: own_choice
output_type: multiple_choice
doc_to_choice: choices
doc_to_target: right
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
WRITE = """
task: own_write
output_type: generate_until
doc_to_target: said
generation_kwargs: {until: ["9"], max_gen_toks: 6}
metric_list: [{metric: exact_match}]
"""
DATA = """
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
doc_to_text: '{{question}}'
"""
LOST = "task: own_lost\ndataset_path: nowhere/none\ntest_split: test\noutput_type: generate_until\n"
MODEL = {"layers": 1, "vocab_size": 2048, "max_position_embeddings": 256}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Tasks of four documents, each much longer than the exact window."""
    documents = [
        {
            "question": " ".join(str(n * n) for n in range(start, start + 25)),
            "choices": [" 1", " 12 3", " a"],
            "right": start % 3,
            "said": "1",
        }
        for start in (0, 40, 80, 120)
    ]
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "documents.jsonl").write_text("\n".join(map(json.dumps, documents)))
    data = DATA % json.dumps(str(tasks / "documents.jsonl"))
    (tasks / "choice.yaml").write_text(CHOICE + data)
    (tasks / "write.yaml").write_text(WRITE + data)
    (tasks / "lost.yaml").write_text(LOST)
    return str(tasks)


def test_the_command(
    folder: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The harness's own tasks are 14,000 files.
    monkeypatch.setattr(harness, "TaskManager", partial(TaskManager, include_defaults=False))
    path, out = str(tmp_path / "model"), tmp_path / "judged"
    tiny_model("llama", **MODEL).save_pretrained(path)
    tokenizer("small").save_pretrained(path)
    command = [
        "eval", path, "--lm-eval", "own_*e", "--lm-eval-tasks", folder,
        "--recipes", "kivi-2bit,residual=32,cocktail", "--out", str(out), "--inner", "eager",
        "--batch", "2", "--limit", "2",
    ]  # fmt: skip
    assert main(command) == 0
    said = capsys.readouterr().out
    title, header, *rows = said.splitlines()
    assert title == "Tasks of lm-evaluation-harness, read through the cache"
    assert header.split() == ["task", "metric", "documents", "plain", "kivi-2bit,residual=32"]
    names = [tuple(row.split()[:3]) for row in rows[:3]]
    assert names == [
        ("own_choice", "acc,none", "2"),
        ("own_choice", "acc_norm,none", "2"),
        ("own_write", "exact_match,none", "2"),
    ]
    assert rows[3].split()[4] == "32.00"
    assert float(rows[3].split()[5]) < 32
    assert "  cocktail: needs a question" in rows
    plain, lossy, _ = map(json.loads, (out / "lm_eval.jsonl").read_text().splitlines()[1:])
    for task in ("own_choice", "own_write"):
        assert plain["samples"][task] != lossy["samples"][task]
    written = json.loads((out / "lm_eval.json").read_text())
    assert [record["recipe"] for record in written["records"]] == [
        "plain", "kivi-2bit,residual=32", "cocktail",
    ]  # fmt: skip
    assert written["records"][0]["results"] == plain["results"]
    # Nothing is measured again, nor taken for what is asked for now.
    assert main(command) == 0
    assert capsys.readouterr().out == said
    command[-1] = "3"
    assert main(command) == 2
    assert "was measured with limit=2.0, not 3.0" in capsys.readouterr().err.splitlines()[-1]


def test_a_table_of_what_the_harness_found() -> None:
    """Paired changes of means and of perplexities; RULER's -1 is no value; corpora are unpaired."""
    plain, own = (
        {
            "recipe": name, "bits": bits, "cached": 4096, "shortened": 1,
            "n-shot": {"task": 5, "ruler": 0}, "n-samples": {"task": {"effective": 4}},
            "results": {
                "task": {
                    "alias": "task",
                    "acc,none": sum(right) / 4, "acc_stderr,none": 0.25,
                    "word_perplexity,none": math.exp(-sum(nats) / 40),
                    "word_perplexity_stderr,none": "N/A",
                    "bleu,none": bleu, "bleu_stderr,none": 0.3,
                },
                "ruler": {"512,none": sum(right[:2]) / 2, "1024,none": -1},
            },
            "samples": {
                "task": [
                    {"doc_id": i, "filter": "none", "prompt_hash": "a", "acc": right[i],
                     "word_perplexity": [nats[i], 10], "bleu": ["a", "b"]}
                    for i in range(4)
                ],
                "ruler": [
                    {"doc_id": i, "filter": "none", "prompt_hash": "a", "1024": -1,
                     "512": right[i] if i < 2 else -1}
                    for i in range(4)
                ],
            },
        }
        for name, bits, right, nats, bleu in (
            ("plain", 32.0, [1, 0, 1, 1], [-40.0, -50.0, -30.0, -40.0], 20.0),
            ("kivi-2bit", 3.3, [1, 0, 0, 1], [-40.4, -50.5, -30.3, -40.4], 19.0),
        )
    )  # fmt: skip
    failed = {"recipe": "auto", "task": "all", "problem": "no room"}
    section = harness_section([plain, own, failed])
    assert section.header == ["task", "metric", "documents", "plain", "kivi-2bit"]
    assert section.rows == [
        ["task, 5-shot", "acc,none", "4", "0.7500 ±0.2500", "0.5000 -0.2500 ±0.2500 tie"],
        ["task, 5-shot", "word_perplexity,none", "4", "54.5982 ±?", "56.8263 +4.08 ±0.42%"],
        ["task, 5-shot", "bleu,none", "4", "20.0000 ±0.3000", "19.0000 -1.0000 ±0.4243"],
        ["ruler", "512,none", "2", "0.5000 ±?", "0.5000 +0.0000 ±0.0000 tie"],
        ["cache", "bits per element", "", "32.00", "3.30"],
    ]
    assert section.notes[-2:] == [
        "1 requests were too long, and lost their beginning", "auto: failed: no room",
    ]  # fmt: skip
    # Other prompts are no partners.
    own["samples"]["task"][0]["prompt_hash"] = "b"
    assert harness_section([plain, own]).rows[0][-1] == "0.5000 -0.2500 ±0.3536 tie"


def test_tasks_that_cannot_be_loaded(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = TaskManager(include_path=folder, include_defaults=False)
    for name, message in (
        ("own_choise", r"^Unknown task 'own_choise'; the nearest names: own_choice\b"),
        ("xyz", r"^Unknown task 'xyz'; 'lm-eval ls tasks' lists them\.$"),
    ):
        with pytest.raises(OptionError, match=message):
            load_tasks(manager, [name])
    # As without a network, and without trying five times.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OptionError, match=r"^Task 'own_lost' cannot be loaded: .*'nowhere/none'"):
        load_tasks(manager, ["own_choice", "own_lost"])


def test_refusals() -> None:
    none = HarnessTasks((), {}, None, [])
    model = tiny_model("llama", **MODEL)
    with pytest.raises(OptionError, match=r"'kvmix' is calibrated: give texts for that \(--calib"):
        run_tasks(model, tokenizer("small"), ["kvmix"], none)
    with pytest.raises(OptionError, match="compiled; give it as it was"):
        run_tasks(compiled(model, "fp"), tokenizer("small"), [], none)
    with pytest.raises(OptionError, match="The harness refuses: No tasks specified"):
        run_tasks(model, tokenizer("small"), [], none, progress=False)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--lm-eval", "a", "text.txt"], "kvpass eval: --lm-eval takes no TEXT"),
        (["--lm-eval", "a", "--seeds", "2"], "kvpass eval: --seeds is not for --lm-eval"),
        (["text.txt", "--limit", "2"], "kvpass eval: --limit needs --lm-eval"),
        ([], "kvpass eval: Missing argument 'TEXT...', or --lm-eval"),
        (["--lm-eval", "a", "--metadata", "[1]"], "kvpass: --metadata '[1]' is not a JSON object"),
        (["--lm-eval", "a", "--lm-eval-tasks", "no"], "kvpass: 'no' is not a folder of tasks."),
    ],
)
def test_mistakes_of_the_command(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = failure(capsys, "eval", "model", *arguments, "--out", str(tmp_path))
    assert said.startswith(sentence)


def test_without_lm_eval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvpass.errors.find_spec", lambda name: None)
    said = failure(capsys, "eval", "model", "--lm-eval", "arc_easy", "--out", str(tmp_path))
    assert (
        said
        == "kvpass: --lm-eval needs lm_eval, which is not installed: pip install 'kvpass[lm-eval]'."
    )
