"""Replayed decode steps on a CPU, against the same compiled steps."""

from __future__ import annotations

import gc
import re
import warnings
import weakref
from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.fx import Graph
from torch.testing._internal.two_tensor import TwoTensor
from transformers import DynamicCache, StaticCache

from kvpass import explain, recipe
from kvpass._torch_calls import Call, CompiledModule, call_packed, recording
from kvpass.errors import KernelError
from kvpass.replay import Replayed, changed_arguments, replay_obstacle
from lowering.cpp.replay import Loop, repeat
from tests.harness import left_padding, run_steps
from tests.models import prompt, tiny_model

KIVI = recipe("kivi-2bit", group=16, residual=16)
OPTIONS = {"recipe": KIVI}
CACHES = {DynamicCache: {}, StaticCache: {"max_cache_len": 512}}


@pytest.fixture
def steps(monkeypatch):
    """How often compiled code was called, steps were recorded, and made again."""
    counts = Counter()
    record, unknown, call = Replayed._record, Replayed._call_unknown, Replayed.__call__

    def counted(name, real):
        def wrapper(self, *args):
            counts[name] += 1
            return real(self, *args)

        return wrapper

    monkeypatch.setattr(Replayed, "_record", counted("recorded", record))
    monkeypatch.setattr(Replayed, "_call_unknown", counted("unknown", unknown))
    monkeypatch.setattr(Replayed, "__call__", counted("all", call))
    return counts


def compiled(layers=2, **options):
    model = tiny_model("llama", layers=layers)
    model.compile(backend="kvpass", options={**OPTIONS, **options})
    return model


def decode(model, ids, lengths, cache=None, kind=DynamicCache):
    cache = kind(config=model.config, **CACHES[kind]) if cache is None else cache
    return run_steps(model, ids, lengths, cache=cache)


def expected(model, monkeypatch, *args, **kwargs):
    """What the graphs compute that are there, none of them replayed."""
    with monkeypatch.context() as patched:
        patched.setattr(Replayed, "__call__", lambda self, *given: self._compiled(*given))
        return decode(model, *args, **kwargs)[0]


@pytest.mark.parametrize("kind", CACHES)
def test_replayed_steps_are_those_of_the_graph(kind, steps, monkeypatch):
    """Past the ends of windows, of tiles, and of the room that a cache begins with."""
    model, ids, lengths = compiled(), prompt(2, 290), [250, *[1] * 40]
    logits, _ = decode(model, ids, lengths, kind=kind)
    assert steps["all"] == 40
    # Two calls to meet memory again, each time that it is another.
    assert 2 <= steps["unknown"] <= 2 * steps["recorded"] <= 6
    assert torch.equal(logits, expected(model, monkeypatch, ids, lengths, kind=kind))
    assert {graph.replay_obstacle for graph in explain(model).graphs} == {None}


def test_caches_threads_and_numbers_of_threads(steps, monkeypatch):
    model, threads = compiled(), torch.get_num_threads()
    texts = [prompt(1, 60, seed=seed) for seed in (1, 2)]
    wanted = [expected(model, monkeypatch, ids, [40, *[1] * 20]) for ids in texts]
    caches = [decode(model, ids[:, :40], [40])[1] for ids in texts]
    for at in range(40, 60, 4):
        for ids, cache, logits in zip(texts, caches, wanted, strict=True):
            found, _ = decode(model, ids[:, at : at + 4], [1] * 4, cache)
            assert torch.equal(found, logits[:, at : at + 4])
    assert steps["recorded"] == 2
    before = Counter(steps)
    torch.set_num_threads(threads + 1)
    try:
        decode(model, texts[0][:, :3], [1] * 3, caches[0])
    finally:
        torch.set_num_threads(threads)
    assert steps["recorded"] == before["recorded"] + 1


