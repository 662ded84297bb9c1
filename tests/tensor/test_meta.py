"""What compiled code guards of a cache tensor: all that it relies on, and no more at each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from kvpass.format.channels import ChannelOrder
from kvpass.format.parse import parse_plan
from kvpass.ops import logical
from kvpass.tensor.packed import PackedKV
from tests.strategies import randn

PLAN = "int2.channel8/window=0,pack_every=16"
ORDER = ChannelOrder.of(torch.arange(16).flip(0).expand(2, 16))


def packed(
    plan: str = PLAN, tokens: int = 37, heads: int = 2, dtype: torch.dtype = torch.float32
) -> PackedKV:
    made = logical.append(None, randn(2, heads, tokens, 16, dtype=dtype), plan)
    assert isinstance(made, PackedKV)
    return made


def with_basis() -> PackedKV:
    x = packed()
    return PackedKV(x.state, x.plan, 37, x.dtype, basis=ORDER)


def with_cosines(rows: int) -> PackedKV:
    """Keys before their rotary embedding, with cosines and sines for so many of two sequences."""
    state = [*packed().state, torch.zeros(rows, 256, 16)]
    return PackedKV(state, parse_plan(f"{PLAN}/rope=halves0-16"), 37, torch.float32)


def grown() -> PackedKV:
    x = packed()
    x.grow("capacity", 1024)
    return x


def read(x: Tensor) -> Tensor:
    return torch.zeros(1) + x.shape[2]


def graphs_of(*handles: PackedKV) -> int:
    """How many graphs a function needs that reads them."""
    torch._dynamo.reset()
    made = []

    def backend(module: Any, _: Any) -> Callable[..., Any]:
        made.append(module)
        return module.forward  # type: ignore[no-any-return]

    run = torch.compile(read, backend=backend)
    for handle in handles:
        assert run(handle) == handle.shape[2]
    return len(made)


OTHERS: dict[str, Callable[[], PackedKV]] = {
    "plan": lambda: packed("int4.channel8/window=0,pack_every=16"),
    "only the retention": lambda: packed("int2.channel8/window=0,pack_every=32"),
    "dtype": lambda: packed(dtype=torch.bfloat16),
    "exact tokens in another dtype": lambda: PackedKV(
        packed(dtype=torch.bfloat16).state, packed().plan, 37, torch.float32
    ),
    "device": lambda: packed().to("meta"),
    "heads": lambda: packed(heads=4),
    "basis": with_basis,
    "a static cache": lambda: packed(f"{PLAN}/window_size=36/room=37"),
    "one token": lambda: packed(tokens=1),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_another_kind_of_cache_tensor_is_another_graph(other: Callable[[], PackedKV]) -> None:
    assert graphs_of(packed(), other()) == 2


@pytest.mark.parametrize("rows", [1, 2])
def test_shared_rows_of_cosines_are_another_graph(rows: int) -> None:
    assert graphs_of(with_cosines(1), with_cosines(rows)) == rows


def test_lengths_and_room_are_not_guarded() -> None:
    assert packed().meta is grown().meta is packed(tokens=300).meta
    assert graphs_of(packed(), packed(tokens=300), grown(), packed().clone()) == 1


@pytest.mark.parametrize("plan", ["fp", PLAN, "int4.token8/sinks=5,window=8,pack_every=1"])
def test_guards_do_not_count_the_inner_tensors(plan: str) -> None:
    """Those of the cache tensor and of one of them: a step checks them for each layer."""
    assert graphs_of(packed(plan)) == 1
    (entry,) = _debug_get_cache_entry_list(read.__code__)
    lines = str(entry.guard_manager).splitlines()
    guards = [x for x in lines if "+- " in x and "L['x']" in x and "GuardManager" not in x]
    assert sum("TENSOR_MATCH" in x for x in guards) == 2
    assert len(guards) < 25
