"""How far the ranges of groups are clipped: the search of SKVQ, eq. 3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvpass.calibration.samples import STORED, AttentionSample, Stored
from kvpass.format.channels import ChannelBasis
from kvpass.format.quantize import fake_quantize
from kvpass.format.tensor_plan import TensorPlan
from kvpass.plan import LayerPlan

# Factors to try, 0.5 to 1.
ALPHAS = tuple(round(0.5 + 0.05 * i, 2) for i in range(11))
# Drawn at random from each batch.
QUERIES = 32


class ClipSearch:
    """Sums of the squared errors of one layer's attention output, by group and factor.

    One tensor, and of the keys one group, is rounded at a time: the errors of the others are as
    likely to add to it as to take from it. As in a decode step, a query sees the sinks and its
    window exactly, and all that lies between them rounded.

    Args:
        plan: the layer's.
        seed: of the queries that are drawn.
        factors: those to try.
    """

    def __init__(self, plan: LayerPlan, seed: int, factors: Sequence[float] = ALPHAS) -> None:
        self.plan = plan
        self._factors = factors
        self._generator = torch.Generator().manual_seed(seed)
        self._errors: dict[Stored, Tensor] = {}

    def add(self, sample: AttentionSample) -> None:
        """Adds the errors of one batch; nothing where its texts end within the exact tokens."""
        exact = max(p.sinks + p.retention.window for p in (self.plan.keys, self.plan.values))
        tokens = sample.keys.shape[2]
        if tokens <= exact + 1:
            return
        drawn = torch.randint(exact + 1, tokens, (QUERIES,), generator=self._generator)
        positions = drawn.unique().to(sample.q.device)
        queries = _Queries(sample, positions, self.plan.before_rope)
        for kind in STORED:
            plan, basis, _ = self.plan.stored(kind)
            if plan.codec.identity or plan.codec.axis == "channel":
                continue
            x = sample.stored(kind, self.plan.before_rope)
            x = (x if basis is None else basis.store(x)).float()
            errors_of = queries.key_errors if kind == "keys" else queries.value_errors
            found = [
                errors_of(plan, basis, fake_quantize(replace(plan.codec, clip=alpha), x) - x)
                for alpha in self._factors
            ]
            self._errors[kind] = self._errors.get(kind, 0) + torch.stack(found).cpu()

    def clip(self, kind: Stored) -> float | tuple[float, ...]:
        """The factors with the least errors, of ``keys`` or ``values``; 1 where nothing was seen
        or the codec has no groups of channels."""
        if kind not in self._errors:
            return 1.0
        best = self._errors[kind].argmin(0).flatten()
        return tuple(self._factors[int(i)] for i in best)

    def error(self, kind: Stored) -> float:
        """The sum over groups of the errors of ``keys`` or ``values`` at those factors; 0 where
        nothing was seen."""
        return float(self._errors[kind].amin(0).sum()) if kind in self._errors else 0.0

    def clipped(self) -> LayerPlan:
        """The layer's plan with the best factors."""
        keys, values = (
            replace(plan, codec=replace(plan.codec, clip=self.clip(kind)))
            for plan, kind in zip((self.plan.keys, self.plan.values), STORED, strict=True)
        )
        return replace(self.plan, keys=keys, values=values)


class _Queries:
    """Some queries of an attention, and what errors of keys or values do to their outputs.

    Errors are ``[B, H, T, D]``, by token and channel, in the order of the cache; their squared
    effects are ``[H / heads of a group, groups]``.
    """

    def __init__(self, sample: AttentionSample, positions: Tensor, before_rope: bool) -> None:
        self._sample, self._positions, self._before_rope = sample, positions, before_rope
        self._q = sample.rows(sample.q[:, :, positions]).float()
        self._values = sample.values.float()
        self._products = self._q @ sample.keys.float().transpose(2, 3)
        self._weights = sample.weights(self._products, positions)

    def _rounded(self, plan: TensorPlan) -> Tensor:
        """Masks of the tokens that each query finds rounded, ``[Hq / H * n, T]``."""
        token = torch.arange(self._weights.shape[3], device=self._positions.device)
        beyond = token < (self._positions - plan.retention.window).unsqueeze(1)
        heads_per_group = self._weights.shape[2] // len(self._positions)
        return (beyond & (token >= plan.sinks)).repeat(heads_per_group, 1)

    def value_errors(self, plan: TensorPlan, _: ChannelBasis | None, errors: Tensor) -> Tensor:
        """Effects of errors of values: an output channel is a sum of one value channel."""
        outputs = (self._weights * self._rounded(plan)) @ errors
        squares = outputs.square().sum((0, 2))
        members = plan.codec.groups.members(len(squares), squares.shape[1], squares.device)
        zeros = squares.new_zeros(len(squares), int(members.max()) + 1)
        return _over_heads(plan, zeros.scatter_add_(1, members, squares), errors)

    def key_errors(self, plan: TensorPlan, basis: ChannelBasis | None, errors: Tensor) -> Tensor:
        """Effects of errors of keys, one group at a time: each changes all weights."""
        q = self._q if basis is None else basis.store(self._q)
        outputs, rounded = self._weights @ self._values, self._rounded(plan)
        members = plan.codec.groups.members(errors.shape[1], errors.shape[3], errors.device)
        squares = []
        for group in range(int(members.max()) + 1):
            inside = (members == group)[None, :, None]
            of_group = errors * inside
            if self._before_rope:
                of_group = self._sample.rotated(of_group)
            moved = q @ of_group.transpose(2, 3) * rounded
            weights = self._sample.weights(self._products + moved, self._positions)
            squares.append((weights @ self._values - outputs).square().sum((0, 2, 3)))
        return _over_heads(plan, torch.stack(squares, dim=1), errors)


def _over_heads(plan: TensorPlan, squares: Tensor, errors: Tensor) -> Tensor:
    """``[H, groups]``, summed over the heads that a group spans."""
    span = plan.codec.groups.heads_per_group(errors.shape[3])
    total: Tensor = squares.unflatten(0, (-1, span)).sum(1)
    return total
