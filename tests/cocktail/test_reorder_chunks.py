"""Models whose prompts have chunks of different bits: compiled equals eager on the oracle's cache,
and no request but the first compiles anything."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest
import torch
from transformers import StaticCache

from kvpass import PackedKV, Plan, explain, oracle_cache, recipe
from kvpass.cocktail import ChunkBits, use
from kvpass.errors import OptionError, PlanError
from kvpass.format.parse import parse_plan
from tests.cocktail.requests import CHUNK, any_bits, plan_of, run_request
from tests.harness import batch_text, compiled, graphs_compiled, oracle, run_steps
from tests.models import prompt, tiny_model
from tests.tolerances import LOGITS_CODE_FLIP, logits

COCKTAIL = recipe("cocktail", chunk=CHUNK)
EXACT = plan_of("fp|fp|fp/chunk=8", "fp|fp|fp/chunk=8")
TABLE = "-0.9,-0.5,-0.3,-0.1,0.05,0.2,0.55,0.95"
OTHERS = plan_of(
    f"nuq3.channel4.codebook{TABLE}|int8.token16|fp/chunk=8",
    "int3.token8.fp8.clip0.92|int8.token16|fp/chunk=8",
)
STEPS = [70] + [1] * 4


def error(model: Any, twin: Any, plan: Any, seed: int, steps: list[int], **more: Any) -> float:
    """The largest difference to the oracle, for a batch of three sequences, padded on the left."""
    ids, mask, visible = batch_text(sum(steps), True, seed=seed)
    bits = any_bits(3, steps[0], seed, plan.default.keys.chunk_bits, **more)
    wanted, _ = run_request(model, ids, steps, bits, mask, oracle_cache(plan, model.config))
    got, cache = run_request(twin, ids, steps, bits, mask)
    assert all(isinstance(t, PackedKV) for x in cache.layers for t in (x.keys, x.values))
    return float((got - wanted)[visible].abs().max())


@pytest.mark.parametrize(
    ("plan", "family", "attention", "dtype"),
    [
        (EXACT, "llama", "sdpa", torch.float32),
        (COCKTAIL, "gpt_neox", "eager", torch.float32),
        (COCKTAIL, "llama", "sdpa", torch.bfloat16),
        (OTHERS, "qwen3", "sdpa", torch.float32),
    ],
    ids=["exact", "gpt_neox", "bf16", "other-codecs"],
)
def test_logits_equal_the_oracles(
    plan: Any, family: str, attention: str, dtype: torch.dtype
) -> None:
    model = tiny_model(family, attention=attention, dtype=dtype, layers=1)
    twin, before = compiled(model, plan), graphs_compiled()
    found = plan.plan(model.config) if plan is COCKTAIL else plan
    errors = [error(model, twin, found, seed, STEPS) for seed in range(6)]
    assert max(errors) <= logits(dtype), errors
    # What any cache compiles here: the prompt, and two decode steps (padded masks).
    assert graphs_compiled() - before == 3


def test_all_chunks_exact_is_the_plain_model() -> None:
    model = tiny_model("llama", layers=1)
    twin = compiled(model, COCKTAIL)
    ids, mask, visible = batch_text(sum(STEPS), True)
    wanted, _ = run_steps(model, ids, STEPS, mask)
    bits = any_bits(3, STEPS[0], 0, (16,))
    got, _ = run_request(twin, ids, STEPS, bits, mask)
    assert (got - wanted)[visible].abs().max().item() <= logits(torch.float32)


def test_requests_compile_nothing() -> None:
    """Of 50 requests of one length, with other texts and bits, in two graphs; then of any."""
    model = tiny_model("llama", layers=1, num_key_value_heads=1)
    twin, plan = compiled(model, COCKTAIL, inner="inductor"), COCKTAIL.plan(model.config)
    sizes, before = set(), graphs_compiled()
    for seed in range(50):
        ids, bits = prompt(1, 403, seed=seed), any_bits(1, 400, seed)
        with torch.no_grad():
            got, cache = run_request(twin, ids, [400, 1, 1, 1], bits)
            if seed % 10 == 0:
                wanted, _ = run_request(
                    model, ids, [400, 1, 1, 1], bits, None, oracle_cache(plan, model.config)
                )
                assert (got - wanted).abs().max().item() <= LOGITS_CODE_FLIP
        sizes.add(
            tuple(t.shape[2] for t in (cache.layers[0].keys.codes0, cache.layers[0].keys.codes))
        )
    assert graphs_compiled() - before == 2
    assert len(sizes) > 2, sizes
    # Nor does a cache whose rows were reordered.
    cache.reorder_cache(torch.tensor([0]))
    run_steps(twin, ids[:, 401:], [1, 1], None, cache)
    assert graphs_compiled() - before == 2
    for seed, length in enumerate((300, 517, 90)):
        run_request(twin, prompt(1, length + 2), [length, 1, 1], any_bits(1, length, seed))
    # The prompt's length is a number of the first graph.
    assert graphs_compiled() - before == 3


def test_chats_and_small_steps() -> None:
    """Prompts with and without bits behind others, and steps of up to 16 tokens."""
    model = tiny_model("llama", layers=1)
    twin, plan = compiled(model, COCKTAIL), COCKTAIL.plan(model.config)
    ids, mask, visible = batch_text(230, True, seed=3)
    assert mask is not None
    turns = [[41, 1, 5], [60, 1, 16, 1], [40, 2], [35, 1, 1]]
    caches: list[Any] = [oracle_cache(plan, model.config), None]
    position = 0
    for number, steps in enumerate(turns):
        end = position + sum(steps)
        bits = any_bits(3, steps[0], number, plan.default.keys.chunk_bits)
        if number == 2:
            # Without bits of its own.
            bits = ChunkBits(((), (), ()), (0, 0, 0), CHUNK)
        outs = []
        for which, which_model in enumerate((model, twin)):
            done, parts = position, []
            with use(bits), torch.no_grad():
                for n in steps:
                    out = which_model(
                        ids[:, done : done + n],
                        attention_mask=mask[:, : done + n],
                        past_key_values=caches[which],
                        use_cache=True,
                    )
                    caches[which] = out.past_key_values
                    parts.append(out.logits)
                    done += n
            outs.append(torch.cat(parts, dim=1))
        difference = (outs[1] - outs[0])[visible[:, position:end]].abs().max().item()
        assert difference <= logits(torch.float32), (number, difference)
        position = end


def test_caches_crop_reorder_and_join() -> None:
    """What generation does to a cache, at every length: rows and tokens are the oracle's."""
    model = tiny_model("llama", layers=1)
    twin, plan = compiled(model, COCKTAIL), COCKTAIL.plan(model.config)
    ids, mask, _ = batch_text(90, True)
    assert mask is not None
    bits = any_bits(3, 60, 7)
    _, theirs = run_request(
        model, ids[:, :63], [60, 3], bits, mask, oracle_cache(plan, model.config)
    )
    _, ours = run_request(twin, ids[:, :63], [60, 3], bits, mask)

    def same(a: Any, b: Any) -> None:
        for x, y in zip(a.layers, b.layers, strict=True):
            for kind in ("keys", "values"):
                got = getattr(x, kind)
                assert isinstance(got, PackedKV)
                assert torch.equal(got.decode(), getattr(y, kind))
                assert torch.equal(
                    got.segment_ends.sum(1), torch.full((got.shape[0],), got.shape[2])
                )

    def both(change: Any) -> list[Any]:
        found = [copy.deepcopy(ours), copy.deepcopy(theirs)]
        for cache in found:
            change(cache)
        same(*found)
        return found

    both(lambda cache: None)
    both(lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])))
    both(lambda cache: cache.batch_repeat_interleave(2))
    both(lambda cache: cache.batch_select_indices(torch.tensor([1, 2])))
    layer = ours.layers[0]
    for tensor in (layer.keys, layer.values):
        other = torch.cat([tensor[:, :, :40], tensor[:, :, :40]])
        assert isinstance(other, PackedKV)
        assert torch.equal(other.decode(), torch.cat([tensor.decode()[:, :, :40]] * 2))
        split = torch.cat([tensor[:1], tensor[1:]])
        assert isinstance(split, PackedKV)
        assert torch.equal(split.decode(), tensor.decode())
        half = tensor.to(torch.bfloat16)
        assert torch.equal(half.decode(), tensor.decode().to(torch.bfloat16))
        assert torch.equal(tensor.clone().zero_().decode(), torch.zeros(tensor.shape))
        tokens = torch.ones(3, 2, 2, 16)
        assert torch.equal(torch.cat([tensor, tokens], 2).decode()[:, :, -2:], tokens)
    for length in (62, 55, 41, 30, 3):
        cut = both(lambda cache, n=length: cache.crop(n - 63))
        more = any_bits(3, 20, length)
        wanted, _ = run_request(model, ids[:, length:], [20, 1], more, None, cut[1])
        got, _ = run_request(twin, ids[:, length:], [20, 1], more, None, cut[0])
        assert (got - wanted).abs().max().item() <= logits(torch.float32), length
        same(*cut)


