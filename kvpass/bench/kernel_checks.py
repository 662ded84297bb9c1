"""Whether the chosen providers compute on this device what the reference says."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvpass.backend import provider
from kvpass.bench.contenders import TOLERANCE, decoded_rows, dense_attention, random_tokens
from kvpass.bench.plans import layer_plan, packed_states
from kvpass.bench.timing import relative_error
from kvpass.format.codec import NOWHERE
from kvpass.format.quantize import split_outliers
from kvpass.format.rope import Rope
from kvpass.format.state import State
from kvpass.format.tensor_plan import TensorPlan
from kvpass.plan import LayerPlan
from kvpass.tensor.packed import PackedKV

_BATCH, _HEADS, _KV_HEADS = 2, 8, 2
# Below, at and above a packed run; the last one is split among programs.
_LENGTHS = (1, 127, 128, 129, 2100)
# Steps that make more tokens packed, up to the longest.
_STEPS = (1, 1, 5, 16, 1, 16, 1, 1)
_FIRST_PROMPT = 231
# Tokens of a step that are rotated.
_ROTATED = 3
# Two lengths with the same capacity, so that their states can be one batch.
_RAGGED = (140, 255)


@dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
        name: what was compared.
        provider: who computed it.
        error: elements that differ, or the relative error of an attention.
        tolerance: largest error that is right; 0 for bit-exact.
        problem: why the provider is not the one that is to be checked, or empty.
    """

    name: str
    provider: str
    error: float
    tolerance: float
    problem: str = ""

    @property
    def passed(self) -> bool:
        """Right, and by the right provider."""
        return not self.problem and self.error <= self.tolerance


@torch.no_grad()
def check_kernels(
    recipe: str, dtype: torch.dtype, head_dim: int, device: torch.device, wanted: str | None
) -> Iterator[Check]:
    """Compares ``pack``, ``append`` and ``unpack`` bit for bit with the CPU reference, and
    ``attention`` with float64.

    Args:
        recipe: name of a recipe.
        dtype: of the model.
        head_dim: channels per head.
        device: to compute on.
        wanted: name of the provider that must serve every op; None: any.

    Raises:
        OptionError: if the recipe is not known.
        PlanError: if it does not fit ``head_dim``.
    """
    tokens = partial(_tokens, head_dim=head_dim, dtype=dtype)
    plan = layer_plan(recipe, tokens(_LENGTHS[-1]), tokens(_LENGTHS[-1], seed=1))
    label = f"{recipe} {str(dtype).removeprefix('torch.')} D={head_dim}"
    for kind in ("keys", "values"):
        for length in _LENGTHS:
            name = f"pack {kind} {label} T={length}"
            yield _check_pack(name, plan, kind, tokens(length), device, wanted)
            name = f"unpack {kind} {label} T={length}"
            yield _check_unpack(name, plan, kind, tokens(length), device, wanted)
        yield _check_append(f"append {kind} {label}", plan, kind, tokens, device, wanted)
    yield _check_rotated(f"append rotated keys {label}", plan, tokens, device, wanted)
    for length in _LENGTHS:
        for queries, masked in ((1, False), (1, True), (2, False)):
            state = _states(plan, [tokens(length), tokens(length, seed=1)], device)
            mask = _padding([length] * _BATCH, device) if masked else None
            name = f"attention {label} T={length} n={queries}{' masked' if masked else ''}"
            yield _check_attention(name, plan, state, queries, mask, wanted)
    yield from _check_ragged(f"attention {label} T={_RAGGED}", plan, tokens, device, wanted)


def _tokens(length: int, seed: int = 0, *, head_dim: int, dtype: torch.dtype) -> Tensor:
    cpu = torch.device("cpu")
    return random_tokens((_BATCH, _KV_HEADS, length, head_dim), dtype, cpu, seed)


def _check_pack(
    name: str, layer: LayerPlan, kind: str, x: Tensor, device: torch.device, wanted: str | None
) -> Check:
    plan, state = _packed(layer, kind, x)
    arguments = (x.to(device), str(plan), _ranges(layer, kind, device))
    target, choice = provider("pack", *arguments)
    differences = _differences(target(*arguments), state, plan)
    return Check(name, choice.provider, differences, 0, _served(choice, wanted))


