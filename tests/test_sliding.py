"""Models with sliding windows: what they answer, hold, and how often they are compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

from kvpass import PackedKV, recipe
from tests.harness import batch_text, compiled, graphs_compiled, oracle, run_steps
from tests.models import prompt, tiny_model
from tests.tolerances import LOGITS_CODE_FLIP, logits

KIVI = recipe("kivi-2bit", group=16, residual=16)
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "layers": 2}
GREEDY = {"max_new_tokens": 40, "do_sample": False}
OLD = Version(transformers.__version__) < Version("5.18")


@pytest.mark.parametrize(("attention", "padded"), [("sdpa", False), ("eager", True)])
def test_chats_that_pass_the_window(attention: str, padded: bool) -> None:
    """The window of 40 fills up, slides token by token and by more than itself at once."""
    steps = [30, 1, 5, 16, 1, 33, 1, 60, 1]
    model = tiny_model("mistral", attention=attention, layers=1)
    ids, mask, visible = batch_text(sum(steps), padded, seed=1)
    wanted, _ = run_steps(model, ids, steps, mask, oracle(model, KIVI))
    got, cache = run_steps(compiled(model, KIVI), ids, steps, mask)
    keys = cache.layers[0].keys
    assert isinstance(keys, PackedKV)
    assert str(keys.plan) == "int2.channel16/window=0,pack_every=16/window_size=39"
    assert (got - wanted)[visible].abs().max().item() <= logits(torch.float32, "kivi-2bit")


def test_sliding_and_full_layers_in_one_model() -> None:
    model = tiny_model("gemma3_text", **MIXED)
    ids = prompt(1, 150)
    steps = [100] + [1] * 50
    wanted, _ = run_steps(model, ids, steps, None, oracle(model, KIVI))
    got, cache = run_steps(compiled(model, KIVI), ids, steps)
    assert [x.keys.plan.window_size for x in cache.layers] == [39, None]
    assert [x.keys.shape[2] for x in cache.layers] == [39, 150]
    assert (got - wanted).abs().max().item() <= LOGITS_CODE_FLIP


# From 20 tokens on a generation grows into the window, at 70 it is beyond it.
@pytest.mark.parametrize(
    ("length", "options"),
    [(20, {}), (70, {"num_beams": 3}), (70, {"prompt_lookup_num_tokens": 3})],
    ids=str,
)
def test_generation_equals_the_oracles(length: int, options: dict[str, Any]) -> None:
    model = tiny_model("gemma3_text", **MIXED)
    ids = prompt(1, length)
    # Before transformers 5.18 a graph that assists shows nothing of the window, so that what is cut
    # off its cache between steps has to be decoded.
    decoded = "prompt_lookup_num_tokens" in options and OLD
    chosen = recipe("fp") if decoded else KIVI
    wanted = model.generate(ids, past_key_values=oracle(model, chosen), **GREEDY, **options)
    assert torch.equal(compiled(model, chosen).generate(ids, **GREEDY, **options), wanted)


@pytest.mark.parametrize(("length", "graphs"), [(70, 2), (20, 4)], ids=["beyond", "into"])
def test_graphs(length: int, graphs: int) -> None:
    """One for the prompt and one for all steps; transformers branches up to twice where the window
    fills up."""
    twin = compiled(tiny_model("mistral"), KIVI)
    before = graphs_compiled()
    twin.generate(prompt(1, length), **GREEDY)
    assert 2 <= graphs_compiled() - before <= graphs


def test_bytes_do_not_grow_beyond_the_window() -> None:
    """Whole groups leave: 299 tokens in 2 bits, of which up to 31 and 32 are exact, in 32 slots."""
    twin = compiled(tiny_model("mistral", layers=1, sliding_window=300), KIVI)
    _, cache = run_steps(twin, prompt(1, 1200), [1000] + [1] * 200)
    held = [x.nbytes for x in (cache.layers[0].keys, cache.layers[0].values)]
    capacity, heads, dim, slots = 512, 2, 16, 32
    packed = capacity * dim * 2 // 8 + capacity // 16 * dim * 4
    assert held == [heads * (packed + slots * dim * 4) + 8] * 2