@pytest.mark.parametrize(
    ("bits", "sentence"),
    [
        (ChunkBits(((2,),), (0,), 8), "those of 1 sequences, the prompt has 2"),
        (
            ChunkBits(((2,), (2,) * 5), (0, 3), 8),
            "Sequence 1 has 5 chunks of 8 tokens from token 3",
        ),
        (ChunkBits(((2,), (3,)), (0, 0), 8), "to have 3 bits; allowed: 2, 4, 16."),
        (
            ChunkBits(((2,), (2,)), (0, 0), 12),
            "chunk=12 is not supported; allowed: a multiple of 8 tokens",
        ),
    ],
)
def test_bits_that_do_not_fit_are_refused(bits: ChunkBits, sentence: str) -> None:
    """Before anything is changed: of a first prompt, and of a later one."""
    model = tiny_model("llama", layers=1)
    twin = compiled(model, COCKTAIL)
    ids = prompt(2, 80)
    with pytest.raises(OptionError, match=re.escape(sentence)):
        run_request(twin, ids[:, :40], [40], bits)
    _, cache = run_request(twin, ids[:, :40], [40], any_bits(2, 40, 0))
    before = cache.layers[0].keys.decode()
    with pytest.raises(OptionError, match=re.escape(sentence)):
        run_request(twin, ids[:, 40:], [40], bits, cache=cache)
    assert torch.equal(cache.layers[0].keys.decode(), before)
    with pytest.raises(OptionError, match=re.escape("bits=2 is not supported")), use(2):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize("new", [3, 40])
