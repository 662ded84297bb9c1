"""How far the ranges of groups are clipped: the search of SKVQ, eq. 3."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvpass.calibration.samples import AttentionSample
from kvpass.format.codec import Codec
from kvpass.format.groups import Groups
from kvpass.format.order import ChannelOrder
from kvpass.format.quantize import fake_quantize
from kvpass.format.tensor_plan import TensorPlan
from kvpass.plan import LayerPlan

# Factors that are tried, 0.5 to 1.
ALPHAS = tuple(round(0.5 + 0.05 * i, 2) for i in range(11))

# Of each batch, drawn at random.
QUERIES = 32


class ClipSearch:
    """Sums of the squared errors of one layer's attention output, by group and factor.

    One tensor, and of the keys one group, is rounded at a time: the errors of the others are as
    likely to add to it as to take from it. As in a decode step, a query sees the sinks and its
    window exactly, and all that lies between them rounded.
    """

    def __init__(self, plan: LayerPlan, seed: int) -> None:
        self._plan = plan
        self._generator = torch.Generator().manual_seed(seed)
        self._errors: dict[str, Tensor] = {}

    def add(self, seen: AttentionSample) -> None:
        """Adds the errors of one batch; nothing where its texts end within the exact tokens."""
        exact = max(p.sinks + p.retention.window for p in (self._plan.keys, self._plan.values))
        tokens = seen.keys.shape[2]
        if tokens <= exact + 1:
            return
        drawn = torch.randint(exact + 1, tokens, (QUERIES,), generator=self._generator)
        positions = drawn.unique().to(seen.q.device)
        rows = seen.rows(seen.q[:, :, positions]).float()
        products = rows @ seen.keys.float().transpose(2, 3)
        weights = seen.weights(products, positions)
        self._sum("values", self._value_errors(seen, weights, positions))
        self._sum("keys", self._key_errors(seen, rows, products, weights, positions))

    def clip(self, kind: str) -> float | tuple[float, ...]:
        """The factors with the least errors, of ``keys`` or ``values``; 1 where nothing was seen
        or the codec has no groups of channels."""
        if kind not in self._errors:
            return 1.0
        best = self._errors[kind].argmin(0).flatten()
        return tuple(ALPHAS[int(i)] for i in best)

    def _sum(self, kind: str, errors: Tensor | None) -> None:
        if errors is not None:
            known = self._errors.get(kind)
            self._errors[kind] = errors if known is None else known + errors

    def _value_errors(
        self, seen: AttentionSample, weights: Tensor, positions: Tensor
    ) -> Tensor | None:
        """``[factors, H, groups]``: an output channel is a sum of one value channel."""
        plan, order = self._plan.values, self._plan.value_order
        if not _clips(plan.codec):
            return None
        weights = weights * _rounded(plan, weights, positions)
        values = _stored(seen.values, order)
        found = []
        for alpha in ALPHAS:
            errors = weights @ (_round(plan.codec, alpha, values) - values)
            found.append(_by_group(plan.codec.groups, errors.square().sum((0, 2))))
        return torch.stack(found).cpu()

    def _key_errors(
        self,
        seen: AttentionSample,
        rows: Tensor,
        products: Tensor,
        weights: Tensor,
        positions: Tensor,
    ) -> Tensor | None:
        """``[factors, H, groups]``: what one group of rounded keys does to the output."""
        plan, order = self._plan.keys, self._plan.key_order
        if not _clips(plan.codec):
            return None
        keys, values = _stored(seen.keys, order), seen.values.float()
        rows = rows if order is None else order.store(rows)
        out, groups = weights @ values, plan.codec.groups
        rounded = _rounded(plan, weights, positions)
        members = groups.members(keys.shape[1], keys.shape[3], keys.device)
        found = []
        for alpha in ALPHAS:
            errors = _round(plan.codec, alpha, keys) - keys
            each = []
            for group in range(int(members.max()) + 1):
                inside = (members == group)[None, :, None]
                moved = (rows * inside) @ errors.transpose(2, 3) * rounded
                change = seen.weights(products + moved, positions) @ values - out
                each.append(change.square().sum((0, 2, 3)))
            found.append(_by_heads(groups, torch.stack(each, dim=1), keys.shape[3]))
        return torch.stack(found).cpu()


def _clips(codec: Codec) -> bool:
    return not codec.identity and codec.axis == "token"


def _stored(x: Tensor, order: ChannelOrder | None) -> Tensor:
    return (x if order is None else order.store(x)).float()


def _round(codec: Codec, alpha: float, x: Tensor) -> Tensor:
    """``x`` encoded with all ranges clipped by ``alpha``, and decoded."""
    return fake_quantize(replace(codec, clip=alpha), x)


def _rounded(plan: TensorPlan, weights: Tensor, positions: Tensor) -> Tensor:
    """Which tokens a query of ``[B, H, rows, T]`` finds rounded, ``[rows, T]``."""
    token = torch.arange(weights.shape[3], device=weights.device)
    beyond = token < (positions - plan.retention.window).unsqueeze(1)
    groups = weights.shape[2] // len(positions)
    return (beyond & (token >= plan.sinks)).repeat(groups, 1)


def _by_group(groups: Groups, errors: Tensor) -> Tensor:
    """Errors of channels ``[H, D]``, summed over each group, ``[H/k, groups]``."""
    heads, dim = errors.shape
    members = groups.members(heads, dim, errors.device)
    count = int(members.max()) + 1
    return _by_heads(groups, errors.new_zeros(heads, count).scatter_add_(1, members, errors), dim)


def _by_heads(groups: Groups, errors: Tensor, dim: int) -> Tensor:
    """``[H, groups]``, summed over the heads that a group spans."""
    total: Tensor = errors.unflatten(0, (-1, groups.heads_per_group(dim))).sum(1)
    return total
