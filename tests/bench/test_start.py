"""``kvpass bench start``: processes that time themselves."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace

import pytest

from kvpass.bench import start
from kvpass.bench.start import EAGER, Start, StartSetting, bench_start, run_asked, start_section
from kvpass.cli import main
from tests.models import tiny_model

SETTING = StartSetting("no-such-model", 8, "float32", "cpu")
WARM = Start(
    "kivi-4bit", True, (3.0, 2.0, 0.1, 0.1, 0.2, 0.3), 4.0, 2.5,
    {"dynamo": 1.0, "rules": 0.25, "kernels": 0.5, "inductor": 2.0},
)  # fmt: skip


def test_a_process_says_what_each_token_took(capsys: pytest.CaptureFixture[str]) -> None:
    asked = json.dumps({**asdict(SETTING), "contender": EAGER, "began": 0.0})
    run_asked(asked, lambda *_: tiny_model("llama", layers=1))
    _, found = capsys.readouterr().out.split("kvpass start: ")
    one = Start(**json.loads(found))
    assert (one.contender, one.problem) == (EAGER, "")
    assert len(one.tokens) == 6
    assert min(*one.tokens, one.imports, one.load) > 0


def test_a_process_that_fails_says_why() -> None:
    """Each contender's in a sentence, and none of them hides the next."""
    found = list(bench_start(SETTING, []))
    assert [one.contender for one in found] == [EAGER, "torch.compile"]
    for one in found:
        assert one.problem.endswith("'no-such-model' is not a model folder: it has no config.json.")
    section = start_section(SETTING, found)
    assert all(row[2].startswith("not run: ") for row in section.rows)


def test_the_table_has_a_row_for_each_process() -> None:
    cold = replace(WARM, warm=False, contender=EAGER, parts={})
    section = start_section(SETTING, [cold, WARM])
    assert section.rows[0][:9] == ["eager", "cold", "4.00", "2.50", "3.00", "2.00", "0.100",
                                   "0.200", ""]  # fmt: skip
    assert section.rows[1][8:] == ["1.00", "0.250", "0.500", "2.00"]
    assert len(section.header) == len(section.rows[1])


def test_warm_starts_twice_where_compiled_code_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []

    def started(setting: StartSetting, contender: str, environment: dict[str, str]) -> Start:
        seen.append((setting.prompt, contender, environment == dict(os.environ)))
        return replace(WARM, contender=contender)

    monkeypatch.setattr(start, "_started", started)
    assert main(["warm", "small,layers=1", "--prompt", "64", "--recipes", "kivi-2bit,fp"]) == 0
    assert seen == [(64, name, True) for name in ("kivi-2bit", "kivi-2bit", "fp", "fp")]
    rows = capsys.readouterr().out.splitlines()[2:6]
    assert [row.split()[:2] for row in rows] == [
        [name, how] for name in ("kivi-2bit", "fp") for how in ("cold", "warm")
    ]
    assert main(["warm", "small", "--recipes", "skvq-k2v2"]) == 2
    assert "is calibrated" in capsys.readouterr().err