def test_a_failed_step_leaves_the_cache_as_it_was(
    new: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvpass.runtime import PackedCallable

    model = tiny_model("llama")
    twin, plan = compiled(model, COCKTAIL), COCKTAIL.plan(model.config)
    ids, bits = prompt(2, 50 + new), any_bits(2, 50, 5)
    _, cache = run_request(twin, ids[:, :50], [50], bits)
    tensors = [t for x in cache.layers for t in (x.keys, x.values)]
    before = [t.decode() for t in tensors]
    original = PackedCallable.__init__

    def failing(self: Any, inner: Any, *args: Any) -> None:
        def run(*flat: Any) -> Any:
            inner(*flat)
            raise InterruptedError

        original(self, run, *args)

    more = any_bits(2, new, 6)
    with monkeypatch.context() as patched:
        torch._dynamo.reset()
        patched.setattr(PackedCallable, "__init__", failing)
        with pytest.raises(InterruptedError):
            run_request(twin, ids[:, 50:], [new], more, cache=cache)
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor.decode(), old)
    torch._dynamo.reset()
    got, _ = run_request(twin, ids[:, 50:], [new], more, cache=cache)
    with use(bits):
        _, theirs = run_steps(model, ids, [50], None, oracle(model, COCKTAIL))
    del plan
    wanted, _ = run_request(model, ids[:, 50:], [new], more, None, theirs)
    assert (got - wanted).abs().max().item() <= LOGITS_CODE_FLIP


def test_a_prompt_without_bits_stays_exact_and_says_so_once() -> None:
    model = tiny_model("llama")
    twin, ids = compiled(model, COCKTAIL), prompt(1, 60)
    wanted, _ = run_steps(model, ids, [50] + [1] * 10)
    with pytest.warns(UserWarning, match=r"kvpass\.cocktail\.use\(bits\)"):
        got, cache = run_steps(twin, ids, [50] + [1] * 10)
    assert (got - wanted).abs().max().item() <= logits(torch.float32)
    assert cache.layers[0].keys.segment_ends[0].tolist() == [0, 0, 60]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run_steps(twin, ids, [50, 1])


