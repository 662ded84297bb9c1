"""Static caches: what models answer, what is held, and what is refused."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from transformers import StaticCache

from kvpass import PackedKV, compile_config, explain, recipe
from kvpass.errors import CacheFullError, CacheStateError
from kvpass.inner import InnerCompiler
from tests.harness import batch_text, compiled, graphs_compiled, oracle, run_steps
from tests.models import prompt, tiny_model
from tests.tolerances import LOGITS_CODE_FLIP, logits

KIVI = recipe("kivi-2bit", group=16, residual=16)
GREEDY = {"max_new_tokens": 30, "do_sample": False}


def static(model: Any, room: int = 150) -> StaticCache:
    return StaticCache(config=model.config, max_cache_len=room)


@pytest.mark.parametrize(
    ("name", "attention", "padded"),
    [("fp", "sdpa", False), ("kivi-2bit", "eager", True)],
)
def test_chats(name: str, attention: str, padded: bool) -> None:
    """A prompt, steps of one and of several tokens, and a further prompt."""
    chosen = KIVI if name != "fp" else recipe("fp")
    steps = [40, 1, 1, 5, 16, 1, 33, 1]
    model = tiny_model("llama", attention=attention, layers=1)
    total = sum(steps)
    ids, mask, visible = batch_text(total, padded, seed=1)
    wanted, _ = run_steps(model, ids, steps, mask, oracle(model, chosen))
    got, cache = run_steps(compiled(model, chosen), ids, steps, mask, static(model))
    for x in (cache.layers[0].keys, cache.layers[0].values):
        assert isinstance(x, PackedKV)
        assert x.shape[2] == 150
        assert not x.decode()[:, :, total:].any(), "what is not written is zero"
    assert (got - wanted)[visible].abs().max().item() <= logits(torch.float32, name)


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_generation_makes_two_graphs_and_no_more(inner: str) -> None:
    model = tiny_model("llama", layers=1)
    ids = prompt(1, 30)
    wanted = model.generate(ids, past_key_values=oracle(model, KIVI), **GREEDY)
    twin = compiled(model, KIVI, inner)
    before = graphs_compiled()
    for _ in range(2):
        got = twin.generate(ids, cache_implementation="static", **GREEDY)
        assert torch.equal(got, wanted)
        assert graphs_compiled() - before == 2


def test_a_reset_cache_starts_again() -> None:
    model = tiny_model("llama", layers=1)
    twin, cache = compiled(model, KIVI), static(model)
    first, second = prompt(1, 30), prompt(1, 35, seed=1)
    twin.generate(first, past_key_values=cache, **GREEDY)
    cache.reset()
    assert cache.layers[0].keys.written == 0
    got = twin.generate(second, past_key_values=cache, **GREEDY)
    wanted = model.generate(second, past_key_values=oracle(model, KIVI), **GREEDY)
    assert torch.equal(got, wanted)
    assert isinstance(cache.layers[0].keys, PackedKV)


def test_a_decode_step_knows_no_length_on_the_host() -> None:
    """No symbol among its inputs, and nothing is read back from the device."""
    twin, cache = compiled(tiny_model("llama", layers=2), KIVI), static(tiny_model("llama"))
    run_steps(twin, prompt(1, 41), [40, 1], cache=cache)
    graph = explain(twin).graphs[-1].bound
    used = [n.meta["example_value"] for n in graph.graph.find_nodes(op="placeholder") if n.users]
    assert all(isinstance(x, torch.Tensor) for x in used)
    assert not any(isinstance(n, torch.SymInt) for x in used for n in x.shape)
    targets = {str(node.target) for node in graph.graph.nodes}
    assert not targets & {"item", "tolist", "_local_scalar_dense"}


def test_a_full_cache_says_so_and_is_left_as_it_was() -> None:
    model = tiny_model("llama", layers=2)
    twin, cache = compiled(model, KIVI), static(model, 40)
    ids = prompt(1, 41)
    run_steps(twin, ids[:, :40], [39, 1], cache=cache)
    before = cache.layers[1].keys.decode()
    with pytest.raises(CacheFullError, match="has room for 40 tokens and holds 40; 1 more do not"):
        run_steps(twin, ids[:, 40:], [1], cache=cache)
    assert int(cache.layers[0].cumulative_length) == 40
    assert torch.equal(cache.layers[1].keys.decode(), before)


def test_counters_cannot_be_set() -> None:
    model = tiny_model("llama", layers=1)
    twin, cache = compiled(model, KIVI), static(model)
    run_steps(twin, prompt(1, 41), [40, 1], cache=cache)
    cache.layers[0].cumulative_length.fill_(20)
    with pytest.raises(CacheStateError, match="counts 20 tokens where 41 are stored"):
        run_steps(twin, prompt(1, 1), [1], cache=cache)


def test_eager_steps_stay_packed() -> None:
    model = tiny_model("llama", layers=1)
    twin, cache = compiled(model, KIVI), static(model)
    ids = prompt(1, 60)
    wanted, _ = run_steps(model, ids, [40] + [1] * 20, None, oracle(model, KIVI))
    run_steps(twin, ids[:, :50], [40] + [1] * 10, cache=cache)
    with torch.compiler.set_stance("force_eager"):
        got, _ = run_steps(twin, ids[:, 50:], [1] * 10, cache=cache)
    assert isinstance(cache.layers[0].keys, PackedKV)
    assert cache.layers[0].keys.written == 60
    assert (got - wanted[:, 50:]).abs().max().item() <= logits(torch.float32, "kivi-2bit")


# On a CPU, too.
CONFIG = compile_config(recipe=KIVI, inner="eager")


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_cache_filled_without_kvpass_is_packed_after_its_first_step(family: str) -> None:
    """generate() compiles only the steps of a static cache by itself, not the prompt."""
    model, ids = tiny_model(family), prompt(1, 30)
    settings = {**GREEDY, "min_new_tokens": 30, "cache_implementation": "static"}
    settings["return_dict_in_generate"] = True
    wanted = model.generate(ids, output_logits=True, **settings)
    got = model.generate(ids, output_logits=True, compile_config=CONFIG, **settings)
    for layer in got.past_key_values.layers:
        assert isinstance(layer.keys, PackedKV)
        assert isinstance(layer.values, PackedKV)
    errors = [(a - b).abs().max().item() for a, b in zip(got.logits, wanted.logits, strict=True)]
    # The prompt and one step as they are, then the packed cache shows.
    assert max(errors[:2]) <= logits(torch.float32, "fp")
    assert max(errors[2:]) > 100 * logits(torch.float32, "fp")
    kinds = [graph.kind for graph in explain(model).graphs]
    assert kinds[:2] == ["plain step", "decode"]


def plain_then_packed(ids: torch.Tensor, recipe: str) -> tuple[Any, Any, Any, torch.Tensor]:
    """A model compiled by kvpass and a static cache that was filled without it, the same for the
    plain model, and the logits of a plain step after it."""
    model = tiny_model("llama", layers=2)
    caches = [static(model), static(model)]
    for cache in caches:
        run_steps(model, ids[:, :-1], [ids.shape[1] - 1], None, cache)
    wanted, _ = run_steps(model, ids[:, -1:], [1], None, caches[0])
    return compiled(model, recipe), caches[1], caches[0], wanted


def test_what_is_packed_are_the_tokens_of_the_plain_buffer() -> None:
    twin, cache, plain, wanted = plain_then_packed(prompt(1, 150), "kivi-4bit")
    got, _ = run_steps(twin, prompt(1, 150)[:, -1:], [1], None, cache)
    assert (got - wanted).abs().max().item() <= logits(torch.float32, "fp")
    # Of the first layer, which no rounding of an attention has reached.
    layer, other = cache.layers[0], plain.layers[0]
    for packed, exact in ((layer.keys, other.keys), (layer.values, other.values)):
        plan = str(packed.plan)
        stored = torch.ops.kvpass.pack(exact[:, :, :150], plan)
        decoded = torch.ops.kvpass.unpack(stored, 150, plan, torch.float32)
        assert packed.written == 150
        assert torch.equal(packed.decode(), decoded)


def test_a_buffer_that_something_else_holds_stays_plain() -> None:
    twin, cache, _, wanted = plain_then_packed(prompt(1, 40), "kivi-4bit")
    held = weakref.ref(cache.layers[0].keys)
    with pytest.warns(UserWarning, match="a static cache's buffer stays plain, in 32 bits"):
        got, _ = run_steps(twin, prompt(1, 40)[:, -1:], [1], None, cache)
    assert (got - wanted).abs().max().item() <= logits(torch.float32, "fp")
    assert held() is cache.layers[0].keys
    assert not isinstance(cache.layers[0].keys, PackedKV)
    assert isinstance(cache.layers[0].values, PackedKV)
    run_steps(twin, prompt(1, 1), [1], None, cache)
    assert cache.layers[0].values.written == 41


def test_a_failed_step_leaves_counters_and_cache_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    armed = [False]
    compile_lowered = InnerCompiler.compile_lowered

    def breaking(self: InnerCompiler, module: Any) -> Any:
        inner, modules = compile_lowered(self, module)

        def call(*args: Any) -> Any:
            results = inner(*args)
            if armed[0]:
                raise RuntimeError("broken")
            return results

        return call, modules

    monkeypatch.setattr(InnerCompiler, "compile_lowered", breaking)
    model = tiny_model("llama", layers=2)
    twin, cache = compiled(model, KIVI), static(model)
    ids = prompt(1, 60)
    wanted, _ = run_steps(model, ids, [40] + [1] * 20, None, oracle(model, KIVI))
    run_steps(twin, ids[:, :45], [40] + [1] * 5, cache=cache)
    armed[0] = True
    with pytest.raises(RuntimeError, match="broken"):
        run_steps(twin, ids[:, 45:46], [1], cache=cache)
    armed[0] = False
    assert int(cache.layers[0].cumulative_length) == cache.layers[0].keys.written == 45
    got, _ = run_steps(twin, ids[:, 45:], [1] * 15, cache=cache)
    assert (got - wanted[:, 45:]).abs().max().item() <= LOGITS_CODE_FLIP


def test_static_windows() -> None:
    """A window of 40 gets full by one token, by several and by a prompt, and slides by each."""
    steps = [20, 1, 5, 16, 1, 33, 1, 3]
    model = tiny_model("mistral", layers=1)
    ids = prompt(1, sum(steps))
    wanted, _ = run_steps(model, ids, steps, None, oracle(model, KIVI))
    twin = compiled(model, KIVI)
    got, cache = run_steps(twin, ids, steps, cache=static(model))
    keys = cache.layers[0].keys
    assert isinstance(keys, PackedKV)
    assert keys.shape[2] == 40
    assert (got - wanted).abs().max().item() <= logits(torch.float32, "kivi-2bit")
    events = [event for graph in explain(twin).graphs for event in graph.events]
    assert all(event.fired for event in events if event.rule == "fuse_attention")


def test_a_mask_that_counts_other_tokens_than_a_window_holds() -> None:
    """Masks are made from a number on the host, which is not the counter on the device."""
    model = tiny_model("mistral", layers=1)
    twin = compiled(model, KIVI)
    _, cache = run_steps(twin, prompt(1, 23), [20, 1, 1, 1], cache=static(model))
    cache.layers[0].cumulative_length_int += 1
    with pytest.raises(CacheStateError, match="counts 24 tokens where 23 are stored"):
        run_steps(twin, prompt(1, 1), [1], cache=cache)


@pytest.mark.parametrize("name", ["fp", "kivi-2bit"])
def test_a_prompt_longer_than_a_static_window(name: str) -> None:
    chosen = KIVI if name != "fp" else recipe("fp")
    model = tiny_model("mistral", layers=1)
    ids, steps = prompt(1, 90), [70] + [1] * 20
    wanted, _ = run_steps(model, ids, steps, None, oracle(model, chosen))
    twin = compiled(model, chosen)
    got, cache = run_steps(twin, ids, steps, cache=static(model))
    keys = cache.layers[0].keys
    assert isinstance(keys, PackedKV)
    assert str(keys.plan).startswith("int2.channel" if name != "fp" else "fp")
    assert (got - wanted).abs().max().item() <= logits(torch.float32, name)
    cache.reset()
    got, cache = run_steps(twin, ids, steps, cache=cache)
    assert isinstance(cache.layers[0].keys, PackedKV)
    assert (got - wanted).abs().max().item() <= logits(torch.float32, name)
