"""The page of `explain`: what it shows, and that it is sound HTML that loads nothing."""

from __future__ import annotations

import re
from html import escape
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from kvpass import TensorPlan, explain, recipe
from kvpass.errors import OptionError
from kvpass.format.parse import parse_plan
from kvpass.inspect import page
from kvpass.inspect.cells import model_cells
from kvpass.inspect.chart import cache_points, chart, packed_bytes, readable
from kvpass.inspect.explain import Explanation
from kvpass.inspect.site_diff import short_name, site_diffs
from kvpass.rules import Event
from tests.harness import compiled, run_steps
from tests.models import prompt, tiny_model

KIVI = recipe("kivi-2bit", group=16, residual=16)
LAYERS = 3
VOID = {"meta", "link", "br"}


@pytest.fixture(scope="module")
def packed():
    twin = compiled(tiny_model("llama", layers=LAYERS), KIVI)
    _, cache = run_steps(twin, prompt(1, 42), [40, 1, 1])
    yield explain(twin)
    del cache


class AllButTheFirst(DynamicLayer):
    def update(self, *args, **kwargs):
        keys, values = super().update(*args, **kwargs)
        self.keys, self.values = keys[:, :, 1:], values[:, :, 1:]
        return keys, values


@pytest.fixture(scope="module")
def refused():
    twin = compiled(tiny_model("llama"), KIVI)
    cache = DynamicCache(config=twin.config)
    cache.layers = [AllButTheFirst() for _ in cache.layers]
    with pytest.warns(UserWarning, match="refused"):
        run_steps(twin, prompt(1, 30), [30], cache=cache)
    return explain(twin)


