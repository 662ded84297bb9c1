"""`kvpass bench gpu` without a GPU: its checks on a CPU, its parts in order."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from kvpass.bench import contenders, gpu, kernel_checks, model_checks
from kvpass.bench.attention import bench_attention
from kvpass.bench.contenders import Case
from kvpass.bench.decoders import packed_static_contender
from kvpass.bench.filling import Setting
from kvpass.bench.kernel_checks import check_kernels, worst
from kvpass.bench.model_checks import FIRST, VARIANTS, ModelCase, check_model
from kvpass.bench.models import Shape, random_model
from kvpass.bench.timing import Contender, measure
from kvpass.cli import main
from kvpass.errors import KernelError, OptionError
from kvpass.inner import compile_ahead
from kvpass.plan import Plan
from lowering.triton import pack
from lowering.triton.heuristics import AttentionSizes
from lowering.triton.launch import Launch
from lowering.triton.tuning import Tuned, Workload

CPU = torch.device("cpu")
OPS = ("pack", "append", "append_attention", "attention", "unpack")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def checks(recipe="kivi-2bit", wanted=None, dtype=torch.float16):
    return list(check_kernels(recipe, dtype, 64, CPU, wanted))


@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [("fp", torch.bfloat16), ("kivi-4bit", torch.float16), ("kvquant-nuq3-1%", torch.float32)],
)
def test_reference_passes(recipe, dtype):
    found = checks(recipe, dtype=dtype)
    assert [c for c in found if not c.passed] == []
    assert {c.name.split()[0] for c in found} == set(OPS)
    assert 0 <= worst(found) <= 1


@pytest.mark.parametrize("op", OPS)
def test_a_wrong_kernel_is_caught(op, monkeypatch):
    real = kernel_checks.provider

    def broken(name, *args):
        target, choice = real(name, *args)

        def off(*arguments):
            out = target(*arguments)
            if name == "pack":
                out[0][0, 0, 0] += 1
                out[2][..., 0] += 1
            elif name == "append":
                arguments[0][2].add_(1)
            else:
                out.mul_(1.05)
            return out

        return (off if name == op else target), choice

    monkeypatch.setattr(kernel_checks, "provider", broken)
    failed = {c.name.split()[0] for c in checks() if not c.passed}
    assert failed == {op}


@no_gpu
def test_another_provider_is_not_accepted(monkeypatch):
    monkeypatch.setattr(kernel_checks, "_RAGGED", ())
    monkeypatch.setattr(gpu, "_FORMATS", ("fp", "kivi-2bit"))
    found = checks(wanted="triton")
    assert not any(c.passed for c in found)
    assert "served by" in found[0].problem
    assert "not triton" in found[0].problem


@no_gpu
def test_refuses_without_a_gpu(capsys, tmp_path):
    assert main(["bench", "gpu", "--json", str(tmp_path / "x.json")]) == 2
    err = capsys.readouterr().err
    assert "torch finds no CUDA GPU here" in err
    with pytest.raises(OptionError, match=r"needs a CUDA GPU, .*; --dry-run needs none"):
        gpu.bench_gpu(CPU, "x.json")
    with pytest.raises(OptionError, match=r"Unknown part 'kernel'. Did you mean 'kernels'?"):
        gpu.bench_gpu(CPU, "x.json", parts=["kernel"])


def test_a_part_that_fails_does_not_stop_the_others(monkeypatch, tmp_path, capsys):
    def fails():
        raise RuntimeError("no such kernel")

    parts = [
        ("model a", fails),
        ("kernels b", lambda: ("fine", [{"x": 1}], True)),
        ("sizes", fails),
    ]
    monkeypatch.setattr(gpu, "_parts", lambda device: iter(parts))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    file = tmp_path / "g.json"
    assert not gpu.bench_gpu(torch.device("cuda"), str(file), parts=["kernels", "model"])
    rows = json.loads(file.read_text())["results"]
    assert [(r["part"], r.get("right")) for r in rows] == [
        ("model a", False), ("kernels b", None), ("kernels b", True),
    ]  # fmt: skip
    assert "RuntimeError: no such kernel" in rows[0]["text"]
    assert "== model a, 0 s: NOT RIGHT" in capsys.readouterr().out


def test_the_model_part(monkeypatch):
    """On a CPU, with a static cache; with a growing one another cache differs from rounding."""
    monkeypatch.setattr(model_checks, "STEPS", (300, 1))
    row = check_model(FIRST[1], CPU, "eager")
    assert row["right"]
    assert row["error"] > 0
    assert row["refused"] == []
    assert "attention by cpp" in row["providers"]
    assert row["no_cuda_graph"] == [""]
    monkeypatch.setattr(gpu, "check_model", partial(check_model, inner="eager"))
    exact = model_checks.oracle_cache
    monkeypatch.setattr(model_checks, "oracle_cache", lambda plan, *_: exact(Plan(), *_))
    text, (row,), right = gpu._model(CPU, ModelCase("kivi-2bit", mode="reduce-overhead"))
    assert not right
    assert row["error"] > 2 * row["allowed"]
    assert "no CUDA graph" not in text


def test_the_attention_part(monkeypatch):
    monkeypatch.setattr(contenders, "cache_size", lambda device: 1 << 16)
    text, rows, right = gpu._attention(CPU, 1, 130)
    assert right
    assert "130 tokens, batch 1, 32 query and 8 KV heads of 128, bfloat16" in text
    assert {"batch", "tokens", "copy_gb_s", "times_ms"} <= set(rows[0])
    monkeypatch.setattr(gpu, "free_memory", lambda device: 0)
    assert gpu._attention(CPU, 1, 130) == ("not run: too little memory", [], True)


def test_the_sizes_part(monkeypatch):
    asked = []

    def packed_contender(case, recipe, *_):
        asked.append((recipe, case.tokens, os.environ["KVPASS_TUNE"]))
        return SimpleNamespace(calls=[lambda: None])

    monkeypatch.setattr(gpu, "packed_contender", packed_contender)
    monkeypatch.setattr(gpu, "_TUNED", ((1, 130),))
    assert gpu._sizes(CPU) == ("nothing was measured", [], True)
    assert asked == [("kivi-4bit", 130, "1"), ("kivi-2bit", 130, "1")]
    assert "KVPASS_TUNE" not in os.environ
    sizes = {"part": 32, "edge_tile": 32, "columns": 8, "edge_splits": 1, "warps": 1}
    table = AttentionSizes(tile=64, splits=16, **sizes)
    chosen = AttentionSizes(tile=128, splits=16, **sizes)
    workload = Workload("fp", "fp", 128, 128, torch.float16, 8, 4, 4, 4096)
    found = [
        Tuned(workload, table, chosen, 0.3, 0.25),
        Tuned(workload, table, table, 0.3, 0.3),
        Tuned(workload, table, chosen, None, 0.25),
    ]
    monkeypatch.setattr(gpu, "tunings", lambda: found)
    text, rows, right = gpu._sizes(CPU)
    assert not right
    assert text.splitlines() == [
        "fp, fp B=8 T=4096: tile 64 -> 128; 1.20 x the table's speed",
        "fp, fp B=8 T=4096: as in the table; 1.00 x the table's speed",
        "fp, fp B=8 T=4096: tile 64 -> 128; no time for the table's",
    ]
    assert [row["gain"] for row in rows] == [0.3 / 0.25, 1.0, None]
    assert json.dumps(rows, default=str)
    found.pop()
    assert gpu._sizes(CPU)[2]


def test_the_decode_part(monkeypatch):
    tiny = Shape(4, 64, 96, 4, 2, None, 128)
    monkeypatch.setattr(gpu, "PRESETS", {"llama-3.1-8b": tiny})
    monkeypatch.setattr(gpu, "Setting", partial(Setting, inner="eager"))
    monkeypatch.setattr(gpu, "_DECODED_TOKENS", 200)
    monkeypatch.setattr(gpu, "_DECODED_LAYERS", 1)
    text, rows, right = gpu._decode(CPU)
    assert right
    assert "200 tokens (random), batch 4, 1 layers" in text
    assert rows[0]["tokens_per_s"] > 0


def test_what_fails_of_ours_leaves_the_peers_numbers(monkeypatch):
    def broken(*args):
        raise KernelError("The kernel of kvpass::pack cannot be used: why.")

    monkeypatch.setattr(contenders, "cache_size", lambda device: 1 << 16)
    monkeypatch.setattr("kvpass.bench.attention.packed_contender", broken)
    text, rows, right = gpu._attention(CPU, 1, 130, "plain")
    assert not right
    assert rows[0]["problem"].startswith("KernelError: The kernel of kvpass::pack cannot be used")
    assert rows[-1]["times_ms"]
    assert "not run: KernelError" in text
    with pytest.raises(KernelError):
        bench_attention([Case(1, 4, 2, 64, 130, torch.float32, CPU)], ["fp"], 1)


def test_a_static_cache_is_packed_before_it_is_timed():
    """Its first step packs what it was filled with, and is not the one that is checked."""
    shape = Shape(1, 64, 96, 4, 2, None, 128)
    setting = Setting(shape.config(), 200, 1, torch.float32, CPU, inner="eager")
    model = random_model(setting.config, setting.dtype, CPU)
    contender = packed_static_contender(setting, model, "kivi-2bit", 210)
    (result,) = measure([contender], 2, CPU, warm_up=1)
    assert result.times_ms
    assert not result.wrong
    assert result.error > 0
    assert "attention by cpp x1" in result.note


def test_kernels_are_compiled_ahead_once_for_each_signature(monkeypatch):
    compiled = []
    monkeypatch.setattr(Launch, "compile", lambda launch: compiled.append(launch.kernel.__name__))
    x = torch.empty(1, 2, 300, 64, dtype=torch.float16, device="meta")
    plan = "int4.token32/window=128,pack_every=1"

    def call():
        for tokens in (290, 291, 300):
            pack.pack(x[:, :, :tokens], plan)

    assert compile_ahead(call) == 1
    assert compiled == ["pack_prompt"]
    monkeypatch.setattr(Launch, "compile", lambda launch: 1 / 0)
    with pytest.raises(KernelError, match="Kernel pack_prompt does not compile: division by zero"):
        compile_ahead(call)


@no_gpu
def test_the_kernels_part(monkeypatch):
    monkeypatch.setattr(kernel_checks, "_RAGGED", ())
    monkeypatch.setattr(gpu, "_FORMATS", ("fp", "kivi-2bit"))
    text, rows, right = gpu._kernels(CPU, torch.float16, 64)
    assert not right
    assert "kivi-2bit: 0 of 40 right" in text
    assert "of what is allowed; 0 kernels" in text
    assert "WRONG pack keys fp float16 D=64 T=1: served by" in text
    assert json.dumps(rows)


def test_a_graph_is_timed_per_call(monkeypatch):
    """The events of a GPU, with a graph that only counts."""

    class Graph:
        replays = 0

        def replay(self):
            self.replays += 1

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            pass

        synchronize = record

        def elapsed_time(self, end):
            return 32.0

    graph, calls = Graph(), []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda g: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: None)

    def call(i):
        def run():
            calls.append(i)
            return torch.tensor(0.0)

        return run

    contender = Contender("a", [call(0), call(1)], float, 0.5)
    options = {"warm_up": 0}
    (result,) = measure([contender], 3, torch.device("cuda"), graphs=True, **options)
    assert calls == [0, 1] * 9  # checked once, captured sixteen times
    assert graph.replays == 4
    assert result.times_ms == (2.0, 2.0, 2.0)
    (result,) = measure([contender], 1, torch.device("cuda"), graphs=False, **options)
    assert result.times_ms == (32.0,)
    contender.capturable = False
    (result,) = measure([contender], 1, torch.device("cuda"), graphs=True, **options)
    assert result.times_ms == (32.0,)


def test_parts_are_complete_and_in_order():
    names = [name.split()[0] for name, _ in gpu._parts(CPU)]
    assert tuple(dict.fromkeys(names)) == gpu.PARTS
    # Subnormals, both caches and CUDA graphs, two lengths with and without launches, decoding.
    assert names[:9] == ["subnormals", *["model"] * 3, *["long"] * 4, "decode"]
    recipes = {case.recipe for case in VARIANTS}
    assert {"kivi-2bit", "skvq-k2v2", "kvquant-nuq3-1%", "kvmix"} <= recipes
    assert {case.dtype for case in VARIANTS} >= {torch.float32, torch.float16}
    assert {case.family for case in VARIANTS} >= {"mistral", "gpt_oss"}


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("mask", [0x3, 0x300, 0xF0])
def test_products_of_subnormals_compile_to_tensor_cores(capability, mask):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kvpass.bench.subnormals import _dot_of_codes

    sizes = {"MASK": mask, "TOKENS": 64, "WORDS": 16, "COLUMNS": 16}
    signature = {"words": "*i16", "q": "*fp16", "out": "*fp32"} | dict.fromkeys(sizes, "constexpr")
    source = ASTSource(triton.jit(_dot_of_codes), signature, sizes)
    target = GPUTarget("cuda", capability, 32)
    ptx = triton.compile(source, target=target, options={"num_warps": 1}).asm["ptx"]
    assert "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" in ptx
