"""`lower`: which provider every op gets, why others declined, and what Inductor then sees."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import triton
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from torch._guards import TracingContext, tracing
from torch._inductor.exc import CppCompileError, InvalidCxxCompiler
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from triton.backends.compiler import GPUTarget

from kvpass._torch_sizes import symbolic_mode, symbolic_size
from kvpass.graph.analysis.sites import Sites
from kvpass.ops.cos_sin import rotated
from kvpass.ops.pack import pack_fake
from kvpass.recipes import recipe
from kvpass.rules import BOUND_RULES, Context, apply_rules
from lowering import Choice, compiler_problem, failed_kernels, lower, served_by
from lowering.cpp import library
from lowering.providers import PROVIDERS

KEYS, VALUES = "int2.channel32/window=0,pack_every=128", "int2.token32/window=128,pack_every=1"
ON_GPU = "device cuda is not a CPU"
ON_CPU = "Triton runs on CPU only in its interpreter, for tests"


def decode_graph(mode, device="cuda", *, groups=4, dim=64, new_tokens=1, plans=(KEYS, VALUES)):
    """Append to keys and values, then attention, as the backend's rules leave them."""
    graph = torch.fx.Graph()

    def placeholder(name, value):
        node = graph.placeholder(name)
        node.meta["example_value"] = value
        return node

    with mode:
        x = torch.empty(1, 2, 256, dim, dtype=torch.float16, device=device)
        states = [
            [placeholder(f"state_{i}_{j}", t) for j, t in enumerate(pack_fake(x, plan))]
            for i, plan in enumerate(plans)
        ]
        new = placeholder("new", x.new_empty(1, 2, new_tokens, dim))
        q = placeholder("q", x.new_empty(1, 2 * groups, new_tokens, dim))
    for state, plan in zip(states, plans, strict=True):
        graph.call_function(torch.ops.kvpass.append.default, (state, new, plan))
    arguments = (q, *states, None, 0.125, *plans)
    out = graph.call_function(torch.ops.kvpass.attention.default, arguments)
    graph.output((out,))
    return graph


def rotating_graph(plan, dtype=torch.float32):
    """An append that rotates keys, on a CPU."""
    graph = torch.fx.Graph()
    x = torch.randn(1, 2, 30, 16)
    examples = [*torch.ops.kvpass.pack(x, plan), x[:, :, :1], torch.randn(1, 1, 16, dtype=dtype)]
    nodes = [graph.placeholder(f"x_{i}") for i in range(len(examples))]
    for node, example in zip(nodes, examples, strict=True):
        node.meta["example_value"] = example
    *state, new, rows = nodes
    args = (state, new, plan, rows, "halves0-16")
    graph.output(graph.call_function(torch.ops.kvpass.append.default, args))
    return graph, examples


@pytest.mark.parametrize(
    ("plan", "dtype", "provider", "reason"),
    [
        ("int2.channel8/window=0,pack_every=8", torch.float32, "cpp", None),
        ("int2.channel8/window=0,pack_every=8", torch.float64, "cpp", "cosines and sines are"),
        (
            "int2.token16/window=16,pack_every=1,retained=4,filter=heavy_hitters",
            torch.float32,
            "aten",
            "filter 'heavy_hitters' is not supported",
        ),
    ],
)
def test_what_no_kernel_rotates_is_rotated_before(plan, dtype, provider, reason):
    graph, examples = rotating_graph(plan, dtype)
    wanted = [t.clone() for t in examples]
    *state, new, rows = wanted
    torch.ops.kvpass.append(state, new, plan, rows, "halves0-16")
    context = Context(graph, Sites(), recipe("fp"), served_by=served_by)
    events = apply_rules(context, BOUND_RULES)
    (choice,) = lower(graph)
    assert choice.provider == provider
    if reason is None:
        assert events == []
    else:
        assert f"cpp declined: {reason}" in events[0].detail
    names = [node.target for node in graph.nodes]
    assert (rotated in names) == (reason is not None)
    torch.fx.GraphModule({}, graph)(*examples)
    window, expected = (tensors[2].view(torch.uint8) for tensors in (examples, wanted))
    assert torch.equal(window, expected)