def test_generation_with_beams_and_lookup() -> None:
    """Beams reorder the cache; lookup crops it and takes steps of several tokens."""
    model = tiny_model("llama", layers=1)
    twin, ids = compiled(model, COCKTAIL), prompt(1, 60).repeat(1, 2)
    for options, rows in (({"num_beams": 3}, 3), ({"prompt_lookup_num_tokens": 4}, 1)):
        one = any_bits(1, 120, 3)
        bits = ChunkBits(one.bits * rows, one.starts * rows, CHUNK)
        outs = []
        for which, cache in ((model, oracle(model, COCKTAIL)), (twin, None)):
            with use(bits):
                more = {} if cache is None else {"past_key_values": cache}
                outs.append(
                    which.generate(ids, max_new_tokens=12, do_sample=False, **options, **more)
                )
        assert torch.equal(*outs)


def test_layers_with_windows_take_the_middle_level() -> None:
    model = tiny_model("mistral", layers=1)
    plan = COCKTAIL.plan(model.config)
    bits, ids = any_bits(1, 100, 1), prompt(1, 110)
    steps = [100] + [1] * 10
    wanted, _ = run_request(model, ids, steps, bits, None, oracle_cache(plan, model.config))
    got, cache = run_request(compiled(model, COCKTAIL), ids, steps, bits)
    assert (got - wanted).abs().max().item() <= logits(torch.float32)
    assert type(cache.layers[0].keys) is PackedKV


def test_static_caches_are_refused() -> None:
    model = tiny_model("llama", layers=1)
    twin = compiled(model, COCKTAIL)
    cache = StaticCache(config=model.config, max_cache_len=64)
    with pytest.warns(UserWarning, match="A static cache takes no chunks of different bits"):
        got, _ = run_steps(twin, prompt(1, 20), [20], None, cache)
    assert torch.isfinite(got).all()


def test_explain_names_the_rule() -> None:
    twin = compiled(tiny_model("llama"), COCKTAIL)
    _, cache = run_request(twin, prompt(1, 60), [58, 1, 1], any_bits(1, 58, 0))
    shown = explain(twin)
    assert [g.kind for g in shown.graphs] == ["prefill", "decode"]
    assert "reorder_chunks: tokens in the order int2.channel8|int4.channel8|fp/chunk=8" in str(
        shown
    )
    assert 0 < cache.layers[0].keys.bits_per_element < 33


def test_plans(tmp_path: Any) -> None:
    for text in (
        "int2.token16|int2.token16|fp/chunk=8",
        "int2.channel0|fp/chunk=8",
        "int4.token16.outliers2|fp/chunk=8",
        "int4.channel16|fp/chunk=8",
        "int4.token16|fp",
        "fp/chunk=8",
    ):
        with pytest.raises(PlanError):
            plan_of(text, text)
    with pytest.raises(PlanError, match="do not split a prompt into the same chunks"):
        plan_of("int2.token16|fp/chunk=8", "fp").layer_plan("0", 16, 16)
    with pytest.raises(PlanError, match="group 32 does not divide head_dim 48"):
        plan_of("int2.token32|fp/chunk=8", "int2.token32|fp/chunk=8").layer_plan("0", 48, 48)
    with pytest.raises(PlanError, match="no multiple of the group of 32"):
        recipe("cocktail", chunk=48)
    plan = parse_plan(str(COCKTAIL.layer_plan("0", 64, 64).keys))
    assert str(plan) == "int2.channel8|int4.channel8|fp/chunk=8"
    path = tmp_path / "plan.safetensors"
    OTHERS.save(path)
    assert Plan.load(path) == OTHERS
    with pytest.raises(PlanError, match="needs a plan of one codec"):
        torch.ops.kvpass.pack(torch.zeros(1, 1, 8, 64), str(plan))
    for wrong in ({"bits": (4, 2, 16)}, {"bits": (2, 4)}, {"alpha": 2}, {"chunk": 0}):
        with pytest.raises(OptionError):
            recipe("cocktail", **wrong)
