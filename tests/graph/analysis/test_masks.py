"""Masks read as bounds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import StaticCache

from kvpass._torch_sizes import symbol_positions
from kvpass.graph.analysis.masks import Bounds, Masks
from kvpass.graph.pattern import Miss
from tests.graph.captured import Captured, conditions, function_of, inputs
from tests.models import prompt, tiny_model

LOW = torch.finfo(torch.float32).min


def bounds_of(captured: Captured) -> Bounds | Miss:
    mask, q, *positions = captured.results
    return Masks(captured.graph).bounds(mask, q, *positions)


def visible(captured: Captured, bounds: Bounds) -> torch.Tensor:
    """What attention with the bounds, and with the rest as its mask, sees."""
    values = captured.values()
    mask, q, *positions = (values[node] for node in captured.results)
    n = q.shape[2]
    length = int(positions[0][-1]) + 1 if positions else mask.shape[-1]
    k, i = torch.arange(length), torch.arange(length - n, length)[:, None]
    seen = torch.ones(n, length, dtype=torch.bool)
    if bounds.causal:
        seen &= k <= i
    if bounds.window:
        seen &= k > i - bounds.window
    for node, negated in bounds.rest:
        seen = seen & (values[node][..., :length] != negated)
    return seen.expand(*mask.shape[:3], length)


def check(captured: Captured) -> Bounds | Miss:
    """Bounds that are found say what the mask does."""
    bounds = bounds_of(captured)
    if isinstance(bounds, Bounds):
        seen, mask = visible(captured, bounds), captured.values()[captured.results[0]]
        hidden = mask[..., : seen.shape[-1]] if mask.dtype == torch.bool else mask == 0
        assert torch.equal(seen, hidden)
        if mask.dtype != torch.bool and torch.isfinite(mask).all():
            assert seen.any(-1).all()
    return bounds


SIZES = (st.booleans(), st.integers(1, 3), st.integers(1, 4), st.integers(2, 9))
WRAPPERS = [
    "{}",
    "torch.where({}, 0.0, torch.finfo(torch.float32).min)",
    "torch.where(~{}, -torch.inf, torch.zeros(()))",
    "torch.zeros(()).masked_fill(~{}, torch.finfo(torch.float32).min)",
]


@settings(max_examples=30)
@given(conditions(), st.sampled_from(WRAPPERS), *SIZES)
def test_bounds_are_the_mask(condition, wrapper, dynamic, batch, n, past):
    mask = wrapper.format(f"{condition}.expand(pad.shape[0], 1, n, L)")
    captured = Captured(function_of(returns=f"{mask}, q + 0"), dynamic)
    for more in (0, 3):
        check(captured(*inputs(batch, n, past + more)))


_ROWS = ["torch.arange(pad.shape[0])", "0 * torch.arange(pad.shape[0])"]
_COLUMNS = ["torch.arange(L)", "torch.arange(L) + 0", "L - 1 - torch.arange(L)",
            "torch.arange(n, L + n) % L", "(torch.arange(L) - 1).clamp(0)"]  # fmt: skip


@settings(max_examples=25)
@given(st.sampled_from(_ROWS), st.sampled_from(_COLUMNS), *SIZES)
def test_padding_is_the_mask(rows, columns, dynamic, batch, n, past):
    """What is looked up at its own place only."""
    index = f"({rows})[:, None, None, None], ({columns})[None, None, None, :]"
    captured = Captured(function_of(returns=f"pad[{index}], q + 0"), dynamic)
    for more in (0, 3):
        captured(*inputs(batch, n, past + more))
        mask, values = captured.results[0], captured.values()
        found = Masks(captured.graph).padding(mask)
        if found is not None:
            seen = values[found][:, None, None, : values[mask].shape[-1]]
            assert torch.equal(seen, values[mask])
        plain = (rows == _ROWS[0] or batch == 1) and columns in _COLUMNS[:2]
        assert (found is not None) == plain


_POSITIONS = ["k = torch.arange(32)", "i = (torch.arange(n) + c)[:, None]"]
_INDICES = ["k = torch.arange(L)", "i = (torch.arange(n) + (L - n))[:, None]"]


@given(
    st.sampled_from(["<=", "<", ">=", "=="]),
    st.integers(-1, 1),
    st.sampled_from(["", " & (k > i - 4)", " & (k > i - c)", " | (k == 7)", " & (k != 1)"]),
    st.booleans(),
    st.integers(1, 4),
    st.integers(2, 9),
)
def test_bounds_of_a_static_cache_are_the_mask(operator, shift, more, padded, n, past):
    condition = f"((k {operator} i + {shift}){more})[None, None]"
    condition += " & torch.nn.functional.pad(pad, (0, 32 - L))[:, None, None, :]" * padded
    mask = f"({condition}).expand(pad.shape[0], 1, n, 32)"
    function = function_of(*_POSITIONS, returns=f"{mask}, q + 0, torch.arange(n) + c")
    captured = Captured(function)(*inputs(2, n, past))
    check(captured)
    mask, _, positions = captured.results
    if Masks(mask.graph).hides_unwritten(mask, positions):
        assert not captured.values()[mask][..., past + n :].any()
    exact = operator == "<=" and shift == 0 and more in ("", " & (k > i - 4)")
    if exact and n > 1:
        assert bounds_of(captured).causal
        assert Masks(mask.graph).hides_unwritten(mask, positions)


KNOWN = {
    "causal": ("k <= i", (True, 0, 0)),
    "rotated": ("i >= k", (True, 0, 0)),
    "strict": ("k < i + 1", (True, 0, 0)),
    "hidden": ("~(k > i)", (True, 0, 0)),
    "difference": ("i - k >= 0", (True, 0, 0)),
    "triangle": ("torch.ones(n, L).tril(L - n).bool()", (True, 0, 0)),
    "window": ("(k <= i) & (k > i - 4)", (True, 4, 0)),
    "last": ("(k <= i) & (k >= i - 4)", (True, 5, 0)),
    "itself": ("k == i", (True, 1, 0)),
    "windows": ("(k > i - 4) & (k > i - 3)", (False, 3, 0)),
    "everything": ("k >= 0", (False, 0, 0)),
    "padding": ("(k <= i) & pad[:, None, None, :]", (True, 0, 1)),
    "hidden padding": ("~((k > i) | ~pad[:, None, None, :])", (True, 0, 1)),
    "data": ("(k <= i) & data", (True, 0, 1)),
    "neither": ("(k <= i) & pad[:, None, None, :] & (k != 2)", (True, 0, 2)),
    "beside": ("(k <= i) & (k <= i + 1) & (k < L)", (True, 0, 1)),
}


@pytest.mark.parametrize(("source", "expected"), KNOWN.values(), ids=KNOWN)
@pytest.mark.parametrize("dynamic", [False, True])
def test_masks_that_are_understood(source, expected, dynamic):
    mask = f"({source}).expand(pad.shape[0], 1, n, L)"
    captured = Captured(function_of(*_INDICES, returns=f"{mask}, q + 0"), dynamic)
    bounds = check(captured(*inputs(2, 3, 5)))
    assert (bounds.causal, bounds.window, len(bounds.rest)) == expected


SINGLE = {"causal": "k <= i", "window": "(k <= i) & (k > i - L)", "itself": "k >= 0"}


@pytest.mark.parametrize("source", SINGLE.values(), ids=SINGLE)
def test_one_query_sees_all_that_is_not_after_it(source):
    mask = f"({source}).expand(pad.shape[0], 1, n, L)"
    captured = Captured(function_of(*_INDICES, returns=f"{mask}, q + 0"), True)
    assert check(captured(*inputs(2, 1, 5))) == Bounds(False, 0, ())


NOT_KNOWN = {
    "one more": ("k <= i + 1", "le is data, or no bound"),
    "one less": ("k < i", "lt is data, or no bound"),
    "after": ("k >= i + 1", "ge is data, or no bound"),
    "top left": ("k <= i - (L - n)", "le is data, or no bound"),
    "either": ("(k <= i) | (k == 0)", "or_ is data, or no bound"),
    "data": ("data", "expand is data, or no bound"),
    "no window": ("k > i - c", "gt is data, or no bound"),
    "chunks": ("(k // 4) == (i // 4)", "eq is data, or no bound"),
    "one column": ("(k <= i)[:, :1]", "the mask has one column for all tokens"),
    "written to": ("(k <= i).clone().logical_or_(pad[:1])", "the mask is written to in place"),
    "by number": ("torch.where(k <= i, 0.0, -1.0)", "other values than 0 and the smallest"),
    "not 0": (f"torch.where(k <= i, 1.0, {LOW})", "other values than 0 and the smallest"),
    "integers": ("torch.where(k <= i, 0, -999)", "the mask is torch.int64"),
    "slopes": ("torch.where(k <= i, 0.0, -torch.inf) + data", "mask comes from add"),
    "padding": (f"torch.where((k <= i) & data, 0.0, {LOW})", "may hide all tokens of a query"),
}


@pytest.mark.parametrize(("source", "reason"), NOT_KNOWN.values(), ids=NOT_KNOWN)
@pytest.mark.parametrize("dynamic", [False, True])
def test_masks_that_stay_tensors(source, reason, dynamic):
    expand = "" if "one column" in reason or "in place" in reason else ".expand(2, 1, n, L)"
    captured = Captured(function_of(*_INDICES, returns=f"({source}){expand}, q + 0"), dynamic)
    miss = check(captured(*inputs(2, 3, 5)))
    assert isinstance(miss, Miss)
    assert reason in str(miss) or reason.startswith("expand")


WRITES = {
    "before": ("m[..., 0] = True", "m & pad[:, None, None, :]"),
    "after": ("", "(m & pad[:, None, None, :], m.zero_())[0]"),
    "padding": ("p = pad.clone()", "(m & p[:, None, None, :], p.zero_())[0]"),
    "argument": ("", "(m & data, data.logical_not_())[0]"),
    "out": ("", "(m & data, torch.logical_not(data, out=data))[0]"),
}


@pytest.mark.parametrize(("line", "mask"), WRITES.values(), ids=WRITES)
def test_masks_that_are_written_to(line, mask):
    lines = [*_INDICES, "m = (k <= i).expand(pad.shape[0], 1, n, L).clone()", line or "pass"]
    captured = Captured(function_of(*lines, returns=f"{mask}, q + 0"))(*inputs(2, 3, 5))
    assert "written to in place" in str(check(captured))


def test_positions_that_are_not_in_a_row():
    for positions in ("torch.arange(n) * 2 + c", "torch.arange(n) + past.shape[2] * c + pad.sum()"):
        function = function_of(
            *_POSITIONS, returns=f"(k <= i).expand(2, 1, n, 32), q + 0, {positions}"
        )
        captured = Captured(function)(*inputs(2, 3, 5))
        mask, _, at = captured.results
        assert isinstance(bounds_of(captured), Miss)
        assert not Masks(mask.graph).hides_unwritten(mask, at)


def static_graphs(padded: bool, steps: list[int], attention: str):
    """The captured graphs of a model with a static cache."""
    model, graphs = tiny_model("llama", layers=2, attention=attention), []

    def backend(module, _):
        graphs.append(module.graph)
        return module

    model.compile(backend=backend)
    cache, ids, at = StaticCache(config=model.config, max_cache_len=32), prompt(2, 30), 0
    with torch.no_grad():
        for n in steps:
            mask = torch.ones(2, at + n, dtype=torch.long) if padded else None
            model(ids[:, at : at + n], attention_mask=mask, past_key_values=cache)
            at += n
    return graphs


@pytest.mark.parametrize(("attention", "padded"), [("sdpa", True), ("eager", False)])
def test_static_caches_hide_what_is_not_written(attention, padded):
    _, one, several = static_graphs(padded, [8, 1, 3], attention)
    for graph, n in ((one, 1), (several, 3)):
        positions = [node.args[2] for node in graph.nodes if node.target == "index_copy_"]
        assert len(positions) == 4
        (mask,) = {node.kwargs.get("attn_mask") for node in graph.nodes} - {None} or {
            *graph.find_nodes(op="call_function", target=torch.where)
        }
        q = next(node for node in graph.nodes if node.name.startswith("q_embed"))
        analysis = Masks(graph)
        for at in positions:
            assert analysis.hides_unwritten(mask, at)
            bounds = analysis.bounds(mask, q, at)
            assert (bounds.causal, bounds.window, len(bounds.rest)) == (n > 1, 0, padded)


@pytest.mark.parametrize(("low", "hides"), [(LOW, False), ("-torch.inf", True)])
def test_the_smallest_number_hides_nothing_from_a_query_that_sees_no_token(low, hides):
    for condition, blind in (("(k <= i)", False), ("(k <= i) & data[..., :1]", True)):
        mask = f"torch.where({condition}, 0.0, {low}).expand(2, 1, n, 32)"
        function = function_of(*_POSITIONS, returns=f"{mask}, q + 0, torch.arange(n) + c")
        mask, _, positions = Captured(function)(*inputs(2, 3, 5)).results
        assert Masks(mask.graph).hides_unwritten(mask, positions) is (hides or not blind)


def test_a_number_that_was_added_to_in_between():
    function = function_of(
        *_POSITIONS, "c.add_(n)", returns="(k <= i)[None, None], q + 0, torch.arange(n) + c"
    )
    captured = Captured(function)(*inputs(2, 3, 5))
    mask, _, positions = captured.results
    assert isinstance(bounds_of(captured), Miss)
    # It hides even more.
    assert Masks(mask.graph).hides_unwritten(mask, positions)


@pytest.mark.parametrize(("more", "same"), [(3, True), (4, False)])
def test_layers_count_alike_if_the_same_is_added_to_each(more, same):
    def step(q, cache):
        first, second = (layer.cumulative_length for layer in cache.layers)
        mask = torch.arange(32) <= (torch.arange(3) + first)[:, None]
        first.add_(3)
        positions = torch.arange(3) + second
        second.add_(more)
        return mask[None, None], q + 0, positions

    layers = [SimpleNamespace(cumulative_length=torch.tensor(5)) for _ in range(2)]
    captured = Captured(step)(torch.zeros(1, 1, 3, 4), SimpleNamespace(layers=layers))
    assert isinstance(bounds_of(captured), Bounds) is same
    assert Masks(captured.graph).hides_unwritten(captured.results[0], captured.results[2]) is same


@pytest.mark.parametrize(
    ("shown", "hides"),
    [
        (lambda k, own: k <= own, True),
        (lambda k, own: k <= own + 1, False),
        (lambda k, own: k < own, False),
        (lambda k, own: k + own < 99, False),
    ],
)
def test_a_number_on_the_host_that_is_taken_for_what_is_written(shown, hides):
    """Only a number by which each query sees itself, and nothing behind the last one."""

    def step(q, c, at):
        mask = shown(torch.arange(32), at + torch.arange(3)[:, None])
        return mask.expand(1, 1, 3, 32), q + 0, torch.arange(3) + c

    captured = Captured(step)
    for at in (5, 7):
        captured(torch.zeros(1, 1, 3, 4), torch.tensor(at), at)
    mask, _, positions = captured.results
    (symbol,) = symbol_positions(captured.graph)
    assert not Masks(mask.graph).hides_unwritten(mask, positions)
    assert Masks(captured.graph).hides_unwritten(mask, positions, symbol) is hides
