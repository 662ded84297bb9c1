"""`generate` in its modes, against the oracle."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch

from kvpass import PackedKV, recipe
from tests.harness import compiled, graphs_compiled, oracle, run_steps
from tests.models import prompt, tiny_model
from tests.tolerances import LOGITS_CODE_FLIP

KIVI = recipe("kivi-2bit", residual=32)
LENGTH: dict[str, Any] = {"max_new_tokens": 60, "min_new_tokens": 60}


@pytest.mark.parametrize(
    "mode",
    [
        {"do_sample": False},
        {"do_sample": True, "temperature": 1.5},
        {"num_beams": 4, "num_return_sequences": 4, "do_sample": False},
        {"prompt_lookup_num_tokens": 5, "do_sample": False},
    ],
    ids=["greedy", "sampling", "beam", "prompt lookup"],
)
def test_modes_equal_the_oracle(mode: dict[str, Any]) -> None:
    model = tiny_model("llama")
    ids = torch.cat([prompt(1, 40)] * 4, dim=1)
    torch.manual_seed(0)
    wanted = model.generate(ids, past_key_values=oracle(model, KIVI), **LENGTH, **mode)
    torch.manual_seed(0)
    out = compiled(model, KIVI).generate(ids, return_dict_in_generate=True, **LENGTH, **mode)
    assert torch.equal(out.sequences, wanted)
    assert isinstance(out.past_key_values.layers[0].keys, PackedKV)


def test_one_prefill_graph_and_one_decode_graph() -> None:
    """300 tokens cross flushes and a growth of the buffers; nothing recompiles."""
    torch._dynamo.utils.counters.clear()
    twin = compiled(tiny_model("llama"), recipe("kivi-2bit"))
    options: dict[str, Any] = {"max_new_tokens": 300, "min_new_tokens": 300, "do_sample": False}
    out = twin.generate(prompt(1, 230), return_dict_in_generate=True, **options)
    keys = out.past_key_values.layers[0].keys
    assert keys.shape[2] == 529
    assert keys.capacity > 256, "the buffers have grown"
    assert int(keys.segment_ends[0, 0]) == 512, "four flushes"
    assert graphs_compiled() == 2
    twin.generate(prompt(1, 230, seed=1), **options)
    assert graphs_compiled() == 2
    for length in (77, 200, 131):
        twin.generate(prompt(1, length), **{**options, "max_new_tokens": 5, "min_new_tokens": 5})
    assert graphs_compiled() <= 3, "a new prompt length adds at most one"


def test_a_deep_copied_cache_is_independent() -> None:
    twin = compiled(tiny_model("llama"), KIVI)
    ids = prompt(1, 80)
    _, cache = run_steps(twin, ids, [70])
    other = copy.deepcopy(cache)
    first, _ = run_steps(twin, ids[:, 70:], [1] * 10, cache=cache)
    second, _ = run_steps(twin, ids[:, 70:], [1] * 10, cache=other)
    assert torch.equal(first, second)


def test_models_and_caches_interleaved() -> None:
    chosen = [recipe("kivi-2bit", residual=32), recipe("kivi-4bit", residual=16, group=16)]
    models = [tiny_model("llama", seed=1), tiny_model("qwen2", seed=2)]
    twins = [compiled(m, r) for m, r in zip(models, chosen, strict=True)]
    prompts = [prompt(1, 90, seed) for seed in (1, 2)]
    alone = {
        (i, j): run_steps(twins[i], prompts[j], [70] + [1] * 20)[0] for i in (0, 1) for j in (0, 1)
    }
    caches = {key: run_steps(twins[key[0]], prompts[key[1]][:, :70], [70])[1] for key in alone}
    for t in range(70, 90):
        for (i, j), cache in caches.items():
            step, caches[i, j] = run_steps(twins[i], prompts[j][:, t : t + 1], [1], cache=cache)
            assert torch.equal(step[:, 0], alone[i, j][:, t])


def test_two_threads_with_a_model_each() -> None:
    models = [tiny_model("llama", seed=s) for s in (1, 2)]
    ids = prompt(1, 100)
    wanted = [run_steps(m, ids, [70] + [1] * 30, None, oracle(m, KIVI))[0] for m in models]
    twins = [compiled(m, KIVI) for m in models]
    got: dict[int, torch.Tensor] = {}

    def work(i: int) -> None:
        got[i] = run_steps(twins[i], ids, [70] + [1] * 30)[0]

    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in (0, 1):
        assert (got[i] - wanted[i]).abs().max().item() <= LOGITS_CODE_FLIP


def test_torch_compile_called_step_by_step() -> None:
    model = tiny_model("llama")
    ids = prompt(1, 90)
    wanted, _ = run_steps(model, ids, [70] + [1] * 20, None, oracle(model, KIVI))
    twin = torch.compile(model, backend="kvpass", options={"recipe": KIVI, "inner": "eager"})
    got, cache = run_steps(twin, ids, [70] + [1] * 20)
    assert isinstance(cache.layers[0].keys, PackedKV)
    assert (got - wanted).abs().max().item() <= LOGITS_CODE_FLIP


def test_the_eager_fallback_stays_packed_and_warns_once() -> None:
    model = tiny_model("llama")
    twin = compiled(model, KIVI)
    ids = prompt(1, 90)
    wanted, _ = run_steps(model, ids, [70] + [1] * 20, None, oracle(model, KIVI))
    first, cache = run_steps(twin, ids[:, :70], [70])
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.warns(UserWarning, match="decoded a packed") as caught,
    ):
        rest, cache = run_steps(twin, ids[:, 70:], [1] * 20, cache=cache)
    assert isinstance(cache.layers[0].keys, PackedKV)
    assert len([w for w in caught if "decoded a packed cache" in str(w.message)]) == 1
    assert (torch.cat([first, rest], 1) - wanted).abs().max().item() <= LOGITS_CODE_FLIP


def test_inference_mode() -> None:
    model = tiny_model("llama")
    ids = prompt(1, 90)
    wanted, _ = run_steps(model, ids, [70] + [1] * 20, None, oracle(model, KIVI))
    with torch.inference_mode():
        got, _ = run_steps(compiled(model, KIVI), ids, [70] + [1] * 20)
    assert (got - wanted).abs().max().item() <= LOGITS_CODE_FLIP
