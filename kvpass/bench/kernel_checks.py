"""Checks that the chosen providers compute on this device what the reference says."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvpass.bench.contenders import TOLERANCE, decoded_rows, dense_attention, random_tokens
from kvpass.bench.plans import layer_plan, packed_states
from kvpass.bench.timing import relative_error
from kvpass.format.codec import NOWHERE
from kvpass.format.dtypes import dtype_name
from kvpass.format.quantize import split_outliers
from kvpass.format.rope import Rope
from kvpass.format.state import State
from kvpass.format.tensor_plan import TensorPlan
from kvpass.inner import provider
from kvpass.ops.basis import rotate
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
_RAGGED = ((140, 255),)


@dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
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
        """Whether the result is right, and by the right provider."""
        return not self.problem and self.error <= self.tolerance


def check_kernels(
    recipe: str, dtype: torch.dtype, head_dim: int, device: torch.device, wanted: str | None
) -> Iterator[Check]:
    """Compares ``pack``, ``append`` and ``unpack`` of a recipe on ``device`` bit for bit with the
    CPU reference, ``attention`` and ``append_attention`` with float64. The provider ``wanted`` must
    serve every op; None: any.

    Raises:
        OptionError: if the recipe is not known.
        PlanError: if it does not fit ``head_dim``.
    """
    return _Checker(recipe, dtype, head_dim, device, wanted).checks()


class _Checker:
    """The checks of one recipe; arguments as those of `check_kernels`."""

    def __init__(
        self, recipe: str, dtype: torch.dtype, dim: int, device: torch.device, wanted: str | None
    ) -> None:
        self.dtype, self.dim, self.device, self.wanted = dtype, dim, device, wanted
        self.label = f"{recipe} {dtype_name(dtype)} D={dim}"
        self.plan = layer_plan(recipe, *(self.tokens(_LENGTHS[-1], seed) for seed in (0, 1)))

    @torch.no_grad()
    def checks(self) -> Iterator[Check]:
        for kind in ("keys", "values"):
            for length in _LENGTHS:
                yield self.pack(kind, length)
                yield self.unpack(kind, length)
            yield self.append(kind)
        yield self.append_rotated()
        yield self.step()
        yield self.step(self.basis())
        for length in _LENGTHS:
            for queries, masked in ((1, False), (1, True), (2, False)):
                name = f"T={length} n={queries}{' masked' if masked else ''}"
                yield self.attention(name, [length] * _BATCH, queries, masked)
        # The plain ATen reference does not take sequences of different lengths.
        for lengths in _RAGGED if self.wanted is not None else ():
            yield self.attention(f"T={lengths}", lengths)

    def tokens(self, length: int, seed: int = 0) -> Tensor:
        shape = (_BATCH, _KV_HEADS, length, self.dim)
        return random_tokens(shape, self.dtype, torch.device("cpu"), seed)

    def compute(self, op: str, *arguments: Any) -> tuple[Any, Any]:
        """The result of the chosen provider, and the choice."""
        target, choice = provider(op, *arguments)
        return target(*arguments), choice

    def check(self, name: str, choice: Any, error: float, tolerance: float = 0.0) -> Check:
        problem = ""
        if self.wanted not in (None, choice.provider):
            reasons = "; ".join(f"{name}: {reason}" for name, reason in choice.declined)
            served = f"served by {choice.provider}, not {self.wanted}"
            problem = f"{served} ({reasons or 'it came first'})"
        return Check(name, choice.provider, error, tolerance, problem)

    def stored_plan(self, kind: str) -> TensorPlan:
        """The plan of keys or values as they are stored."""
        return replace(self.plan.keys if kind == "keys" else self.plan.values, rope=None)

    def ranges(self, kind: str, device: torch.device) -> Tensor | None:
        ranges = self.plan.key_ranges if kind == "keys" else None
        return None if ranges is None else ranges.tensor(device)

    def handles(self, kind: str) -> tuple[PackedKV, PackedKV]:
        """A first prompt, packed by the reference: on the CPU, and moved to the device."""
        x, plan = self.tokens(_FIRST_PROMPT), self.stored_plan(kind)
        state = torch.ops.kvpass.pack(x, str(plan), self.ranges(kind, x.device))
        moved = [t.to(self.device, copy=True) for t in state]
        expected, got = (PackedKV(s, plan, _FIRST_PROMPT, x.dtype) for s in (state, moved))
        return expected, got

    def pack(self, kind: str, length: int) -> Check:
        x, plan = self.tokens(length), self.stored_plan(kind)
        ranges = self.ranges(kind, self.device)
        out, choice = self.compute("pack", x.to(self.device), str(plan), ranges)
        expected = torch.ops.kvpass.pack(x, str(plan), self.ranges(kind, x.device))
        name = f"pack {kind} {self.label} T={length}"
        return self.check(name, choice, _differences(out, expected, plan))

    def unpack(self, kind: str, length: int) -> Check:
        name, x = f"unpack {kind} {self.label} T={length}", self.tokens(length)
        state = packed_states(self.plan, x, x)[kind == "values"]
        plan = self.plan.keys if kind == "keys" else self.plan.values
        arguments = (length, str(plan), x.dtype)
        out, choice = self.compute("unpack", [t.to(self.device) for t in state], *arguments)
        got, expected = out.cpu(), torch.ops.kvpass.unpack(state, *arguments)
        if plan.codec.codebook is None and plan.rope is None:
            return self.check(name, choice, float((got != expected).sum()))
        # A product and a sum may be rounded together, or a rotation in another order.
        error = relative_error(got, expected.double())
        return self.check(name, choice, error, TOLERANCE[x.dtype])

    def append(self, kind: str) -> Check:
        """After every step the state is compared with the reference's on a CPU."""
        (expected, got), plan = self.handles(kind), self.stored_plan(kind)
        differences = 0
        for seed, n in enumerate(_STEPS):
            new = self.tokens(n, seed=10 + seed)
            for handle in (expected, got):
                handle.reserve(n)
            torch.ops.kvpass.append(expected.state, new, str(plan))
            _, choice = self.compute("append", got.state, new.to(self.device), str(plan))
            expected, got = expected.extended(n), got.extended(n)
            differences += _differences(got.state, expected.state, plan)
        return self.check(f"append {kind} {self.label}", choice, differences)

    def append_rotated(self) -> Check:
        """The keys of a step that get their rotary embedding where they are stored, still exact."""
        new, cos_sin = self.tokens(_ROTATED, seed=10), self.tokens(_ROTATED, seed=11)[:, 0]
        (expected, got), plan = self.handles("keys"), str(self.stored_plan("keys"))
        for handle in (expected, got):
            handle.reserve(_ROTATED)
        rope = str(Rope("halves", 0, self.dim))
        torch.ops.kvpass.append(expected.state, new, plan, cos_sin, rope)
        moved = (new.to(self.device), plan, cos_sin.to(self.device), rope)
        _, choice = self.compute("append", got.state, *moved)
        length = (_FIRST_PROMPT + _ROTATED, plan, new.dtype)
        states = ([t.cpu() for t in got.state], expected.state)
        stored = (torch.ops.kvpass.unpack(s, *length) for s in states)
        found, wanted = (x[:, :, -_ROTATED:] for x in stored)
        # A product and a sum may be rounded together.
        error = relative_error(found, wanted.double())
        name = f"append rotated keys {self.label}"
        return self.check(name, choice, error, TOLERANCE[new.dtype])

    def basis(self) -> Tensor:
        """Another order of the channels of each head, with other signs: what no sum rounds."""
        noise = torch.randn(_KV_HEADS, self.dim, generator=torch.Generator().manual_seed(50))
        order, signs = noise.argsort(dim=1), noise.sign()
        return (torch.eye(self.dim)[order] * signs.unsqueeze(2))[None, :, None, None]

    def step(self, basis: Tensor | None = None) -> Check:
        """Steps that append and attend in one; infinite if they store something else. New keys and
        the query are brought to ``basis``."""
        handles = [self.handles(kind) for kind in ("keys", "values")]
        plans = [str(expected.plan) for expected, _ in handles]
        errors = []
        for seed, n in enumerate(_STEPS):
            new = [self.tokens(n, seed=10 + 2 * seed + i) for i in range(2)]
            q = self.tokens(n, seed=30 + seed).repeat(1, _HEADS // _KV_HEADS, 1, 1)
            moved = [x.to(self.device) for x in (*new, q)]
            if basis is not None:
                new[0], q = rotate(new[0], basis), rotate(q, basis)
            for (expected, got), x in zip(handles, new, strict=True):
                expected.reserve(n)
                got.reserve(n)
                torch.ops.kvpass.append(expected.state, x, str(expected.plan))
            states = [got.state for _, got in handles]
            rest = (None, self.dim**-0.5, *plans, None, True)
            on_device = None if basis is None else basis.to(self.device)
            arguments = (*moved[:2], *[None] * 4, on_device, moved[2], *states, *rest)
            out, choice = self.compute("append_attention", *arguments)
            wanted = [expected.state for expected, _ in handles]
            exact = torch.ops.kvpass.attention(q.double(), *map(_wide, wanted), *rest)
            handles = [(e.extended(n), g.extended(n)) for e, g in handles]
            differ = any(_differences(g.state, e.state, e.plan) for e, g in handles)
            errors.append(math.inf if differ else relative_error(out.cpu(), exact))
        name = f"append_attention {self.label}{'' if basis is None else ' in another basis'}"
        return self.check(name, choice, max(errors), TOLERANCE[self.dtype])

    def attention(
        self, name: str, lengths: Sequence[int], queries: int = 1, masked: bool = False
    ) -> Check:
        """Two sequences, the first half of the first of which is padding where ``masked``."""
        rows = [
            packed_states(self.plan, *(self.tokens(n, seed)[i : i + 1] for seed in (0, 1)))
            for i, n in enumerate(lengths)
        ]
        keys, values = (
            [torch.cat(parts).to(self.device) for parts in zip(*states, strict=True)]
            for states in zip(*rows, strict=True)
        )
        mask = None
        if masked:
            mask = torch.ones(_BATCH, 1, 1, max(lengths), dtype=torch.bool, device=self.device)
            mask[0, :, :, : lengths[0] // 2] = False
        shape = (_BATCH, _HEADS, queries, self.dim)
        q = torch.randn(shape, generator=torch.Generator().manual_seed(3))
        q, scale = q.to(self.device, self.dtype), self.dim**-0.5
        plans = (str(self.plan.keys), str(self.plan.values))
        out, choice = self.compute("attention", q, keys, values, mask, scale, *plans)
        expected = dense_attention(q, decoded_rows(keys, values, *plans), scale, mask)
        error = relative_error(out, expected)
        return self.check(f"attention {self.label} {name}", choice, error, TOLERANCE[q.dtype])


def _wide(state: Sequence[Tensor]) -> list[Tensor]:
    """The state with exact tokens in double precision, for a query of such."""
    return [t.double() if t.is_floating_point() and t.dim() == 4 else t for t in state]


def _differences(got: Sequence[Tensor], expected: Sequence[Tensor], plan: TensorPlan) -> int:
    """Elements that differ among those in which tokens live."""
    found, wanted = State([t.cpu() for t in got], plan), State(expected, plan)
    if not torch.equal(found.segment_ends, wanted.segment_ends):
        return int(wanted.segment_ends.numel())
    pairs = zip(_live(found), _live(wanted), strict=True)
    return sum(int((a != b).sum()) for a, b in pairs)


def _live(state: State) -> list[Tensor]:
    """The parts of the fields that hold tokens."""
    plan, layout, ends = state.plan, state.layout, state.segment_ends[0].tolist()
    if plan.codec.identity:
        return [state.codes[:, :, : ends[0]]]
    # A short prompt ends within the sinks.
    packed, total = max(0, ends[-2] - plan.sinks), ends[-1]
    slots = torch.arange(ends[-2], total) % state.window.shape[2]
    live = [state.codes[:, :, :packed], state.window[:, :, slots]]
    if (field := layout["qparams"]).grows is not None:
        live.append(field.tokens(state.qparams, 0, packed // field.group * field.group))
    if plan.sinks:
        live.append(state.sinks[:, :, : ends[0]])
    if plan.codec.outliers:
        # Their order is free, and of equal elements either may be one.
        channels, values = split_outliers(state.outliers[:, :packed])
        live.append(values.float().masked_fill(channels == NOWHERE, torch.inf).sort(dim=2).values)
    return live


def worst(checks: Sequence[Check]) -> float:
    """The largest error in units of the tolerance; for bit-exact ones, of an element."""
    errors = (c.error / c.tolerance if c.tolerance else c.error for c in checks)
    return max(errors, default=math.nan)