@pytest.mark.parametrize(
    ("plan", "append", "attention"),
    [
        ("int3.token64/window=0,pack_every=1", None, None),
        ("int1.5.token64.ternary_in_2bit.fp8.clip0.9/sinks=5,window=0,pack_every=1", None, None),
        ("int1.5.token64/window=0,pack_every=1", None, None),
        (
            "int1.5.token32/window=0,pack_every=1",
            None,
            "the groups of keys int1.5.token32/window=0,pack_every=1 are too short at head_dim 64",
        ),
        ("int3.token64.pack11/window=0,pack_every=1", None, None),
        (
            "int1.5.token128/window=0,pack_every=1",
            "int1.5.token128 is not supported where tokens have to be decoded",
            "int1.5.token128/window=0,pack_every=1 has to be decoded; that is not supported in "
            "base 3",
        ),
        ("int2.token64/window=0,pack_every=1,pivotal=0.1", None, None),
        ("int2.token32.half_split.fp8/window=9,pack_every=1", None, None),
        (
            "int2.token8.half_split/window=0,pack_every=1",
            "the halves of the groups of int2.token8.half_split do not fill blocks of 8 words",
            "the groups of keys int2.token8.half_split/window=0,pack_every=1 are too short at "
            "head_dim 64",
        ),
        ("int2.token64/window=9,pack_every=1,retained=4,filter=outliers", None, None),
        (
            "int2.token64.outliers2/window=0,pack_every=1,pivotal=0.1",
            "a window that grows is not supported where heads are encoded together "
            "(int2.token64.outliers2)",
            "int2.token64.outliers2/window=0,pack_every=1,pivotal=0.1 has to be decoded; that is "
            "not supported where the window grows",
        ),
    ],
    ids=str,
)
def test_what_triton_declines_of_a_plan(plan, append, attention):
    choices = lower(decode_graph(FakeTensorMode(), plans=(plan, plan)))
    declined = [dict(choice.declined).get("triton") for choice in choices]
    assert declined == [append, append, attention]


def test_triton_on_a_gpu():
    graph = decode_graph(FakeTensorMode())
    choices = lower(graph)
    assert [(c.op, c.provider, c.declined) for c in choices] == [
        ("append", "triton", (("cpp", ON_GPU),)),
        ("append", "triton", (("cpp", ON_GPU),)),
        ("attention", "triton", (("cpp", ON_GPU),)),
    ]
    targets = [n.target for n in graph.nodes if n.op == "call_function"]
    kernels = torch.ops.kvpass_triton
    assert targets == [kernels.append.default, kernels.append.default, kernels.attention.default]


def test_cpp_on_cpu():
    graph = decode_graph(FakeTensorMode(), "cpu")
    assert [(c.op, c.provider, c.declined) for c in lower(graph)] == [
        ("append", "cpp", ()),
        ("append", "cpp", ()),
        ("attention", "cpp", ()),
    ]
    assert torch.ops.kvpass_cpp.attention.default in {n.target for n in graph.nodes}


def test_aten_where_no_compiler_is(monkeypatch):
    def missing(*_):
        raise InvalidCxxCompiler

    monkeypatch.setattr("lowering.cpp.library.start_cpp", missing)
    monkeypatch.setattr(library, "_problems", {})
    library._started.cache_clear()
    graph = decode_graph(FakeTensorMode(), "cpu", dim=32)
    declined = (("cpp", "no C++ compiler was found"), ("triton", ON_CPU))
    choices = lower(graph)
    assert choices[-1] == Choice("attention", "attention_default", "aten", declined, waits=True)
    assert torch.ops.kvpass.attention.default in {n.target for n in graph.nodes}
    assert compiler_problem(choices) == "no C++ compiler was found"


def test_aten_where_a_kernel_turns_out_not_to_compile(monkeypatch):
    """It is compiled beside Inductor's code; the next choice knows."""

    def refused():
        raise CppCompileError(["g++"], "")

    monkeypatch.setattr("lowering.cpp.library.start_cpp", lambda *_: refused)
    monkeypatch.setattr(library, "_problems", {})
    monkeypatch.setattr(library, "_waiting", {})
    library._started.cache_clear()
    found = []
    for _ in range(2):
        choices = lower(decode_graph(FakeTensorMode(), "cpu", dim=32))
        found.append(([c.provider for c in choices], failed_kernels()))
    library._started.cache_clear()
    assert found == [(["cpp"] * 3, True), (["aten"] * 3, False)]
    assert compiler_problem(choices) == "the C++ compiler refuses generated code"


@pytest.mark.parametrize(
    ("arguments", "op", "reason"),
    [
        ({"groups": 129}, "attention", "129 query rows share a KV head; the kernels take 128"),
        ({"new_tokens": 17}, "append",
         "17 new tokens are a prefill; the kernel appends 16 at most"),
        ({"plans": (KEYS, KEYS)}, "attention", f"values {KEYS} have groups along tokens"),
        ({"dim": 96, "plans": (VALUES, VALUES)}, "attention",
         f"the groups of keys {VALUES} are too short at head_dim 96"),
        ({"dim": 512}, "attention", "keys: head_dim 512 is more than 256"),
    ],
)  # fmt: skip
def test_reasons(arguments, op, reason):
    choices = lower(decode_graph(FakeTensorMode(), **arguments))
    assert ("triton", reason) in next(c for c in choices if c.op == op).declined