def _check_unpack(
    name: str, layer: LayerPlan, kind: str, x: Tensor, device: torch.device, wanted: str | None
) -> Check:
    state = packed_states(layer, x, x)[kind == "values"]
    plan = layer.keys if kind == "keys" else layer.values
    arguments = (x.shape[2], str(plan), x.dtype)
    moved = [t.to(device) for t in state]
    target, choice = provider("unpack", moved, *arguments)
    got, expected = target(moved, *arguments).cpu(), torch.ops.kvpass.unpack(state, *arguments)
    if plan.codec.codebook is None and plan.rope is None:
        error, tolerance = float((got != expected).sum()), 0.0
    else:
        # A product and a sum may be rounded together, or a rotation in another order.
        error, tolerance = relative_error(got, expected.double()), TOLERANCE[x.dtype]
    return Check(name, choice.provider, error, tolerance, _served(choice, wanted))


def _check_append(
    name: str, layer: LayerPlan, kind: str, tokens: Any, device: torch.device, wanted: str | None
) -> Check:
    """After every step the state is compared with the reference's on a CPU."""
    first = tokens(_FIRST_PROMPT)
    plan, state = _packed(layer, kind, first)
    expected = PackedKV(state, plan, _FIRST_PROMPT, first.dtype)
    got = PackedKV([t.to(device, copy=True) for t in state], plan, _FIRST_PROMPT, first.dtype)
    differences = 0
    for seed, n in enumerate(_STEPS):
        new = tokens(n, seed=10 + seed)
        moved = new.to(device)
        for handle in (expected, got):
            handle.reserve(n)
        torch.ops.kvpass.append(expected.state, new, str(plan))
        target, choice = provider("append", got.state, moved, str(plan))
        target(got.state, moved, str(plan))
        expected, got = expected.extended(n), got.extended(n)
        differences += _differences(got.state, expected.state, plan)
    return Check(name, choice.provider, differences, 0, _served(choice, wanted))


def _check_rotated(
    name: str, layer: LayerPlan, tokens: Any, device: torch.device, wanted: str | None
) -> Check:
    """The keys of a step that get their rotary embedding where they are stored, still exact."""
    first, new = tokens(_FIRST_PROMPT), tokens(_ROTATED, seed=10)
    plan, state = _packed(layer, "keys", first)
    expected = PackedKV(state, plan, _FIRST_PROMPT, first.dtype)
    expected.reserve(_ROTATED)
    got = [t.to(device, copy=True) for t in expected.state]
    turning = (str(plan), tokens(_ROTATED, seed=11)[:, 0], str(Rope("halves", 0, new.shape[3])))
    torch.ops.kvpass.append(expected.state, new, *turning)
    arguments = (got, *(x.to(device) if isinstance(x, Tensor) else x for x in (new, *turning)))
    target, choice = provider("append", *arguments)
    target(*arguments)
    length = (_FIRST_PROMPT + _ROTATED, str(plan), new.dtype)
    stored = (torch.ops.kvpass.unpack(s, *length) for s in ([t.cpu() for t in got], expected.state))
    rotated, wanted_keys = (x[:, :, -_ROTATED:] for x in stored)
    # A product and a sum may be rounded together.
    error = relative_error(rotated, wanted_keys.double())
    return Check(name, choice.provider, error, TOLERANCE[new.dtype], _served(choice, wanted))


def _packed(layer: LayerPlan, kind: str, x: Tensor) -> tuple[TensorPlan, list[Tensor]]:
    """The plan of keys or values, as they are stored, and what the reference makes of ``x``."""
    plan = replace(layer.keys if kind == "keys" else layer.values, rope=None)
    return plan, torch.ops.kvpass.pack(x, str(plan), _ranges(layer, kind, x.device))


def _ranges(layer: LayerPlan, kind: str, device: torch.device) -> Tensor | None:
    if kind == "values" or layer.key_ranges is None:
        return None
    return layer.key_ranges.tensor(device)


