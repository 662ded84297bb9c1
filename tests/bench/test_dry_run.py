"""The whole way to a GPU, without one: what `kvpass bench gpu --dry-run` finds."""

from __future__ import annotations

import json
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch._higher_order_ops import triton_kernel_wrap
from torch._inductor.exc import InvalidCxxCompiler
from torch.fx import Graph
from triton.runtime.jit import JITFunction

from kvpass import _torch_gpu
from kvpass._torch_gpu import InductorKernel
from kvpass._torch_inductor import accesses_finder
from kvpass.bench import dry_run as module
from kvpass.bench.dry_run import GraphFindings, Route, dry_run, dry_run_section
from kvpass.cli import main
from kvpass.errors import KernelError
from lowering import codegen
from lowering.triton.inspection import inspect_launch, signature
from lowering.triton.layer import layer_launches
from tests.command import failure

DYNAMIC = Route("kivi-4bit", torch.bfloat16, "dynamic", 1, 90)
# Values are rotated by the weights around them, new keys and the query by the kernels.
STATIC = Route("rotated-4bit,key_rotation=hadamard", torch.float16, "static", 8, 80)


@pytest.fixture(scope="module", params=[DYNAMIC, STATIC], ids=str)
def found(request):
    finder = accesses_finder()
    find = getattr(triton_kernel_wrap, finder)
    with patch.object(triton_kernel_wrap, finder, wraps=find) as asked:
        return request.param, dry_run(request.param), asked.call_args_list


def test_nothing_fails_is_copied_or_waits(found):
    route, graphs, _ = found
    prefill, decode = graphs
    assert (prefill.kind, decode.kind) == ("prefill", "decode")
    for graph in graphs:
        assert [k.problem for k in graph.failed] == []
        assert graph.clones == graph.waits == graph.refused == ()
        assert graph.right
    assert prefill.providers == {"pack by triton": 4}
    # A static cache counts its tokens itself.
    more = {DYNAMIC: {"length by aten": 1, "copy_cos_sin by aten": 1}, STATIC: {}}[route]
    assert decode.providers == more | {"append_attention by triton": 2}
    # Of four weights there is a rotated one beside the model's own.
    expected = {DYNAMIC: (22, 23), STATIC: (27, 30)}[route]
    assert (prefill.static, prefill.inputs) == expected
    # All but the ids, and a number that says what room a cache that grows has.
    assert decode.static == decode.inputs - {DYNAMIC: 2, STATIC: 1}[route]
    assert decode.obstacle == ""
    names = {k.name for k in decode.kernels if k.own}
    assert names == {"append_both", "attention_split", "attention_merge"}
    assert "decode" in str(dry_run_section(route, graphs))


def test_chunks(monkeypatch):
    monkeypatch.setattr(module, "_SHAPE", replace(module._SHAPE, layers=1))
    graphs = dry_run(Route("cocktail", torch.bfloat16, "dynamic", 2, 90))
    for graph in graphs:
        assert [k.problem for k in graph.failed] == []
        assert graph.clones == graph.refused == ()
        assert graph.right
    prefill, decode = graphs
    assert prefill.providers == {"reorder_chunks by triton": 2}
    assert decode.providers == {
        "length by aten": 1, "copy_cos_sin by aten": 1, "append_attention_chunks by triton": 1,
    }  # fmt: skip
    # Where its tokens go is computed on the host.
    assert [w.split(":")[0] for w in prefill.waits] == ["_to_copy at kvpass/cocktail/placement.py"]
    assert decode.waits == ()


def test_what_a_kernel_writes_is_found_once(found):
    """Inductor asks four times for each call of each of two layers."""
    _, _, asked = found
    kernels = sorted(call.args[0].fn.__name__ for call in asked)
    packs = ["pack_prompt"] * 2
    assert kernels == ["append_both", "attention_merge", "attention_split", *packs]
    # Some with the numbers of warps and stages of a call, some without.
    assert {type(call.args[0]) for call in asked} == {JITFunction}


def test_kernels_are_inspected_as_inductor_compiles_them(found):
    """`kvpass kernels` and the gates give the compiler what Inductor does."""
    route, graphs, _ = found
    plan = module._plan(route.recipe).default
    keys, values = plan.keys, plan.values
    if route is STATIC:
        keys, values = keys.static(module._ROOM), values.static(module._ROOM)
    launches = layer_launches(
        str(keys), str(values), key_dim=128, value_dim=128, heads_per_group=2, dtype=route.dtype,
        keys_rotated=route is STATIC,
    )  # fmt: skip
    launched = [(x.kernel.__name__, x.kernel.arg_names, signature(x)) for x in launches]
    for kernel in graphs[1].kernels:
        if not kernel.own:
            continue
        own_types = _types(kernel.signature)
        same = [
            launch
            for name, _, launch in launched
            if name == kernel.name and set(launch.types) == set(kernel.signature)
        ]
        assert any(
            _types(launch.types) == own_types and launch.aligned == kernel.aligned
            for launch in same
        ), (kernel.name, kernel.signature, kernel.aligned)


def _types(signature):
    """Those of arguments that are no constants. Numbers, which kernels cast, are of double
    precision up to torch 2.14, and of single precision from then on."""
    return {n: t.replace("fp64", "fp32") for n, t in signature.items() if t != "constexpr"}


