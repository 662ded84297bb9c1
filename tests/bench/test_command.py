"""The command line: exit codes, files, and one sentence for every mistake."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvpass.bench import contenders
from kvpass.cli import main
from tests.command import failure

ROOT = Path(__file__).parent.parent.parent
ATTENTION = ["bench", "attention", "--tokens", "200", "--heads", "4", "--kv-heads", "2",
             "--head-dim", "32", "--rounds", "2", "--device", "cpu"]  # fmt: skip
TINY = "small,layers=1,hidden=64,intermediate=64,heads=2,kv_heads=1,vocab=100"


def test_help_does_not_import_torch():
    code = (
        "import sys; from kvpass.cli import main\n"
        "sys.exit(main(['bench', 'decode', '--help']) or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True)
    assert done.returncode == 0
    assert b"--context" in done.stdout


def test_attention_json(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(contenders, "cache_size", lambda device: 1 << 16)
    file = tmp_path / "a.json"
    assert main([*ATTENTION, "--json", str(file)]) == 0
    assert "200 tokens, batch 1" in capsys.readouterr().out
    content = json.loads(file.read_text())
    assert content["command"] == "attention"
    assert content["arguments"]["tokens"] == [200]
    assert {"host", "cpu", "gpus", "threads", "versions"} <= set(content["machine"])
    assert {"torch", "transformers", "triton", "python"} <= set(content["machine"]["versions"])
    assert len(content["results"]) == 4
    for row in content["results"]:
        assert row["status"] == "timed"
        assert len(row["times_ms"]) == 2
        assert row["error"] <= row["tolerance"]
        assert row["tokens"] == 200


def test_a_wrong_result_exits_1(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(contenders, "cache_size", lambda device: 1 << 16)
    monkeypatch.setattr(contenders, "TOLERANCE", dict.fromkeys(contenders.TOLERANCE, 1e-12))
    file = tmp_path / "a.json"
    assert main([*ATTENTION, "--json", str(file)]) == 1
    assert "WRONG: relative error" in capsys.readouterr().out
    assert json.loads(file.read_text())["results"][0]["status"] == "wrong"


def test_decode(tmp_path, capsys):
    file = tmp_path / "d.json"
    command = [
        "bench",
        "decode",
        "--model",
        TINY,
        "--context",
        "140",
        "--rounds",
        "1",
        "--device",
        "cpu",
    ]
    assert main([*command, "--inner", "eager", "--recipes", "kivi-4bit", "--json", str(file)]) == 0
    assert "tokens/s" in capsys.readouterr().out
    rows = json.loads(file.read_text())["results"]
    assert rows[0]["name"] == "kvpass kivi-4bit"
    assert rows[0]["tokens_per_s"] > 0
    assert {"first_call_s", "warm_up_s"} <= set(rows[0])


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="kvpass[plot]")
def test_plot(tmp_path, monkeypatch):
    monkeypatch.setattr(contenders, "cache_size", lambda device: 1 << 16)
    file = tmp_path / "attention.svg"
    assert main([*ATTENTION, "--plot", str(file)]) == 0
    assert file.read_text().startswith("<?xml")


MISTAKES = [
    (["--recipes", "kivi-3bit"], "Unknown recipe 'kivi-3bit'. Did you mean 'kivi-4bit' or"),
    (["--head-dim", "20", "--recipes", "kivi-2bit"], "head_dim 20 at 2 bits does not fill"),
    (["--kv-heads", "3"], "3 KV heads do not divide 4 query heads."),
    (["--tokens", "0"], "tokens=0 is not supported; at least 1."),
    (["--tokens", "1000000000000"], "needs about"),
    (["--rounds", "0"], "Invalid value for '--rounds': 0 is not in the range x>=1; see"),
    (["--dtype", "float8"], "Invalid value for '--dtype': 'float8' is not one of 'float16', "),
    (["--device", "gpu"], "Unknown device 'gpu'. Did you mean 'cpu'?"),
    (["--json", "/no/such/folder/x.json"], "its folder does not exist."),
]


@pytest.mark.parametrize(("more", "message"), MISTAKES, ids=lambda x: str(x)[:20])
def test_mistakes(more, message, capsys):
    assert message in failure(capsys, *ATTENTION, *more)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["decode", "--context", "0"], "context=0 is not supported"),
        (["decode", "--context", "1000000000", "--device", "cpu"], "ask for fewer tokens or"),
        (
            ["decode", "--model", "llama"],
            "Unknown preset or model folder 'llama'. Did you mean 'llama",
        ),
        (["decode", "--model", "small,hidden=100"], "16 heads do not divide hidden size 100"),
        (["decode", "--model", "small,hiden=9"], "Unknown size of a preset: 'hiden'. Did you mean"),
        (["decode", "--model", "small,layers=x"], "layers='x' is not supported; allowed: a whole"),
        (["decode", "--model", "small,layers"], "Model 'small,layers' cannot be read; allowed:"),
        (["decode", "--model", "none.json"], "Config file 'none.json' does not exist."),
        (["decode", "--model", str(ROOT / "pyproject.json")], "does not exist"),
    ],
)
def test_mistakes_of_models(command, message, capsys):
    assert main(["bench", *command]) == 2
    assert message in capsys.readouterr().err


def test_sliding_windows_are_refused(tmp_path, capsys):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "mistral", "sliding_window": 16}))
    assert main(["bench", "decode", "--model", str(file)]) == 2
    assert "layers that do not keep all tokens" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(capsys):
    assert main([*ATTENTION, "--device", "cuda"]) == 2
    assert "torch finds no CUDA GPU here" in capsys.readouterr().err


def test_arguments_that_cannot_be_parsed(capsys):
    assert failure(capsys, "bench", "attention", "--tokens", "many") == (
        "kvpass bench attention: Invalid value for '--tokens': 'many' is not a valid integer; "
        "see kvpass bench attention --help."
    )


def test_missing_matplotlib(monkeypatch, capsys):
    monkeypatch.setattr("kvpass.errors.find_spec", lambda name: None)
    assert main([*ATTENTION, "--plot", "x.svg"]) == 2
    assert (
        "--plot needs matplotlib, which is not installed: pip install 'kvpass[plot]'."
        in capsys.readouterr().err
    )