def test_a_symbolic_number_of_new_tokens():
    """As its guards bound it: an append before attention is one of a step."""
    reason = "the number of new tokens is symbolic, and may be more than 16"
    for most, declined in ((16, None), (17, reason)):
        mode = symbolic_mode()
        new_tokens = symbolic_size(mode, "new", 5)
        assert new_tokens <= most
        choices = lower(decode_graph(mode, new_tokens=new_tokens))
        assert [dict(c.declined).get("triton") for c in choices] == [declined] * 3


def provider(op, name):
    return next(p for p in PROVIDERS[op] if p.name == name)


@pytest.mark.parametrize("plan", ["fp", KEYS, VALUES])
def test_unpack_on_a_gpu(plan):
    """A second prompt meets the packed past decoded; its length may be symbolic."""
    graph, mode = torch.fx.Graph(), FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        x = torch.empty(1, 2, 256, 64, dtype=torch.float16, device="cuda")
        state = pack_fake(x, plan)
        tokens = mode.shape_env.create_unbacked_symint()
    nodes = []
    for i, value in enumerate((*state, tokens)):
        nodes.append(graph.placeholder(f"x_{i}"))
        nodes[-1].meta["example_value"] = value
    arguments = (nodes[:-1], nodes[-1], plan, torch.float16)
    node = graph.call_function(torch.ops.kvpass.unpack.default, arguments)
    assert lower(graph) == [Choice("unpack", node.name, "triton", (("cpp", ON_GPU),))]
    with mode:
        out = node.target(state, tokens, plan, torch.float16)
    assert out.shape == (1, 2, tokens, 64)
    assert provider("unpack", "triton").unsupported_reason(state, 5, plan, torch.float32) == (
        "tokens are wanted as torch.float32, those of the cache are torch.float16"
    )


def test_state_with_gaps_is_declined():
    with FakeTensorMode():
        x = torch.empty(1, 2, 256, 64, dtype=torch.float16, device="cuda")
        state = [t.expand(2, *t.shape[1:]) for t in pack_fake(x, KEYS)]
        reason = provider("append", "triton").unsupported_reason(
            state, x.new_empty(2, 2, 1, 64), KEYS
        )
    assert reason == "codes is not contiguous"


def test_another_graph_is_left_alone():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops.aten.relu.default, (x,)))
    assert lower(graph) == []


class FakeDriver:
    """What PyTorch asks of Triton's driver to analyse which arguments a kernel writes."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


def test_kernels_are_inlined_and_only_written_tensors_count_as_mutated(monkeypatch):
    mode, graphs = FakeTensorMode(), []

    def keep(module, _):
        graphs.append(module)
        return make_boxed_func(module.forward)

    graph = decode_graph(mode)
    output = graph.output_node()
    with graph.inserting_before(output):
        keys = graph.find_nodes(op="placeholder")[:4]
        plain = graph.call_function(
            torch.ops.kvpass.unpack.default, (keys, 257, KEYS, torch.float16)
        )
    output.args = ((*output.args[0], plain),)
    lower(graph)
    inputs = [n.meta["example_value"] for n in graph.nodes if n.op == "placeholder"]
    monkeypatch.setattr(triton.runtime.driver, "_active", FakeDriver())
    with torch.no_grad(), tracing(TracingContext(mode)):
        module = torch.fx.GraphModule({}, graph)
        aot_module_simplified(module, inputs, fw_compiler=keep, inference_compiler=keep)
    launches = [n for n in graphs[0].graph.nodes if "triton_kernel_wrapper" in str(n.target)]
    assert [n.kwargs["tensors_to_clone"] for n in launches] == [
        *[["codes", "qparams", "window"], ["segment_ends"]] * 2,
        ["partial", "statistics"],
        ["out"],
        ["out"],
    ]


def test_without_triton():
    """Importing needs no triton; the provider declines."""
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, lowering\n"
        "from lowering.providers import PROVIDERS\n"
        "triton = next(p for p in PROVIDERS['pack'] if p.name == 'triton')\n"
        "print(triton.unsupported_reason(torch.empty(1, 1, 4, 64), 'fp'))\n"
    )
    done = subprocess.run((sys.executable, "-c", program), capture_output=True, text=True)
    assert done.stdout.strip() == "triton is not installed", done.stderr