@pytest.mark.parametrize("name", ["scale", "cap"])
def test_a_number_that_is_not_cast_is_caught(name, monkeypatch):
    """Inductor gives kernels numbers of double precision; eager launches and the interpreter do
    not."""
    cast = f"    {name} = tl.cast({name}, tl.float32)\n"

    def without(template, **parameters):
        text = render(template, **parameters)
        assert template != "attention" or cast in text
        return text.replace(cast, "")

    render = codegen.render
    monkeypatch.setattr(codegen, "render", without)
    codegen.load_kernels.cache_clear()
    launches = layer_launches("fp", "fp", key_dim=64, value_dim=64, heads_per_group=2, softcap=30.0)
    codegen.load_kernels.cache_clear()
    (split,) = (x for x in launches if x.step_elements)
    with pytest.raises(KernelError, match="does not compile for sm_90"):
        inspect_launch(split, 90)


def test_clones_are_found():
    """A state tensor that is read by anything but kernels; one that is written where it stands."""
    bound, lowered = Graph(), Graph()
    state, other = (bound.placeholder(n) for n in ("state", "other"))
    bound.call_function(torch.ops.kvpass.append.default, ([state], other, "fp"))
    x, y = (lowered.placeholder(n) for n in ("x", "y"))
    lowered.call_function(torch.ops.aten.clone.default, (y,))
    lowered.call_function(torch.ops.aten.copy_.default, (x, x))
    assert list(module._clones(bound, lowered)) == []
    cloned = lowered.call_function(torch.ops.aten.clone.default, (x,))
    lowered.call_function(torch.ops.aten.copy_.default, (x, cloned))
    assert list(module._clones(bound, lowered)) == ["aten.clone.default of x",
                                                    "aten.copy_.default of x"]  # fmt: skip


def test_steps_of_several_tokens(monkeypatch):
    """As assisted generation has them, of another number each time: one graph for all."""
    monkeypatch.setattr(module, "_SHAPE", replace(module._SHAPE, layers=1))
    monkeypatch.setattr(module, "_LENGTHS", (300, 3, 5, 4))
    _, *steps = dry_run(DYNAMIC)
    assert [g.kind for g in steps] == ["decode"] * len(steps)
    for graph in steps:
        assert [k.problem for k in graph.failed] == []
        assert graph.right
        assert graph.providers["append_attention by triton"] == 1
    varying = [k for k in steps[-1].kernels if k.name == "attention_split"]
    assert [k.signature["QUERIES"] for k in varying] == ["i32"]


def test_waits_are_found(monkeypatch):
    """Where PyTorch serves an op that reads lengths; no CUDA graph can replay that."""
    monkeypatch.setattr(module, "_SHAPE", replace(module._SHAPE, layers=1))
    route = Route("skvq-k2v2,group=256", torch.bfloat16, "static", 1, 90)
    prefill, decode = dry_run(route)
    assert [w.split(":")[0] for w in prefill.waits] == ["_to_copy at kvpass/format/quantize.py"]
    read = ["_local_scalar_dense at kvpass/format/state.py", "kvpass"]
    assert [w.split(":")[0] for w in decode.waits] == 2 * read
    assert decode.obstacle.startswith("kvpass::append runs in plain PyTorch")
    assert decode.clones == ()


def test_what_is_missing_is_one_sentence(monkeypatch):
    def missing(*_):
        raise InvalidCxxCompiler

    with monkeypatch.context() as patched:
        patched.setattr(_torch_gpu, "load_cpp", missing)
        patched.setattr(torch.backends.cuda, "is_built", lambda: False)
        patched.setattr("ctypes.CDLL", lambda *_, **__: None)
        with pytest.raises(
            KernelError, match=r"cannot be simulated .*: no C\+\+ compiler was found"
        ):
            dry_run(DYNAMIC)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(KernelError, match="triton is not installed"):
        dry_run(DYNAMIC)


def test_command(tmp_path, monkeypatch, capsys):
    """The table, the file, and the exit code when something is wrong."""
    wrong = InductorKernel("attention_split", True, {}, (), "AssertionError: fp64")
    findings = GraphFindings(
        "decode", (wrong,), {"append by triton": 2}, ("clone of x",), (), (), 9, 8, "it grows"
    )
    monkeypatch.setattr(module, "dry_run", lambda route: [findings])
    path = tmp_path / "found.json"
    arguments = ["bench", "gpu", "--dry-run", "--recipes", "fp", "--cache", "dynamic"]
    assert main([*arguments, "--json", str(path)]) == 1
    printed = capsys.readouterr().out
    assert "attention_split does not compile: AssertionError: fp64" in printed
    assert "clone: clone of x" in printed
    assert "no CUDA graph: it grows" in printed
    assert "1 routes, 1 graphs, 1 not right" in printed
    (row,) = json.loads(path.read_text())["results"]
    assert row["failed"] == {"attention_split": "AssertionError: fp64"}
    right = replace(findings, kernels=(), clones=())
    monkeypatch.setattr(module, "dry_run", lambda route: [right])
    assert main(arguments) == 0
    monkeypatch.setattr(module, "dry_run", lambda route: 1 / 0)
    assert main(arguments) == 1
    assert "FAILED ZeroDivisionError: division by zero" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--target", "sm_70"), "'sm_70' is not one of 'sm_80', 'sm_90'"),
        (("--cache", "statik"), "'statik' is not one of 'dynamic', 'static'"),
        (("--batch", "0"), "0 is not in the range x>=1"),
        (("--dtype", "int8"), "'int8' is not one of 'float16', 'bfloat16', 'float32'"),
    ],
)  # fmt: skip
def test_refusals(option, message, capsys):
    said = failure(capsys, "bench", "gpu", "--dry-run", *option)
    command = "kvpass bench gpu"
    assert said == f"{command}: Invalid value for '{option[0]}': {message}; see {command} --help."
