"""What the backend refuses, warns of and survives."""

from __future__ import annotations

import logging
import warnings
from typing import Any
from uuid import uuid4

import pytest
import torch
from accelerate import dispatch_model
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import exc
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

import kvpass
import kvpass.inner
import kvpass.rules
from kvpass import PackedKV, explain, recipe
from kvpass._torch_inductor import inductor
from kvpass.errors import OptionError, PlanError, StaleHandleError, UnmatchedGraphError
from kvpass.inner import InnerCompiler
from kvpass.inspect import notices
from tests.harness import compiled, oracle, run_steps
from tests.models import prompt, tiny_model
from tests.tolerances import LOGITS_CODE_FLIP

KIVI = recipe("kivi-2bit", residual=32)


def bad(**options: Any) -> Any:
    twin = tiny_model("llama")
    twin.compile(backend="kvpass", options={"inner": "eager", **options})
    return run_steps(twin, prompt(1, 8), [8])


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        (
            {"recipe": "kivi2bit"},
            OptionError,
            "Unknown recipe 'kivi2bit'. Did you mean 'kivi-2bit'",
        ),
        ({"bit": 2}, OptionError, "Unknown option 'bit'. Did you mean 'bits' or 'key_bits'?"),
        ({"bits": 5}, OptionError, "bits=5 is not supported; allowed: 2, 4, 8"),
        ({"inner": "tvm"}, OptionError, "Unknown inner compiler 'tvm'."),
        ({"strict": 1}, OptionError, "strict=1 is not supported; allowed: True, False."),
        ({"group": 48}, PlanError, "does not divide the residual of 128 tokens"),
        ({"group": 64}, PlanError, "group 64 spans 4 heads of 16, which 2 do not fill"),
    ],
)
def test_bad_options_are_one_sentence(
    options: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error) as caught:
        bad(**options)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value).split("\n\nSet TORCHDYNAMO_VERBOSE")[0].strip()


def test_a_bad_option_loses_nothing() -> None:
    twin = compiled(tiny_model("llama"), KIVI)
    ids = prompt(1, 41)
    _, cache = run_steps(twin, ids, [40])
    other = compiled(tiny_model("llama"), "no such recipe")
    with pytest.raises(OptionError):
        run_steps(other, ids[:, 40:], [1], cache=cache)
    assert cache.layers[0].keys.shape[2] == 40
    run_steps(twin, ids[:, 40:], [1], cache=cache)