def _check_attention(
    name: str,
    plan: LayerPlan,
    state: tuple[list[Tensor], list[Tensor]],
    queries: int,
    mask: Tensor | None,
    wanted: str | None,
) -> Check:
    keys, values = state
    exact = keys[0] if plan.keys.codec.identity else keys[2]
    generator = torch.Generator().manual_seed(3)
    shape = (_BATCH, _HEADS, queries, exact.shape[3])
    q = torch.randn(shape, generator=generator).to(exact.device, exact.dtype)
    scale, plans = shape[3] ** -0.5, (str(plan.keys), str(plan.values))
    arguments = (q, keys, values, mask, scale, *plans)
    target, choice = provider("attention", *arguments)
    expected = dense_attention(q, decoded_rows(keys, values, *plans), scale, mask)
    error = relative_error(target(*arguments), expected)
    return Check(name, choice.provider, error, TOLERANCE[q.dtype], _served(choice, wanted))


def _check_ragged(
    name: str, plan: LayerPlan, tokens: Any, device: torch.device, wanted: str | None
) -> Iterator[Check]:
    """Sequences of different lengths in one batch, which the plain ATen reference does not take."""
    rows = [_states(plan, [tokens(n)[:1], tokens(n, seed=1)[:1]], device) for n in _RAGGED]
    keys, values = (
        [torch.cat(parts) for parts in zip(*(row[i] for row in rows), strict=True)] for i in (0, 1)
    )
    if wanted is not None:
        yield _check_attention(name, plan, (keys, values), 1, None, wanted)


def _states(
    plan: LayerPlan, tokens: Sequence[Tensor], device: torch.device
) -> tuple[list[Tensor], list[Tensor]]:
    """Keys and values, packed by the reference and moved to the device."""
    keys, values = ([t.to(device) for t in state] for state in packed_states(plan, *tokens))
    return keys, values


def _padding(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Mask ``[B, 1, 1, T]`` that hides the first half of the first sequence."""
    mask = torch.ones(len(lengths), 1, 1, max(lengths), dtype=torch.bool, device=device)
    mask[0, :, :, : lengths[0] // 2] = False
    return mask


def _differences(got: Sequence[Tensor], expected: Sequence[Tensor], plan: TensorPlan) -> int:
    """Elements that differ among those in which tokens live."""
    found, wanted = State([t.cpu() for t in got], plan), State(expected, plan)
    if not torch.equal(found.segment_ends, wanted.segment_ends):
        return int(wanted.segment_ends.numel())
    pairs = zip(_live(found), _live(wanted), strict=True)
    return sum(int((a != b).sum()) for a, b in pairs)


def _live(state: State) -> list[Tensor]:
    """What the fields hold of tokens."""
    plan, layout, ends = state.plan, state.layout, state.segment_ends[0].tolist()
    if plan.codec.identity:
        return [state.codes[:, :, : ends[0]]]
    packed, total = ends[-2] - plan.sinks, ends[-1]
    slots = torch.arange(ends[-2], total) % state.window.shape[2]
    live = [state.codes[:, :, :packed], state.window[:, :, slots]]
    if (field := layout["qparams"]).grows is not None:
        live.append(field.tokens(state.qparams, 0, packed // field.group * field.group))
    if plan.sinks:
        live.append(state.sinks)
    if plan.codec.outliers:
        # Their order is free, and of equal elements either may be one.
        places, values = split_outliers(state.outliers[:, :packed])
        live.append(values.float().masked_fill(places == NOWHERE, torch.inf).sort(dim=2).values)
    return live


def _served(choice: Any, wanted: str | None) -> str:
    if wanted is None or choice.provider == wanted:
        return ""
    reasons = "; ".join(f"{name}: {reason}" for name, reason in choice.declined)
    return f"served by {choice.provider}, not {wanted} ({reasons or 'it came first'})"


def worst(checks: Sequence[Check]) -> float:
    """The largest error in units of the tolerance; for bit-exact ones, of an element."""
    errors = (c.error / c.tolerance if c.tolerance else c.error for c in checks)
    return max(errors, default=math.nan)