class Parsed(HTMLParser):
    """Text, ids and addresses of a page whose tags are balanced."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.addresses, self.text = [], [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        self._note(attrs)

    def handle_startendtag(self, tag, attrs):
        self._note(attrs)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data):
        self.text += data

    def _note(self, attrs):
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            elif name in ("src", "href", "action", "xlink:href", "srcset"):
                self.addresses.append(value)


@pytest.mark.parametrize("name", ["packed", "refused"])
def test_it_is_sound_and_loads_nothing(name, request):
    html = request.getfixturevalue(name).html()
    parsed = Parsed(html)
    assert len(parsed.ids) == len(set(parsed.ids))
    for address in parsed.addresses:
        assert address == "data:," or (address[0] == "#" and address[1:] in parsed.ids), address
    style = html[: html.index("</style>")]
    assert not re.search(r"url\(|@import", style)
    assert len(html) < 1 << 20


def test_it_shows_every_layer_rule_and_kernel(packed):
    text = " ".join(Parsed(packed.html()).text.split())
    for i in range(LAYERS):
        assert f"model.layers.{i}.self_attn" in text
    for report in packed.graphs:
        for event in report.events:
            assert event.rule in text
            assert event.detail in text
        for choice in report.choices:
            assert f"kvpass::{choice.op}" in text
    for kernel in page.recent_files(packed.graphs)[0]:
        assert kernel.name in text
    assert "42 tokens" in text
    assert "layers 0 ... 2" in text
    assert "Computed from the plans above, not measured" in text


def test_it_shows_what_is_refused_and_why(refused):
    html = refused.html()
    text = " ".join(Parsed(html).text.split())
    events = refused.graphs[0].events
    assert len(events) == 4
    for event in events:
        assert event.detail in text
    assert html.count('class="cell refused"') == len(events) + 1  # and the legend
    assert refused.graphs[0].warnings[0] in text


def test_a_saved_page_is_the_same(packed, tmp_path):
    path = packed.save_html(tmp_path / "new" / "page.html")
    assert path.read_text(encoding="utf-8") == packed.html()
    with pytest.raises(OptionError, match="is a folder"):
        packed.save_html(tmp_path)


def test_texts_are_escaped(refused):
    report = refused.graphs[0]
    strange = Event("<i>rule", report.events[0].node, "layers.<0>", False, "a & b < c", True)
    events = report.events
    report.events = [*events, strange]
    try:
        html = Explanation("<script>Model", (report,)).html()
    finally:
        report.events = events
    assert "<i>rule" not in html
    assert "<script>Model" not in html
    for text in (strange.rule, strange.path, strange.detail, "<script>Model"):
        assert escape(text) in html
    Parsed(html)


def test_a_model_without_graphs():
    html = explain(torch.nn.Linear(2, 2)).html()
    assert "has compiled no graph of Linear" in Parsed(html).text


def test_events_name_the_nodes_of_both_graphs(packed):
    decode = packed.graphs[1]
    before, after = ({n.name for n in g.graph.nodes} for g in (decode.before, decode.after))
    assert set().union(*(e.erased for e in decode.events)) >= before - after
    assert set().union(*(e.wrote for e in decode.events)) >= after - before
    assert before - after
    assert after - before


def test_cells_are_the_plans_of_the_cache(packed):
    plan = KIVI.plan(tiny_model("llama").config).default
    cells = model_cells(packed.graphs)
    assert list(cells) == [f"model.layers.{i}.self_attn" for i in range(LAYERS)]
    for own in cells.values():
        assert {cell.role: cell.plan for cell in own} == {"keys": plan.keys, "values": plan.values}
        assert {cell.bits for cell in own} == {"2"}


def test_layers_that_differ_in_names_are_one(packed):
    """Layer 0 of a step also makes the cosines and sines that all others take."""
    layers = [f"model.layers.{i}.self_attn" for i in range(LAYERS)]
    prefill, decode = (site_diffs(report, layers) for report in packed.graphs)
    assert [d.paths for d in prefill] == [tuple(layers)]
    assert [d.paths for d in decode][:2] == [(layers[0],), tuple(layers[1:])]
    rows = decode[1].rows
    assert [r.before.code for r in rows if r.before and r.before.name == "keys_1"] == [
        "cat([past_key_values_layers.1.keys, k_embed_1], dim=-2)"
    ]
    marks = {(line.mark, rule) for r in rows for line in (r.before, r.after) if line
             for rule in line.rules}  # fmt: skip
    assert {("matched", "quantize_cache"), ("written", "quantize_cache"),
            ("matched", "fuse_attention"), ("written", "fuse_attention")} <= marks  # fmt: skip
    assert sum(len(run) for _, run in decode[1].runs) == len(rows)


@pytest.mark.parametrize("name", [
    "int4.channel32/window=0,pack_every=128",
    "int2.token16/sinks=5,window=128,pack_every=1",
    "int2.token16/window=128,pack_every=1/window_size=300",
    "fp",
])  # fmt: skip
@pytest.mark.parametrize("tokens", [1, 700])
def test_computed_bytes_are_those_of_a_real_cache(name, tokens):
    plan = parse_plan(name)
    assert isinstance(plan, TensorPlan)
    real = torch.ops.kvpass.pack(torch.zeros(1, 2, tokens, 32, dtype=torch.bfloat16), name)
    assert packed_bytes(plan, 2, 32, torch.bfloat16, tokens) == sum(t.nbytes for t in real)


def test_the_chart_ends_at_its_last_point(packed):
    points = cache_points([c for own in model_cells(packed.graphs).values() for c in own])
    assert (points[0].tokens, points[-1].tokens) == (1, 32_768)
    assert points[-1].plain == LAYERS * 2 * 2 * 16 * 4 * 32_768
    assert points[-1].packed < points[-1].plain / 6
    drawn = chart(points)
    assert len(drawn.plain.split()) == len(points)
    assert drawn.y_ticks[0][1] == "0"
    assert drawn.y_ticks[-1][0] <= float(drawn.plain.split()[-1].split(",")[1])


def test_sources_of_earlier_models_are_left_out(tmp_path):
    files = {tmp_path / f"{i}.cpp": "pack" for i in range(4)}
    for path in list(files)[:3]:
        path.write_text("x" * 190_000)
    graphs = [SimpleNamespace(kernels=lambda: files)]
    assert page.recent_files(graphs) == (
        {tmp_path / "2.cpp": "pack", tmp_path / "1.cpp": "pack"},
        1,
    )


def test_names_and_sizes_as_people_read_them():
    weight = "l_self_modules_model_modules_layers_modules_10_modules_self_attn_modules_q_proj_"
    assert short_name(f"{weight}parameters_weight_") == "model.layers.10.self_attn.q_proj.weight"
    assert short_name("keys_1") == "keys_1"
    paths = [f"m.{i}.a" for i in (0, 1, 2, 5, 7, 8)]
    assert page.spans(paths) == "layers 0 ... 2, 5, 7, 8"
    assert page.spans([""]) == "(top level)"
    assert [readable(n) for n in (0, 1023, 1 << 20)] == ["0 B", "1,023 B", "1 MiB"]
