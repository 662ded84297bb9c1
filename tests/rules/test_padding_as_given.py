"""Padding of a growing cache, read as the model was given it."""

from __future__ import annotations

from threading import Thread

import pytest
import torch
from transformers import DynamicCache

from kvpass import explain
from kvpass._torch_sizes import Size
from kvpass.errors import CacheStateError
from kvpass.graph.bind.binding import PaddingArgument
from kvpass.runtime import PackedCallable, _check_padding
from tests.harness import left_padding, run_steps
from tests.models import prompt, tiny_model
from tests.tolerances import LOGITS_FP32

TOKENS = 60
LENGTHS = [40, 1, 1, 3, 1, 5, *[1] * 9]


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", layers=2)


@pytest.fixture(scope="module")
def compiled():
    twin = tiny_model("llama", layers=2)
    options = {"recipe": "fp", "inner": "eager", "mode": "reduce-overhead"}
    twin.compile(backend="kvpass", options=options)
    return twin


def masks():
    """Left padding, holes, and the first as booleans."""
    generator = torch.Generator().manual_seed(0)
    left = left_padding([0, 7, 20], TOKENS)
    holes = (torch.rand(3, TOKENS, generator=generator) > 0.3).long()
    # Every query sees something.
    holes[:, 0] = 1
    return {"left": left, "holes": holes, "bools": left.bool()}


@pytest.mark.parametrize("kind", masks())
def test_logits_equal_eager(kind, model, compiled):
    """Steps of one token and of several."""
    mask, ids = masks()[kind], prompt(3, TOKENS)
    wanted, _ = run_steps(model, ids, LENGTHS, mask=mask)
    for _ in range(2):
        got, _ = run_steps(compiled, ids, LENGTHS, mask=mask)
        visible = mask.bool()
        assert (got - wanted)[visible].abs().max() <= LOGITS_FP32
    *_, decode = explain(compiled).graphs
    assert decode.capture_obstacle is None
    events = [e for e in decode.events if e.rule == "padding_as_given"]
    assert len(events) == 2
    assert all(e.fired for e in events)
    names = [n.name for n in decode.bound.graph.find_nodes(op="placeholder")]
    assert sum("padding" in name for name in names) == 1
    assert not any("attention_mask" in name for name in names)


def test_what_is_read_is_in_the_same_memory_at_most_steps(compiled, monkeypatch):
    seen, widened = [], PackedCallable._widened

    def watched(self, position, given):
        wide = widened(self, position, given)
        assert torch.equal(wide[:, : given.shape[1]], given)
        seen.append((self, wide.data_ptr(), tuple(wide.shape)))
        return wide

    monkeypatch.setattr(PackedCallable, "_widened", watched)
    mask = left_padding([9, 0, 0], 300)
    run_steps(compiled, prompt(3, 300), [200, *[1] * 100], mask=mask)
    assert len(seen) == 100
    assert {shape for *_, shape in seen} == {(3, 256), (3, 512)}
    # The same of each graph.
    assert len(set(seen)) == len({(graph, shape) for graph, _, shape in seen}) <= 3


def test_masks_of_too_few_columns(model, compiled):
    """transformers adds some, which show nothing."""
    mask, ids, logits = masks()["left"], prompt(3, TOKENS), []
    for m in (model, compiled):
        _, cache = run_steps(m, ids, [40, 1], mask=mask)
        with torch.no_grad():
            out = m(ids[:, 41:42], attention_mask=mask[:, :41], past_key_values=cache)
        logits.append(out.logits)
    assert (logits[1] - logits[0]).abs().max() <= LOGITS_FP32
    padding = PaddingArgument(0, 1, Size(2))
    _check_padding(padding, [mask[:, :44], out.past_key_values.layers[0].keys])
    with pytest.raises(CacheStateError, match="has 43 columns where the cache holds 44 tokens"):
        _check_padding(padding, [mask[:, :43], out.past_key_values.layers[0].keys])


def test_threads_widen_masks_of_their_own(compiled):
    ids, every = prompt(3, TOKENS), masks()
    wanted = {kind: run_steps(compiled, ids, LENGTHS, mask=every[kind])[0] for kind in every}
    found = {}

    def run(kind):
        found[kind] = run_steps(compiled, ids, LENGTHS, mask=every[kind])[0]

    threads = [Thread(target=run, args=(kind,)) for kind in every]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[kind], wanted[kind]) for kind in every)


def test_without_replays_an_index_for_each_token_stays():
    twin = tiny_model("llama", layers=1)
    twin.compile(backend="kvpass", options={"recipe": "fp", "inner": "eager"})
    run_steps(twin, prompt(3, 42), [40, 1, 1], mask=masks()["left"][:, :42])
    assert not any(e.rule == "padding_as_given" for g in explain(twin).graphs for e in g.events)


@pytest.mark.parametrize("family", ["opt", "mistral"])
def test_a_mask_that_something_else_reads_keeps_its_columns(family):
    """OPT's positions are a sum over it, a sliding layer reads others than the first."""
    plain, ids, mask = tiny_model(family, layers=1), prompt(3, 46), masks()["left"][:, :46]
    lengths = [40, *[1] * 6]
    wanted, _ = run_steps(plain, ids, lengths, mask=mask, cache=DynamicCache(config=plain.config))
    twin = tiny_model(family, layers=1)
    options = {"recipe": "fp", "inner": "eager", "mode": "reduce-overhead"}
    twin.compile(backend="kvpass", options=options)
    got, _ = run_steps(twin, ids, lengths, mask=mask, cache=DynamicCache(config=twin.config))
    assert (got - wanted)[mask.bool()].abs().max() <= LOGITS_FP32
    *_, decode = explain(twin).graphs
    names = [n.name for n in decode.bound.graph.find_nodes(op="placeholder")]
    assert any("attention_mask" in name for name in names)
    assert not any("kvpass_padding" in name for name in names)