class AllButTheFirst(DynamicLayer):
    """Keeps a part of its tokens that kvpass does not know."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(*args, **kwargs)
        self.keys, self.values = keys[:, :, 1:], values[:, :, 1:]
        return keys, values


def odd_cache(model: Any) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    cache.layers = [AllButTheFirst() for _ in cache.layers]
    return cache


def test_an_unmatched_graph_runs_unchanged_and_says_so() -> None:
    model = tiny_model("llama")
    ids = prompt(1, 40)
    wanted, _ = run_steps(model, ids, [30] + [1] * 10, cache=odd_cache(model))
    twin = compiled(model, KIVI)
    got, cache = run_steps(twin, ids, [30] + [1] * 10, cache=odd_cache(model))
    assert not isinstance(cache.layers[0].keys, PackedKV)
    assert (got - wanted).abs().max().item() <= LOGITS_CODE_FLIP
    assert "runs unchanged" in str(explain(twin))


def test_strict_raises_where_a_graph_cannot_be_rewritten() -> None:
    twin = compiled(tiny_model("llama"), KIVI, strict=True)
    with pytest.raises(UnmatchedGraphError, match="strict is set"):
        run_steps(twin, prompt(1, 30), [30], cache=odd_cache(twin))


def test_gradients_refuse_packing() -> None:
    twin = compiled(tiny_model("llama"), KIVI)
    ids = prompt(1, 20)
    with pytest.warns(UserWarning, match="gradients are enabled"):
        out = twin(ids, use_cache=True, labels=ids)
    assert not isinstance(out.past_key_values.layers[0].keys, PackedKV)
    out.loss.backward()
    assert twin.model.layers[0].self_attn.k_proj.weight.grad is not None


def test_a_stale_handle_raises_and_a_clone_lives_on() -> None:
    twin = compiled(tiny_model("llama"), KIVI)
    ids = prompt(1, 50)
    _, cache = run_steps(twin, ids[:, :40], [40])
    kept = [(layer.keys, layer.values) for layer in cache.layers]
    old, copy = kept[0][0], kept[0][0].clone()
    before = copy.decode()
    run_steps(twin, ids[:, 40:], [1] * 10, cache=cache)
    with pytest.raises(StaleHandleError, match="40 tokens is stale"):
        old.decode()
    assert torch.equal(copy.decode(), before)
    for layer, (keys, values) in zip(cache.layers, kept, strict=True):
        layer.keys, layer.values = keys, values
    with pytest.raises(StaleHandleError):
        run_steps(twin, ids[:, :1], [1], cache=cache)


class BrokenError(Exception):
    pass


@pytest.mark.parametrize(
    ("family", "name", "step"),
    [
        ("llama", "fp", 40),
        ("llama", "kivi-2bit", 1),
        ("llama", "kivi-2bit", 40),
        ("mistral", "fp", 1),
        ("mistral", "kivi-2bit", 16),
    ],
)
def test_a_failed_step_leaves_the_cache_as_it_was(
    family: str, name: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inner graph breaks after some layers have been extended; a retry answers as if not.

    In the ring of a sliding window new tokens take the place of old ones.
    """
    chosen = KIVI if name != "fp" else recipe("fp")
    armed = [False]
    compile_lowered = InnerCompiler.compile_lowered

    class Interrupted(torch.fx.Interpreter):
        appended = 0

        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if "append" in str(target):
                self.appended += 1
                if armed[0] and self.appended == 4:
                    raise BrokenError
            return super().call_function(target, args, kwargs)

    def breaking(self: InnerCompiler, module: Any) -> Any:
        _, modules = compile_lowered(self, module)
        return lambda *args: Interrupted(module).run(*args), modules

    monkeypatch.setattr(InnerCompiler, "compile_lowered", breaking)
    model = tiny_model(family)
    twin = compiled(model, chosen)
    steps = [64, 1, 1, step, 1]
    ids = prompt(1, sum(steps))
    wanted, _ = run_steps(model, ids, steps, None, oracle(model, chosen))
    _, cache = run_steps(twin, ids[:, :66], steps[:3])
    armed[0] = True
    with pytest.raises(BrokenError):
        run_steps(twin, ids[:, 66 : 66 + step], [step], cache=cache)
    armed[0] = False
    got, _ = run_steps(twin, ids[:, 66:], steps[3:], cache=cache)
    assert (got - wanted[:, 66:]).abs().max().item() <= LOGITS_CODE_FLIP


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (exc.InvalidCxxCompiler(), "no C\\+\\+ compiler was found"),
        (exc.InductorError(exc.CppCompileError(["g++"], ""), None), "refuses generated code"),
    ],
)
def test_without_a_compiler_the_graph_runs_with_aten(
    monkeypatch: pytest.MonkeyPatch, error: Exception, problem: str
) -> None:
    def missing(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(kvpass.inner, "inductor", missing)
    model = tiny_model("llama")
    ids = prompt(1, 50)
    wanted, _ = run_steps(model, ids, [40] + [1] * 10, None, oracle(model, KIVI))
    with pytest.warns(UserWarning, match=problem):
        got, _ = run_steps(compiled(model, KIVI, inner="inductor"), ids, [40] + [1] * 10)
    assert (got - wanted).abs().max().item() <= LOGITS_CODE_FLIP


def test_other_kernels_are_another_graph_to_inductors_caches() -> None:
    """Its caches know a graph by its ops, whose Triton kernels are part of what they keep."""

    def misses(tag: str) -> int:
        torch._dynamo.reset()
        before = counters["aot_autograd"]["autograd_cache_miss"]

        def backend(module: Any, examples: Any) -> Any:
            with inductor(None, tag) as compile_one:
                return compile_one(module, list(examples))

        torch.compile(lambda x: x.sin(), backend=backend)(torch.ones(2))
        return int(counters["aot_autograd"]["autograd_cache_miss"] - before)

    one, two = uuid4().hex, uuid4().hex
    assert [misses(tag) for tag in (one, one, two)] == [1, 0, 1]


def test_multi_query_attention_is_advised_to_use_four_bits() -> None:
    twin = compiled(tiny_model("falcon"), "kivi-2bit")
    with pytest.warns(UserWarning, match="KIVI advises 4 bits"):
        run_steps(twin, prompt(1, 20), [20])


def test_a_plan_is_accepted_and_a_filled_cache_keeps_its_own() -> None:
    model = tiny_model("llama")
    ids = prompt(1, 60)
    plan = KIVI.plan(model.config)
    _, cache = run_steps(compiled(model, plan), ids, [40])
    _, cache = run_steps(compiled(model, "fp"), ids[:, 40:], [1] * 20, cache=cache)
    assert cache.layers[0].keys.plan == plan.default.keys


def test_explain_before_any_call() -> None:
    twin = compiled(tiny_model("llama"), KIVI)
    assert "has compiled no graph" in str(explain(twin))


def test_explain_shows_graphs_and_saves_them(tmp_path: Any) -> None:
    twin = compiled(tiny_model("llama"), KIVI)
    _, cache = run_steps(twin, prompt(1, 50), [40] + [1] * 10)
    shown = explain(twin)
    assert [g.kind for g in shown.graphs] == ["prefill", "decode"]
    text = str(shown)
    for part in (
        "quantize_cache",
        "fuse_attention",
        "int2.channel32",
        "attention: cpp",
        "50 tokens",
    ):
        assert part in text
    assert "kvpass_ops_logical_attention" in shown.graphs[1].after.print_readable(
        print_output=False
    )
    assert "logical" not in shown.graphs[1].before.print_readable(print_output=False)
    names = {path.name for path in shown.save(tmp_path)}
    assert "explain.txt" in names
    assert any(name.endswith("_after.py") for name in names)
    del cache


def test_silent_decompression_is_told() -> None:
    """The decode graph's attention is unknown: the cache goes back to plain, with a warning."""
    model = tiny_model("llama")
    twin = compiled(model, KIVI)
    ids = prompt(1, 50)
    _, cache = run_steps(twin, ids[:, :40], [40])
    rules = kvpass.rules.RULES
    saved = list(rules)
    try:
        rules[:] = []
        torch._dynamo.reset()
        with pytest.warns(UserWarning, match="goes back to 32 bits"):
            run_steps(twin, ids[:, 40:41], [1], cache=cache)
    finally:
        rules[:] = saved
    assert not isinstance(cache.layers[0].keys, PackedKV)


def test_hooks_of_accelerate_are_named() -> None:
    """As `device_map` puts them before every module, though with one device it does not."""
    twin = tiny_model("llama")
    parts = ("model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb", "lm_head")
    twin = dispatch_model(twin, dict.fromkeys(parts, "cpu"), "cpu", force_hooks=True)
    twin.compile(backend="kvpass", options={"inner": "eager"})
    with pytest.warns(UserWarning, match=r"accelerate's hooks.* nothing is packed"):
        got, _ = run_steps(twin, prompt(1, 8), [8])
    assert torch.equal(got, run_steps(tiny_model("llama"), prompt(1, 8), [8])[0])
    assert "accelerate's hooks" in str(explain(twin))


def test_no_warning_when_everything_fits() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run_steps(compiled(tiny_model("llama"), KIVI), prompt(1, 50), [40] + [1] * 10)


def test_the_log_shows_what_was_done_and_the_graph() -> None:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("kvpass")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        run_steps(compiled(tiny_model("llama"), KIVI), prompt(1, 50), [40])
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert any("quantize_cache: keys int2" in m and "class GraphModule" in m for m in messages)


def test_graphs_are_trace_artifacts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}
    monkeypatch.setattr(notices, "trace_artifact", lambda name, text: seen.update({name: text()}))
    run_steps(compiled(tiny_model("llama"), KIVI), prompt(1, 50), [40])
    assert [name.rsplit("_", 1)[1] for name in seen] == ["before", "after", "bound"]
    assert all("def forward" in text for text in seen.values())
