"""The list of rules, and adding one."""

from __future__ import annotations

import pytest
import torch.nn.functional as nnf

from kvpass import rules
from kvpass.graph.pattern import Miss
from kvpass.graph.spellings import op_name
from kvpass.recipes import recipe
from kvpass.rules import Rule, register_rule
from tests.graph.recorder import run

BUILT_IN = [
    "quantize_static",
    "quantize_cache",
    "cache_before_rope",
    "fuse_attention",
    "mask_to_bounds",
    "padding_as_given",
    "decode_reader",
    "share_heads",
    "rotate_channels",
    "push_basis",
    "cancel_rotations",
    "share_tables",
    "fuse_rope_append",
    "basis_left",
    "reorder_chunks",
    "position_on_device",
]


@pytest.fixture
def own_rules(monkeypatch):
    monkeypatch.setattr(rules, "RULES", list(rules.RULES))


def attend(q, k, v, layer):
    keys, values = layer.update(k, v)
    return nnf.scaled_dot_product_attention(q, keys, values, enable_gqa=True).exp()


def test_order_of_the_built_in_rules():
    assert [rule.name for rule in rules.RULES] == BUILT_IN


@pytest.mark.usefixtures("own_rules")
def test_a_registered_rule_is_tried_first():
    @register_rule
    class Fast(Rule):
        name = "fast"

        def match(self, node, context):
            if op_name(node) != "exp":
                return None
            return {"x": node} if node.users else Miss("unused", node)

        def rewrite(self, node, found, context):
            return "seen"

    (record,) = run(attend, [20])
    assert [event.rule for event in record.events] == ["fast", "quantize_cache", "quantize_cache"]
    assert record.fired("fast") == 1
    assert record.events[0].detail == "seen"


@pytest.mark.usefixtures("own_rules")
def test_registering_a_name_again_replaces_the_rule():
    @register_rule
    class Never(Rule):
        name = "quantize_cache"

        def match(self, node, context):
            return None

        def rewrite(self, node, found, context):
            raise AssertionError

    others = [name for name in BUILT_IN if name != "quantize_cache"]
    assert [rule.name for rule in rules.RULES] == ["quantize_cache", *others]
    (record,) = run(attend, [20])
    assert record.events == []


def test_multi_query_at_2_bits_is_warned_of():
    kivi = recipe("kivi-2bit")
    assert kivi.warning(4, 1) == (
        "kivi-2bit loses accuracy with one KV head (multi-query); KIVI advises 4 bits"
    )
    assert kivi.warning(1, 1) is None
    assert kivi.warning(4, 2) is None
    assert recipe("kivi-4bit").warning(4, 1) is None
    assert recipe("fp").warning(4, 1) is None
