"""`fuse_rope_append`: the keys of a step are rotated where they are stored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as nnf
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvpass import PackedKV, explain, oracle_cache, recipe
from tests.graph.recorder import Record, run
from tests.harness import batch_text, compiled, run_steps
from tests.models import tiny_model
from tests.strategies import DTYPES, SEEDS, randn, tensor_plans
from tests.tolerances import LOGITS_CODES_FP32

ops = torch.ops.kvpass
KIVI = recipe("kivi-2bit", group=8, residual=16)
RULE = "fuse_rope_append"


def tables(tokens: int, channels: int, kind: str) -> tuple[Tensor, Tensor]:
    """``[1, 1, tokens, channels]``."""
    angles = torch.outer(torch.arange(tokens) + 3.0, 0.5 ** torch.arange(channels // 2))
    halves = kind == "halves"
    angles = torch.cat((angles, angles), -1) if halves else angles.repeat_interleave(2, dim=-1)
    return angles.cos().unsqueeze(0).unsqueeze(0), angles.sin().unsqueeze(0).unsqueeze(0)


def rotate(x: Tensor, kind: str) -> Tensor:
    if kind == "halves":
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, kind: str = "halves") -> Tensor:
    """As models write it, of the channels that there are cosines of."""
    channels = cos.shape[-1]
    part = x[..., :channels]
    rotated = part * cos + rotate(part, kind) * sin
    return torch.cat((rotated, x[..., channels:]), dim=-1) if channels < x.shape[-1] else rotated


def rows_of(cos: Tensor, sin: Tensor, kind: str) -> Tensor:
    pairs = slice(None, cos.shape[-1] // 2) if kind == "halves" else slice(None, None, 2)
    return torch.cat((cos[:, 0, :, pairs], sin[:, 0, :, pairs]), dim=-1)


KINDS = st.sampled_from(["halves", "neighbours"])
CASES = st.sampled_from([(16, 16), (64, 24), (80, 80)]).flatmap(
    lambda dims: st.tuples(st.just(dims), tensor_plans(dims[0]), KINDS, SEEDS, DTYPES)
)


# append(past, rope(x, cos, sin)) = append(past, x, rows(cos, sin), rope), bit for bit.
@given(CASES, st.integers(1, 20), st.integers(1, 2), DTYPES)
def test_appending_rotates(case: Any, n: int, batch: int, table_dtype: torch.dtype) -> None:
    (dim, channels), plan, kind, seed, dtype = case
    past, x = (randn(2, 2, t, dim, seed=seed + i).to(dtype) for i, t in enumerate((30, n)))
    cos, sin = (
        (table * torch.ones(batch, 1, 1, 1)).to(table_dtype) for table in tables(n, channels, kind)
    )
    rotated = rotary(x.float(), cos.float(), sin.float(), kind).to(dtype)
    handle = PackedKV(ops.pack.default(past, str(plan)), plan, 30, dtype)
    handle.reserve(n)
    got = [t.clone() for t in handle.state]
    ops.append.default(handle.state, rotated, str(plan))
    rows, rope = rows_of(cos, sin, kind), f"{kind}0-{channels}"
    ops.append.default(got, x, str(plan), rows, rope)
    for a, b in zip(got, handle.state, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def attending(channels: int = 16, kind: str = "halves", change: Any = None) -> Any:
    def attend(q: Tensor, k: Tensor, v: Tensor, layer: Any) -> Any:
        cos, sin = tables(k.shape[2], channels, kind)
        q, more = rotary(q, cos, sin, kind), None
        if change is None:
            k = rotary(k, cos, sin, kind)
        else:
            k, more = change(k, cos, sin)
        keys, values = layer.update(k, v)
        return nnf.scaled_dot_product_attention(q, keys, values, enable_gqa=True), more

    return attend


def details(record: Record) -> list[str]:
    return [event.detail for event in record.events if event.rule == RULE]


@pytest.mark.parametrize("kind", ["halves", "neighbours"])
@pytest.mark.parametrize("channels", [16, 6])
def test_it_applies_to_steps(kind: str, channels: int) -> None:
    prefill, decode, several, prompt = run(attending(channels, kind), [20, 1, 5, 20], KIVI)
    for record in (decode, several):
        assert details(record) == [f"rotated by {kind}0-{channels} where they are stored"]
        rest = [n for n in record.after.graph.nodes if "neg" in n.name]
        assert len(rest) == 1, "the query's"
    # Their exact attention reads the rotated keys.
    assert details(prefill) == details(prompt) == []


def widened(k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, None]:
    return rotary(k.to(torch.float64), cos, sin).to(torch.float32), None


def read_twice(k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    k = rotary(k, cos, sin)
    return k, k.sum(-1)


def two_tensors(k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, None]:
    return torch.cat(
        (k[..., :8] * 2, rotary(k[..., 8:], *tables(k.shape[2], 8, "halves"))), -1
    ), None


def by_head(k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, None]:
    return rotary(k, torch.cat((cos, cos), 1), torch.cat((sin, sin), 1)), None


def unequal(k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, None]:
    return rotary(k, cos.roll(1, -1), sin.roll(1, -1)), None


def changed(k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    k = k * 2
    rotated = rotary(k, cos, sin)
    k.add_(1.0)
    return rotated, k


@pytest.mark.parametrize(("change", "reason"), [
    (widened, "the keys change their dtype or shape when they are rotated"),
    (read_twice, "the rotated keys are read by sum as well"),
    (two_tensors, "the keys before their rotary embedding are several tensors"),
    (by_head, "cosines and sines are no [B, 1, n, channels], which all heads share"),
    (unequal, "the cosines of a pair are not known to be equal"),
    (changed, "it is changed in place"),
])  # fmt: skip
def test_it_refuses(change: Any, reason: str) -> None:
    _, decode = run(attending(change=change), [20, 1], KIVI)
    (detail,) = details(decode)
    assert detail.startswith(f"{reason} (at ")


@pytest.mark.parametrize(("family", "padded"), [("llama", True), ("phi", False), ("glm4", True)])
def test_models_equal_the_oracle(family: str, padded: bool) -> None:
    """Of one layer, so that no code is another: sequences at positions of their own, and models
    that rotate a part of the channels, or neighbours. The C++ kernels rotate."""
    model, steps = tiny_model(family, layers=1), [30, 1, 1, 5, 1, 1]
    ids, mask, visible = batch_text(sum(steps), padded)
    plan = KIVI.plan(model.config)
    wanted, _ = run_steps(model, ids, steps, mask, oracle_cache(plan, model.config, model))
    twin = compiled(model, KIVI)
    got, _ = run_steps(twin, ids, steps, mask)
    assert (got - wanted)[visible].abs().max().item() <= LOGITS_CODES_FP32
    decode = [g for g in explain(twin).graphs if any(c.op == "copy_cos_sin" for c in g.choices)]
    assert decode
    for graph in decode:
        assert [e.fired for e in graph.events if e.rule == RULE] == [True]
        served = {c.op: c.provider for c in graph.choices}
        assert served == {"copy_cos_sin": "aten", "append": "cpp", "attention": "cpp"}
        # The query's alone is left.
        assert sum("neg" in node.name for node in graph.bound.graph.nodes) == 1