def test_a_step_that_another_thread_makes_is_not_made_at_once(steps, monkeypatch):
    model, ids = compiled(layers=1), prompt(1, 60)
    wanted = expected(model, monkeypatch, ids, [40, *[1] * 20])
    made = []
    real = Replayed._record

    def record(self, *args):
        made.append(real(self, *args))
        return made[-1]

    monkeypatch.setattr(Replayed, "_record", record)
    _, cache = decode(model, ids, [40, *[1] * 4])
    ((recorded, _),) = made
    with recorded.lock:
        busy, _ = decode(model, ids[:, 44:50], [1] * 6, cache)
    free, _ = decode(model, ids[:, 50:], [1] * 10, cache)
    assert torch.equal(torch.cat([busy, free], 1), wanted[:, 44:])
    assert len(made) == 1


def test_a_failed_step_leaves_the_cache_as_it_was(steps, monkeypatch):
    """Of a token that is none, in the first call, and of a call amidst the step."""
    model, ids = compiled(), prompt(1, 60)
    wanted = expected(model, monkeypatch, ids, [40, *[1] * 20])
    _, cache = decode(model, ids, [40, *[1] * 6])
    bad = ids.clone()
    bad[:, 46] = 5000
    before = Counter(steps)
    with pytest.raises(KernelError, match=r"Call 0 of \d+ of a replayed step failed: .*bounds"):
        decode(model, bad[:, 46:47], [1], cache)
    again, _ = decode(model, ids[:, 46:50], [1] * 4, cache)
    assert torch.equal(again, wanted[:, 46:50])
    call, failed = Loop.__call__, []

    def fail(self, args):
        call(self, args)
        if self._count > 1 and not failed:
            failed.append(True)
            raise KernelError("no")

    monkeypatch.setattr(Loop, "__call__", fail)
    with pytest.raises(KernelError, match="no"):
        decode(model, ids[:, 50:51], [1], cache)
    again, _ = decode(model, ids[:, 50:], [1] * 10, cache)
    assert torch.equal(again, wanted[:, 50:])
    assert steps["unknown"] == before["unknown"]


def test_sliding_layers_of_a_growing_cache_are_replayed(steps, monkeypatch):
    """They count tokens on the host, from which positions follow."""
    model = tiny_model("mistral", layers=2)
    model.compile(backend="kvpass", options=OPTIONS)
    ids, lengths = prompt(2, 70), [44, *[1] * 26]
    logits, cache = decode(model, ids, lengths)
    assert cache.layers[0].cumulative_length == 70
    # The window is full, and the same memory is met a second time.
    assert steps["recorded"] >= 1
    assert steps["all"] - steps["unknown"] > 12
    assert torch.equal(logits, expected(model, monkeypatch, ids, lengths))


def test_steps_of_texts_with_padding_are_replayed(steps, monkeypatch):
    """Their mask has one more column at each step."""
    model, ids, mask = compiled(), prompt(2, 290), left_padding([9, 0], 290)
    lengths = [250, *[1] * 40]
    cache = DynamicCache(config=model.config)
    logits, _ = run_steps(model, ids, lengths, mask=mask, cache=cache)
    # Memory is new where the cache grows, and where the mask does.
    assert 2 * steps["recorded"] - 1 <= steps["unknown"] <= 8
    with monkeypatch.context() as patched:
        patched.setattr(Replayed, "__call__", lambda self, *given: self._compiled(*given))
        cache = DynamicCache(config=model.config)
        assert torch.equal(logits, run_steps(model, ids, lengths, mask=mask, cache=cache)[0])


def test_what_cannot_be_replayed_is_told():
    """OPT's positions are a sum over as many numbers as there are tokens."""
    reason = "its argument .* is the number of tokens in the cache"
    for mode in (None, "reduce-overhead"):
        model = tiny_model("opt", layers=1)
        model.compile(backend="kvpass", options={**OPTIONS, "mode": mode})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            decode(model, prompt(1, 56), [40, *[1] * 16])
        told = [
            w for w in caught if re.search(f"no step is replayed, for {reason}", str(w.message))
        ]
        # Nobody has asked for it without a mode.
        assert len(told) == (mode is not None)
        assert re.fullmatch(reason, explain(model).graphs[-1].replay_obstacle)
        assert re.search(f"steps are not replayed, for {reason}\n", str(explain(model)))


