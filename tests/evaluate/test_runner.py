"""The whole evaluation of a tiny model: goes on where it stopped, and says what it could not do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import kvpass
from kvpass.errors import OptionError
from kvpass.evaluate import Evaluation, Settings, evaluate, sections, write_report
from kvpass.evaluate.answers import answers
from kvpass.evaluate.documents import Writer
from kvpass.evaluate.plots import front
from kvpass.evaluate.quality import recall_accuracy
from tests.evaluate.test_tasks import tokenizer
from tests.harness import compiled, graphs_compiled
from tests.models import tiny_model

# More than a piece each, of another content each.
TEXTS = [" ".join(str(n * n) for n in range(start, start + 40)) for start in (0, 300, 600, 900)]
SMALL = Settings(
    prompt=32, length=160, tokens=1, batch=4, tasks=("needle", "json", "recall"), lengths=(320,),
    depths=(0.5,), seeds=1, samples=2, inner="eager",
)  # fmt: skip
SKVQ = "skvq-k2v2,window=16,reorder=false,clip=false"
COCKTAIL = "cocktail,clip=0.8"


def model(**overrides: Any) -> Any:
    return tiny_model("llama", layers=1, vocab_size=2048, **overrides)


def run(path: Path | None, *recipes: str, texts: Any = TEXTS, subject: Any = None) -> Evaluation:
    return evaluate(
        subject or model(), tokenizer("small"), recipes, texts, SMALL,
        path=str(path) if path else None, progress=False,
    )  # fmt: skip


def test_an_evaluation_goes_on_and_reports_everything(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    found = run(path, "kivi-2bit,residual=32", "kivi-4bit,group=64")
    lines = path.read_text().splitlines()
    assert [json.loads(x).get("problem", "")[:40] for x in lines if "problem" in x] == [
        "The values of layer 'model.layers.0.self"
    ]
    # As if interrupted: a record is lost, and another cut off.
    path.write_text("\n".join(lines[:-2]) + "\n" + lines[-2][:30])
    graphs = graphs_compiled()
    again = run(path, "kivi-2bit,residual=32", COCKTAIL)
    # A prompt and a step of each.
    assert graphs_compiled() - graphs == 4
    whole, lost = found.records[:-2], found.records[-2]
    assert again.records[: len(whole)] == whole
    (made,) = [r for r in again.records[len(whole) :] if r["recipe"] == lost["recipe"]]
    assert made["samples"] == lost["samples"]
    assert sum(r["task"] == "quality" for r in again.records) == 3
    report = "\n\n".join(map(str, sections(again)))
    assert "needs a question" in report
    assert "4 texts, behind a prompt of 32" in report
    assert f"failed: {found.records[-1]['problem']}" in "\n".join(map(str, sections(found)))
    paths = write_report(again, str(tmp_path / "out"))
    assert [Path(p).name for p in paths] == [
        "report.md", "report.json", "pareto.png", "depth.png", "needle.png",
    ]  # fmt: skip
    assert all(Path(p).stat().st_size > 1000 for p in paths)


@pytest.mark.parametrize(
    ("settings", "texts", "message"),
    [
        ({"seeds": 2}, TEXTS, r"was measured with seeds=1, not 2: give another file"),
        ({}, TEXTS[1:], r"was measured with texts='\w+', not '\w+'"),
    ],
)
def test_a_file_of_another_run_is_refused(
    settings: dict[str, Any], texts: list[str], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    few = {"tasks": (), "prompt": 32, "length": 80, "tokens": 1, "batch": 4, "seeds": 1}
    evaluate(
        model(), tokenizer("small"), [], TEXTS, Settings(**few), path=str(path), progress=False
    )
    with pytest.raises(OptionError, match=message):
        evaluate(
            model(),
            tokenizer("small"),
            [],
            texts,
            Settings(**few | settings),
            path=str(path),
            progress=False,
        )
    path.write_text("no JSON\n")
    with pytest.raises(OptionError, match=r"is no file of an evaluation; give another name"):
        evaluate(
            model(), tokenizer("small"), [], TEXTS, Settings(**few), path=str(path), progress=False
        )


def test_what_is_calibrated_on_is_not_scored() -> None:
    def told(*, calibration_texts: list[str] | None = None, texts: list[str] = TEXTS) -> Evaluation:
        return evaluate(
            model(), tokenizer("small"), ["kvmix,residual=32"], texts,
            Settings(prompt=32, length=160, tokens=1, batch=4, tasks=(), inner="eager", samples=2),
            calibration_texts=calibration_texts, progress=False,
        )  # fmt: skip

    found = told()
    assert "each fourth text (1) is for calibration, and not scored" in found.notes
    assert any("of 3 texts" in note for note in found.notes)
    assert [r["recipe"] for r in found.records if "sums" in r] == ["plain", "kvmix,residual=32"]
    with pytest.raises(OptionError, match=r"is also held out, or part of a text that is"):
        told(calibration_texts=[f"before {TEXTS[1]} behind"])
    with pytest.raises(OptionError, match=r"of 2 texts none can be spared"):
        told(texts=TEXTS[:2])


def test_refusals() -> None:
    with pytest.raises(OptionError, match=r"Unknown recipe 'kivi-3bit'"):
        run(None, "kivi-3bit")
    with pytest.raises(OptionError, match=r"Recipe 'plain' is always measured"):
        run(None, "plain")
    with pytest.raises(OptionError, match=r"compiled; give it as it was"):
        run(None, subject=compiled(model(), "fp"))
    with pytest.raises(OptionError, match=r"3 is no text; allowed: a text, or a mapping"):
        run(None, texts=[3])


def test_answers_are_those_of_recall_and_json_is_judged_by_its_value() -> None:
    subject = model()
    samples = Writer(tokenizer("small"), TEXTS).samples(SMALL, 320)
    recall = next(s for s in samples if s.task == "recall")
    # What the model says itself is right.
    document = recall.prompt.document
    queries = []
    for question, answer in recall.prompt.queries[:3]:
        ids = torch.cat([document, question])[None]
        out = subject.generate(ids, max_new_tokens=len(answer), do_sample=False)
        queries.append((question, out[0, ids.shape[1] :]))
    queries.append(recall.prompt.queries[3])
    prompt = kvpass.evaluate.RecallPrompt(document, tuple(queries))
    mixed = [s for s in samples if s.task == "json"] + [
        type(recall)("recall", 0, 320, None, prompt)
    ]
    (copied, found), cache = answers(subject, tokenizer("small"), mixed, 3)
    assert [a.right for a in found] == [True, True, True, False]
    assert recall_accuracy(subject, [prompt]) == 0.75
    assert not copied[0].right
    assert cache.get_seq_length() > len(document)
    with torch.no_grad():
        ids = torch.cat([document, *queries[3]])[None]
        scores = subject(ids).logits[0].log_softmax(-1)
    answer = queries[3][1]
    wanted = scores[-1 - len(answer) : -1].gather(1, answer[:, None]).mean()
    assert found[3].logprob == pytest.approx(float(wanted), rel=1e-4)


def test_front_is_what_nothing_beats_in_both() -> None:
    points = [(2.0, 9.0), (3.0, 4.0), (3.0, 5.0), (4.0, 6.0), (5.0, 1.0)]
    assert front(points) == [(2.0, 9.0), (3.0, 4.0), (5.0, 1.0)]
