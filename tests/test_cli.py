"""The command line: its table, and one sentence for every error of the user."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvpass import Plan
from kvpass.cli import main
from kvpass.errors import OptionError
from kvpass.format.parse import parse_plan
from kvpass.plan import LayerPlan
from lowering.triton import inspection
from tests.command import failure

K, V = "int8.channel32/window=0,pack_every=32", "int8.token64/window=16,pack_every=1"


def test_kernels_of_a_calibrated_recipe(capsys):
    assert main(["kernels", "--recipe", "kvquant-nuq4", "--target", "sm_80"]) == 0
    title, _, *rows = capsys.readouterr().out.splitlines()
    assert "keys nuq4.channel0.codebook-0." in title
    (attention,) = (row.split() for row in rows if row.startswith("attention_split"))
    assert float(attention[5]) > float(attention[6])


def test_kernels(capsys):
    assert main(["kernels", "--k", K, "--v", V, "--head-dim", "64", "--target", "sm_80"]) == 0
    title, header, *rows = capsys.readouterr().out.splitlines()
    assert title == f"keys {K}, values {V}, head_dim 64/64, 4 query heads per KV head, sm_80"
    columns = ["kernel", "registers", "shared", "spills", "mma", "inst/el", "budget", "file"]
    assert header.split() == columns
    table = [dict(zip(columns, row.split(), strict=True)) for row in rows]
    state, step = ["pack_prompt", "unpack_tokens"], ["append_both", "attention_split"]
    assert [r["kernel"] for r in table] == [*state, *state, *step, "attention_merge"]
    assert all(Path(r["file"]).exists() and r["spills"] == "none" for r in table)
    split = table[-2]
    assert int(split["registers"]) > 0
    assert int(split["mma"]) > 0
    assert 1 < float(split["inst/el"]) < float(split["budget"])
    assert table[-1]["inst/el"] == table[-1]["budget"] == "-"


def test_a_prediction(capsys):
    """Of 16 times as many tokens: all but the launches takes 16 times as long."""
    predicted = []
    for tokens in (2048, 32_768):
        options = ["--k", K, "--v", V, "--head-dim", "64", "--model", "--tokens", str(tokens)]
        assert main(["kernels", *options, "--target", "sm_80"]) == 0
        *_, said, header, row = capsys.readouterr().out.splitlines()
        assert said == (
            f"predicted, not measured: a step of 1 x {tokens} tokens, 8 KV heads, 3 launches"
        )
        assert header.split()[4:] == ["memory", "issue", "launches", "all", "dense"]
        predicted.append([float(x) for x in row.split()[2:]])
    (memory, issue, launches, total, _), longer = predicted
    assert longer[:3] == pytest.approx([16 * memory, 16 * issue, launches], abs=1)
    # 8 bits of a code, and a scale and a minimum for 32 or for 64 of them.
    numbers = 32_768 * 8 * 64
    assert longer[0] == pytest.approx(numbers * (9 + 8.5) / 8 / 1.83e12 * 1e6, abs=0.06)
    assert longer[4] - launches == pytest.approx(numbers * 4 / 1.83e12 * 1e6, abs=0.06)
    assert total == pytest.approx(max(memory, issue) + launches, abs=0.11)


def test_keys_and_values_of_one_plan_are_listed_once(capsys):
    """Here those of a static cache."""
    assert main(["kernels", "--recipe", "fp", "--head-dim", "64", "--static", "512"]) == 0
    title, _, *table = capsys.readouterr().out.splitlines()
    assert title.startswith(
        "keys fp/window_size=511/room=512, values fp/window_size=511/room=512, head_dim 64"
    )
    rows = [row.split() for row in table]
    kernels = [(row[0], row[-1]) for row in rows]
    assert len(kernels) == len(set(kernels)) == 5
    assert [name for name, _ in kernels].count("pack_prompt") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--recipe kivi-3bit", "Unknown recipe 'kivi-3bit'. Did you mean 'kivi-4bit' or"),
        ("--k int2.channel32", "Give either --recipe, or both --k and --v."),
        (f"--recipe fp --k {K} --v {V}", "Give either --recipe, or both --k and --v."),
        (f"--k int2.channel32 --v {V}", "Tensor plan 'int2.channel32' cannot be read;"),
        (f"--k {K} --v {V} --head-dim 96", "The values of layer '*' cannot be stored as int8.to"),
        ("--head-dim 512", "The kernel of kvpass::pack cannot be used: head_dim 512 is more than"),
        ("--heads-per-group 200", "The kernel of kvpass::append_attention cannot be used: 200"),
    ],
)
def test_errors_are_one_sentence(arguments, sentence, capsys):
    assert failure(capsys, "kernels", *arguments.split()).startswith(f"kvpass: {sentence}")


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("--head-dim", "x", "'x' is not a valid integer range"),
        ("--head-dim", "0", "0 is not in the range x>=1"),
        ("--static", "0", "0 is not in the range x>=1"),
        ("--value-dim", "-1", "-1 is not in the range x>=1"),
        ("--target", "sm_89", "'sm_89' is not one of 'sm_80', 'sm_90'"),
    ],
)
def test_wrong_usage(option, value, reason, capsys):
    said = failure(capsys, "kernels", option, value)
    assert (
        said
        == f"kvpass kernels: Invalid value for '{option}': {reason}; see kvpass kernels --help."
    )


def test_a_command_is_needed(capsys):
    assert failure(capsys) == "kvpass: Missing command; see kvpass --help."


def test_triton_is_missing(capsys, monkeypatch):
    monkeypatch.setattr("lowering.triton.layouts._triton_installed", lambda: False)
    assert "triton is not installed" in failure(capsys, "kernels")


def test_tools_of_triton_are_missing(capsys, monkeypatch):
    inspection.tool.cache_clear()
    monkeypatch.setattr("triton.__file__", "/nowhere/triton/__init__.py")
    said = failure(capsys, "kernels", "--recipe", "fp", "--head-dim", "64")
    assert "cuobjdump is missing in this build of Triton" in said
    inspection.tool.cache_clear()


def test_module():
    command = [sys.executable, "-m", "kvpass", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "kernels" in done.stdout


MODEL = str(Path(__file__).parents[1] / "examples" / "small_model")


def test_calibrate(capsys, tmp_path):
    text, out = tmp_path / "text.jsonl", tmp_path / "plan.safetensors"
    words = " ".join(f"name_{i} = {i * 7919 % 1000}" for i in range(400))
    text.write_text(json.dumps({"text": words}) + "\n\n" + json.dumps({"text": words[::-1]}))
    options = ["--samples", "2", "--length", "200", "--recipe", "skvq-k2v1.5,group=32,clip=0.9"]
    assert main(["calibrate", MODEL, str(text), "--out", str(out), *options]) == 0
    said = capsys.readouterr().out
    assert said == f"skvq-k2v1.5: 4 layers calibrated on 400 tokens, saved as {out}\n"
    plan = Plan.load(out)
    assert plan.layer_at(3).values.codec.clip == 0.9
    assert plan.layer_at(3).value_basis is not None


def test_errors_of_calibrate(capsys, tmp_path):
    text, broken = tmp_path / "text.txt", tmp_path / "broken.jsonl"
    text.write_bytes(b"\xff\xfe\x00")
    broken.write_text("[1]")
    out = ["--out", str(tmp_path / "plan.safetensors")]

    def said(*arguments):
        return failure(capsys, "calibrate", *arguments)

    assert "--out plan.pt is not supported; allowed: a *.safetensors file" in said(
        MODEL, str(text), "--out", "plan.pt"
    )
    assert "its folder does not exist" in said(MODEL, str(text), "--out", "no/plan.safetensors")
    assert "Text file 'nowhere' does not exist" in said(MODEL, "nowhere", *out)
    assert "'nowhere' is not a model folder" in said("nowhere", str(text), *out)
    assert "Unknown recipe 'skvk'" in said(MODEL, str(text), *out, "--recipe", "skvk")
    assert "Invalid value for '--dtype': 'int8' is not one of 'float16', " in said(
        MODEL, str(text), *out, "--dtype", "int8"
    )
    assert "cannot be loaded on gpu" in said(MODEL, str(text), *out, "--device", "gpu")
    # Behind the bar that transformers shows while it loads the model.
    for file, reason in ((text, "is no text in UTF-8"), (broken, "a line is list, not an object")):
        assert main(["calibrate", MODEL, str(file), *out]) == 2
        assert reason in capsys.readouterr().err.splitlines()[-1]


def test_estimate(capsys, tmp_path):
    out = tmp_path / "found.json"
    assert main(["estimate", MODEL, "--recipes", "kivi-2bit,group=64,fp", "--context", "4096",
                 "--devices", "2", "--link-bandwidth", "1", "--link-latency", "10",
                 "--json", str(out)]) == 0  # fmt: skip
    title, header, *rows = capsys.readouterr().out.splitlines()
    told = "Predicted: llama in bfloat16 on h100, batch 1, 4,096 tokens, on each of 2 devices"
    assert title.startswith(told)
    assert header.startswith("cache")
    assert [r.split()[0] for r in rows[:4]] == ["plain", "fp8", "kivi-2bit,group=64", "fp"]
    content = json.loads(out.read_text())
    assert content["arguments"]["recipes"] == ["kivi-2bit,group=64", "fp"]
    plain, _, kivi, _ = content["results"]
    # Keys and values of 4 layers, 2 heads of 64 channels.
    assert plain["held"] == 4096 * 2 * 4 * 2 * 64 * 2
    assert kivi["held"] < plain["held"] / 8
    assert kivi["link"]["start"] == 1e-5


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("llama-3.1-8b --device h1000", "Unknown device 'h1000'. Did you mean 'h100'"),
        ("llama-3.1-8b --memory 16GiB", "Another device needs both --memory and --bandwidth."),
        ("llama-3.1-8b --link-latency 9", "Another link needs both --link-bandwidth and --link-l"),
        ("llama-3.1-8b --memory much --bandwidth 1", "Size 'much' cannot be read; allowed: e.g."),
        ("llama-3.1-8b --recipes kivi", "Unknown recipe 'kivi'. Did you mean"),
        ("llama-3.1-8b --context 0", "context=0 is not supported"),
        ("llama", "Unknown preset or model folder 'llama'."),
    ],
)
def test_mistakes_of_estimate(arguments, sentence, capsys):
    assert failure(capsys, "estimate", *arguments.split()).startswith(f"kvpass: {sentence}")


def test_explain(capsys, tmp_path):
    page, out, folder = tmp_path / "page.html", tmp_path / "found.json", tmp_path / "graphs"
    outputs = ["--html", str(page), "--json", str(out), "--folder", str(folder)]
    assert main(["explain", MODEL, "--recipe", "kivi-2bit", "--tokens", "300", *outputs]) == 0
    said = capsys.readouterr().out
    assert said.startswith("kvpass: 2 graph(s) of LlamaForCausalLM")
    assert "cache now: 8 tensors of 302 tokens" in said
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert (folder / "explain.txt").read_text() in said
    rows = json.loads(out.read_text())["results"]
    assert [row["kind"] for row in rows] == ["prefill", "decode"]
    assert {"rule", "path", "detail", "fired"} <= set(rows[0]["events"][0])


def test_debug_shows_where_an_error_comes_from(capsys):
    assert main(["explain", "nowhere"]) == 2
    with pytest.raises(OptionError, match="'nowhere' is not a model folder"):
        main(["--debug", "explain", "nowhere"])
    assert capsys.readouterr().err.startswith("kvpass: 'nowhere' is not a model folder")


def test_a_model_without_a_cache(capsys, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps({"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 1})
    )
    assert "keeps no keys and values" in failure(capsys, "explain", str(config))
    assert "keeps no keys and values" in failure(capsys, "estimate", str(config))


def test_eval(capsys, tmp_path):
    text, out = tmp_path / "text.txt", tmp_path / "judged"
    text.write_text(" ".join(f"name_{i} = {i * 7919 % 1000}\n" for i in range(200)))
    arguments = ["eval", MODEL, str(text), "--out", str(out), "--recipes", "kivi-2bit"]
    arguments += ["--prompt", "40", "--length", "100", "--tokens", "60", "--batch", "1",
                  "--tasks", "passkey", "--lengths", "90", "--seeds", "1", "--inner", "eager",
                  "--no-plots"]  # fmt: skip
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "kivi-2bit" in said
    assert "passkey" in said
    assert {p.name for p in out.iterdir()} == {"measurements.jsonl", "report.md", "report.json"}
    # A recipe that fails says so, and those before it are not measured again.
    plan = parse_plan("int8.token48/window=16,pack_every=1")
    Plan(LayerPlan(plan, plan)).save(tmp_path / "plan.safetensors")
    arguments[arguments.index("kivi-2bit")] = f"kivi-2bit,{tmp_path}/plan.safetensors"
    assert main(arguments) == 1
    again = capsys.readouterr().out
    row = next(r.split() for r in said.splitlines() if r.startswith("kivi-2bit "))
    assert row in [r.split() for r in again.splitlines()]
    assert "cannot be stored as" in again


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--tasks", "needel"], "kvpass: Unknown task 'needel'. Did you mean"),
        (["--recipes", "kivi"], "kvpass: Unknown recipe 'kivi'. Did you mean"),
        (["--length", "100000"], "kvpass: A length of 100000 is not supported; allowed: up to"),
        (["--calibration", "none.txt"], "kvpass: Text file 'none.txt' does not exist."),
        (["--seeds", "0"], "kvpass eval: Invalid value for '--seeds'"),
    ],
)
def test_mistakes_of_eval(more, sentence, capsys, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a = 1\n" * 400)
    command = ["eval", MODEL, str(text), "--out", str(tmp_path / "judged"), "--no-plots", *more]
    assert main(command) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(sentence)