def test_other_modes_and_compilers_replay_nothing(steps):
    model, twin = compiled(layers=1, mode="default"), compiled(layers=1, inner="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for m in (model, twin):
            decode(m, prompt(1, 44), [40, *[1] * 4])
    assert not steps


def small_graph(build):
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    x.meta["example_value"], y.meta["example_value"] = torch.ones(4), torch.ones(4)
    graph.output((build(graph, x, y),))
    return graph


def test_what_a_graph_may_write_to_is_never_copied():
    def into_y(graph, x, y):
        return graph.call_method("add_", (y, x))

    def into_a_view(graph, x, y):
        view = graph.call_method("view", (x, 2, 2))
        view.meta["example_value"] = x.meta["example_value"].view(2, 2)
        return graph.call_method("add_", (view, 1))

    def into_the_unknown(graph, x, y):
        return graph.call_method("add_", (graph.call_method("view", (x, 2, 2)), 1))

    def nothing(graph, x, y):
        return graph.call_function(torch.add, (x, y))

    builders = (into_y, into_a_view, into_the_unknown, nothing)
    assert [changed_arguments(small_graph(b)) for b in builders] == [{1}, {0}, {0, 1}, set()]


def test_arguments_that_stand_against_it():
    graph = small_graph(lambda graph, x, y: x)
    plain, meta = torch.ones(4), torch.ones(4, device="meta")
    assert replay_obstacle(graph, [plain, plain], ()) is None
    assert replay_obstacle(graph, [plain, meta], ()) == "its argument y is not on the CPU"
    leaf = torch.ones(4, requires_grad=True)
    assert replay_obstacle(graph, [plain, leaf], ()) == "it is differentiated"
    with torch.no_grad():
        assert replay_obstacle(graph, [plain, leaf], ()) is None


def recorded(function, *args):
    """A `Replayed` of Python code, called twice, and why it refused."""
    reasons = []
    replayed = Replayed(function, [], set(), repeat, reasons.append)
    for _ in range(2):
        replayed(*args)
    return replayed, reasons


def test_ops_of_pytorch_are_called_again():
    """Those that make tensors, that write, and views; results are new at each call."""
    sums = torch.zeros(3)

    def step(x, n):
        sums.add_(x[:3])
        return [torch.mul(x, 2).view(2, 2), x, sums + n, n]

    x = torch.arange(4.0)
    replayed, reasons = recorded(step, x, 5)
    assert (reasons, len(replayed._recordings)) == ([], 1)
    calls = []
    replayed._compiled = calls.append
    first, passed, second, number = replayed(x, 5)
    torch.testing.assert_close(first, torch.tensor([[0.0, 2.0], [4.0, 6.0]]))
    torch.testing.assert_close(second, 3 * x[:3] + 5)
    assert (passed is x, number, calls) == (True, 5, [])
    x.copy_(torch.ones(4))
    replayed(x, 5)
    assert first[1, 1] == 6.0


def test_ops_that_write_and_return_something_new():
    """What is returned is part of what is written, or not."""
    mean, variance = torch.zeros(2), torch.ones(2)

    def step(x):
        normed = torch.native_batch_norm(x, None, None, mean, variance, True, 0.5, 1e-5)
        return [normed[0], x.clone().add_(mean)]

    x = torch.arange(6.0).view(3, 2)
    replayed, reasons = recorded(step, x)
    assert (reasons, len(replayed._recordings)) == ([], 1)
    saved = mean.clone(), variance.clone()
    x.copy_(torch.tensor([[3.0, 1.0], [5.0, 1.0], [1.0, 7.0]]))
    replayed._compiled = pytest.fail
    found = replayed(x)
    mean.copy_(saved[0]), variance.copy_(saved[1])
    for new, wanted in zip(found, step(x), strict=True):
        torch.testing.assert_close(new, wanted, rtol=0, atol=0)


def test_an_op_is_called_again_as_a_whole():
    """It may read on the host, and call compiled functions: those are not called once more."""
    calls = []

    @torch.library.custom_op("kvpass_tests::shifted", mutates_args=())
    def shifted(x: Tensor) -> Tensor:
        calls.append(1)
        call_packed(lambda packed: calls.append(2), b"")
        return x + x.tolist()[0]

    x = torch.arange(1.0, 4.0)
    replayed, reasons = recorded(lambda x: [torch.ops.kvpass_tests.shifted(x) * 1], x)
    assert (reasons, len(replayed._recordings)) == ([], 1)
    calls.clear()
    x.mul_(10)
    replayed._compiled = pytest.fail
    assert replayed(x)[0].tolist() == [20.0, 30.0, 40.0]
    assert calls == [1, 2]


def test_an_op_whose_result_has_another_size_fails():
    sizes = [3, 3, 4]

    @torch.library.custom_op("kvpass_tests::counted", mutates_args=())
    def counted(x: Tensor) -> Tensor:
        return x.new_ones(sizes.pop(0))

    x = torch.ones(4)
    replayed, _ = recorded(lambda x: [torch.ops.kvpass_tests.counted(x) * 1], x)
    with pytest.raises(KernelError, match="kvpass_tests::counted of a replayed step has another"):
        replayed(x)


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (lambda x: [x + x.sum().item()], "it calls aten::_local_scalar_dense"),
        (lambda x: [x + len(x.tolist())], "it reads a tensor on the host"),
        (lambda x: [x + x.numpy().size], "it reads a tensor on the host"),
        (lambda x: [x.nonzero() * 1], "it calls aten::nonzero"),
        (lambda x: [x[1:]], "a result is a part of an argument"),
        (lambda x: [x.repeat(2**22)[:4] * 1], "its results between take over 67108864 bytes"),
    ],
)
def test_steps_that_cannot_be_made_again_are_refused(step, reason):
    replayed, reasons = recorded(step, torch.ones(4))
    assert reasons == [reason]
    assert torch.equal(replayed(torch.ones(4))[0], step(torch.ones(4))[0])


