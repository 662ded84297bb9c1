"""Orders of channels by the error of the attention's output that they predict."""

from __future__ import annotations

import math
from itertools import combinations

import torch
from torch import Tensor

from kvpass.calibration.channels import arranged, sections, with_orders
from kvpass.calibration.samples import STORED, AttentionSample, Stored
from kvpass.format.channels import ChannelOrder
from kvpass.format.codec import Codec
from kvpass.format.rope import Rope
from kvpass.plan import LayerPlan

# Of each layer, drawn from all texts.
TOKENS = 1024
# A swap of channels must lessen the error by this much.
_GAIN = 1e-4


class OrderSearch:
    """Groups of one layer's channels, all of one size, whose rounding is predicted to change the
    attention's output least.

    Rounding adds noise of the width of the group's range to each of its channels. A key's counts by
    the queries' energy in the channel, a value's alike in all. Ranges are those of single tokens,
    so that a bias is none.

    Args:
        plan: the layer's, in the model's order.
        tokens: how many all texts have behind the sinks.
        seed: for the tokens that are drawn.
    """

    def __init__(self, plan: LayerPlan, tokens: int, seed: int) -> None:
        self._plan = plan
        self._share = min(1.0, TOKENS / max(1, tokens))
        self._generator = torch.Generator().manual_seed(seed)
        # Of each batch, [H, n, D].
        self._tokens: dict[Stored, list[Tensor]] = {kind: [] for kind in STORED}
        # Sums of the queries' squares, [H, D].
        self._energies: Tensor | float = 0.0
        self._rotations: tuple[Rope, ...] = ()

    def add(self, sample: AttentionSample) -> None:
        """Adds tokens and queries of one batch."""
        self._rotations = sample.rotations
        self._energies = self._energies + sample.rows(sample.q).float().square().sum((0, 2)).cpu()
        sinks = self._plan.keys.sinks
        count = max(0, sample.keys.shape[2] - sinks)
        few = math.ceil(self._share * count)
        drawn = sinks + torch.randperm(count, generator=self._generator)[:few]
        for kind, tokens in self._tokens.items():
            x = sample.stored(kind, before_rope=False)
            tokens.append(x[:, :, drawn.to(x.device)].transpose(0, 1).flatten(1, 2).cpu())

    def ordered(self) -> LayerPlan:
        """The layer's plan with these groups."""
        return with_orders(self._plan, self._order)

    def _order(self, kind: Stored, codec: Codec) -> tuple[ChannelOrder | None, Codec]:
        x = torch.cat(self._tokens[kind], dim=1).float()
        heads, count, dim = x.shape
        parts = sections(dim, codec, self._rotations if kind == "keys" else ())
        if parts is None or not count:
            return None, codec
        weights = torch.ones(heads, dim)
        if kind == "keys":
            weights = weights * self._energies

        def head_order(head: int) -> Tensor:
            labels = ((u, _groups(x[head], weights[head], u, codec.group)) for u in parts.units)
            return torch.cat([arranged(u, found.argsort(stable=True)) for u, found in labels])

        order = [head_order(head) for head in range(heads)]
        return ChannelOrder.of(torch.stack(order)), parts.codec


def _groups(x: Tensor, weights: Tensor, units: Tensor, group: int) -> Tensor:
    """The group of each unit of channels, int64 ``[units]``, for a head's tokens ``x`` ``[n, D]``
    and weights of its channels ``[D]``."""
    count = max(1, units.numel() // group)
    even = torch.arange(len(units)) * count // len(units)
    # How far each unit reaches down and up, [n, units, 2]: the width of a group is the sum of both
    # at their largest.
    reach = torch.stack([-x[:, units].amin(2), x[:, units].amax(2)], dim=2)
    weight = weights[units].sum(1)
    by_width = even[reach.amax(0).sum(1).argsort().argsort()]
    found = [_swapped(reach, weight, start) for start in (even, by_width)]
    return min(found, key=lambda labels: _error(reach, weight, labels))


def _error(reach: Tensor, weights: Tensor, labels: Tensor) -> float:
    """The predicted error of groups, up to a factor."""
    members = [labels == group for group in range(int(labels.max()) + 1)]
    squares = [reach[:, inside].amax(1).sum(1).square().mean() for inside in members]
    parts = zip(squares, members, strict=True)
    return sum(float(square * weights[inside].sum()) for square, inside in parts)


def _swapped(reach: Tensor, weights: Tensor, labels: Tensor) -> Tensor:
    """The groups ``labels`` after swaps of two units, the best of two groups at a time, until none
    lessens the error."""
    labels, improved = labels.clone(), True
    while improved:
        improved = False
        for a, b in combinations(range(int(labels.max()) + 1), 2):
            one, other = ((labels == group).nonzero().flatten() for group in (a, b))
            both = torch.cat([one, other])
            now = _error(reach[:, both], weights[both], (labels[both] == b).long())
            errors = _replaced(reach, weights, one, other)
            errors = errors + _replaced(reach, weights, other, one).T
            i, j = divmod(int(errors.argmin()), len(other))
            if float(errors[i, j]) < (1 - _GAIN) * now:
                labels[one[i]], labels[other[j]] = b, a
                improved = True
    return labels


def _replaced(reach: Tensor, weights: Tensor, members: Tensor, others: Tensor) -> Tensor:
    """The error of the group ``members`` with each of them replaced by each of ``others``,
    ``[members, others]``."""
    inside = reach[:, members]
    nothing = torch.full_like(inside[:, :1], -math.inf)
    first, second = torch.cat([inside, nothing], dim=1).topk(2, dim=1).values.split(1, dim=1)
    rest = torch.where(inside == first, second, first)
    width = torch.maximum(rest.unsqueeze(2), reach[:, None, others]).sum(3)
    total = weights[members].sum() - weights[members].unsqueeze(1) + weights[others]
    return width.square().mean(0) * total