def test_a_step_that_takes_much_memory_frees_it_while_it_is_recorded():
    alive = []

    def step(x):
        for _ in range(2):
            made = x.repeat(2**22)
            alive.append(weakref.ref(made))
        # All but the last one, which has a name here.
        assert len(alive) < 3 or alive[-2]() is None
        return [made[:4] * 1]

    recorded(step, torch.ones(4))
    assert len(alive) == 4


def test_caches_that_take_turns(steps, monkeypatch):
    """Each step is another one's: what is like it is not the step before."""
    model = compiled(layers=1)
    texts = [prompt(1, 60, seed=seed) for seed in range(3)]
    wanted = [expected(model, monkeypatch, ids, [40, *[1] * 20]) for ids in texts]
    caches = [decode(model, ids[:, :40], [40])[1] for ids in texts]
    for at in range(40, 60):
        for ids, cache, logits in zip(texts, caches, wanted, strict=True):
            found, _ = decode(model, ids[:, at : at + 1], [1], cache)
            assert torch.equal(found, logits[:, at : at + 1])
    assert steps["recorded"] == 3
    assert steps["all"] - steps["unknown"] >= 3 * 17


def test_numbers_that_change_are_given_up_if_they_are_new():
    for numbers, given_up in ((range(20), True), ([1, 2, 3, 4, 5] * 8, False)):
        reasons = []
        replayed = Replayed(lambda x, n: [x + n], [], {0}, repeat, reasons.append)
        for n in numbers:
            assert replayed(torch.ones(1), n)[0] == 1 + n
        assert bool(reasons) is given_up


def test_a_recording_keeps_no_argument_alive():
    """Neither a weight nor a cache, whole or in parts; what counts is where it lies."""
    weight, x = torch.ones(4, 4)[1:], torch.ones(2, 4)
    out = torch.zeros(2, 3)

    def step(x, w):
        return [torch.mm(x, w.t(), out=out) + 0, w[1:].sum(0), torch.cat([w[:1], x]), w + 1]

    replayed, reasons = recorded(step, x, weight)
    assert (reasons, len(replayed._recordings)) == ([], 1)
    weight.fill_(3.0)
    replayed._compiled = pytest.fail
    for given in (weight, torch.from_numpy(weight.numpy())):
        found = replayed(x, given)
        assert [float(y.flatten()[0]) for y in found] == [12.0, 6.0, 3.0, 4.0]
    del given
    alive = weakref.ref(weight)
    del weight
    assert alive() is None


def test_a_cache_is_freed_whose_steps_are_kept(steps):
    model = compiled(layers=1)
    _, cache = decode(model, prompt(1, 46), [40, *[1] * 6])
    assert steps["recorded"] == 1
    alive = [weakref.ref(x) for x in (*cache.layers[0].keys.state, *cache.layers[0].values.state)]
    del cache
    gc.collect()
    assert [x() for x in alive] == [None] * len(alive)


def test_copies_lie_as_the_arguments_do():
    """Columns of a batch of texts have gaps; what repeats elements is not copied."""
    texts, seen = torch.arange(12).view(2, 6), []

    def step(x, n):
        seen.append((x.stride(), x.flatten().tolist()))
        return [x.as_strided((2,), (6,)) * 1]

    replayed = Replayed(step, [], set(), repeat, lambda reason: None)
    for i in range(3):
        assert replayed(texts[:, i : i + 1], 1)[0].tolist() == [i, i + 6]
    assert seen == [((6, 1), [i, i + 6]) for i in range(3)]
    assert replayed._copied == {0}
    assert not replayed._may_be_copied(0, torch.ones(1, 1).expand(1, 3))


def test_arguments_that_move_are_copied_if_they_are_small_and_only_read():
    def step(x, n):
        return [x * 2]

    for size, changed, copies in ((4, set(), {0}), (4, {0}, set()), (2**15, set(), set())):
        replayed = Replayed(step, [], changed, repeat, pytest.fail)
        kept = [torch.full((size,), float(i)) for i in range(4)]
        for x in kept:
            assert torch.equal(replayed(x, 1)[0], x * 2)
        assert replayed._copied == copies


def test_tensors_that_wrap_others_are_known_by_these():
    """As quantized weights are. A copy of a part cannot be given in the place of another one."""
    replayed = Replayed(lambda x: [x.a + x.b], [], set(), repeat, pytest.fail)
    parts = [torch.full((3,), float(i)) for i in range(5)]
    for i in range(4):
        (found,) = replayed(TwoTensor(parts[i], parts[i + 1]))
        assert torch.equal(found, parts[i] + parts[i + 1])
    assert (replayed._copied, len(replayed._recordings)) == (set(), 0)
    for i in range(3):
        parts[3].fill_(float(i))
        (found,) = replayed(TwoTensor(parts[3], parts[4]))
        assert torch.equal(found, parts[3] + parts[4])
        replayed._compiled = pytest.fail if i else replayed._compiled
    assert len(replayed._recordings) == 1


def test_kernels_that_cannot_be_recorded():
    with recording([CompiledModule({}, foreign=True)], []) as recorder:
        pass
    assert recorder.problem == "it has kernels of a kind that is not recorded"
    scope = {"kernel": lambda *args: None}
    module = CompiledModule(scope, False, {"kernel": 1})
    kernel = scope["kernel"]
    with recording([module], []) as recorder:
        scope["kernel"](torch.ones(2), 0.5)
    assert recorder.problem == "a kernel takes other numbers than integers"
    assert scope["kernel"] is kernel
    x = torch.ones(2)
    with recording([module], []) as recorder:
        scope["kernel"](x, 7)
    assert recorder.calls == [Call(1, (x.data_ptr(), 7))]
    with recording([module], []) as recorder:
        scope["kernel"](*range(65))
    assert recorder.problem == "a kernel takes more than 64 arguments"


def test_a_call_that_refuses_ends_the_step():
    loop = Loop([])
    loop()
    loop._function, loop._count = lambda packed: 3, 5
    with pytest.raises(KernelError, match=r"Call 3 of 5 .* has no room; make it with"):
        loop()
