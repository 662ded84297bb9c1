"""Channels that are alike share a group: ranges, clusters and orders (SKVQ, section 3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from kvpass.calibration.samples import Rotation
from kvpass.errors import OptionError
from kvpass.format.order import ChannelOrder


class Ranges:
    """The least and the largest value of every channel, of all tokens but the first ``skip``."""

    def __init__(self, skip: int = 0) -> None:
        self._skip = skip
        self.low: Tensor | None = None
        self.high: Tensor | None = None

    def add(self, x: Tensor) -> None:
        """``x``: ``[B, H, T, D]``."""
        tokens = x[:, :, self._skip :].float()
        if not tokens.shape[2]:
            return
        low, high = tokens.amin((0, 2)).cpu(), tokens.amax((0, 2)).cpu()
        self.low = low if self.low is None else torch.minimum(self.low, low)
        self.high = high if self.high is None else torch.maximum(self.high, high)

    def features(self) -> Tensor:
        """``[H, D, 2]``: what channels are compared by.

        Raises:
            OptionError: if no token was seen.
        """
        if self.low is None or self.high is None:
            raise OptionError(f"No text is longer than {self._skip} tokens; allowed: longer ones.")
        return torch.stack([self.low, self.high], dim=2)


@dataclass(frozen=True)
class Clusters:
    """Groups of channels of every head.

    Attributes:
        order: the channels, those of a group together.
        sizes: of the groups, head by head; None if all are equal.
        pairs: groups are two runs of channels, see `kvpass.format.groups.Groups`.
    """

    order: ChannelOrder
    sizes: tuple[int, ...] | None
    pairs: bool


def cluster(
    features: Tensor, group: int, rotations: Sequence[Rotation], seed: int, balanced: bool
) -> Clusters | None:
    """Groups of ``group`` channels, on average, by k-means of their features.

    Channels that are rotated together stay together: what is clustered are such pairs.

    Args:
        features: ``[H, D, F]``.
        group: channels.
        rotations: which channels are rotated together.
        seed: of k-means.
        balanced: the clusters are cut into groups of equal size; otherwise they are the groups.

    Returns:
        None where no order changes a group: there is one group only, or one pair in each.
    """
    heads, dim, _ = features.shape
    whole = len(rotations) == 1 and (rotations[0].start, rotations[0].stop) == (0, dim)
    pairs = whole and rotations[0].kind == "halves"
    if group >= dim or (pairs and group % 2):
        return None
    sections = _sections(dim, rotations)
    found = [_head(features[h], group, sections, seed, balanced) for h in range(heads)]
    orders = torch.stack([order for order, _ in found])
    sizes = None if balanced else tuple(n for _, each in found for n in each)
    if sizes is not None and not (whole or not rotations):
        raise OptionError(
            "Groups of unequal size are not supported where only some channels are rotated; "
            "allowed: balanced groups."
        )
    return Clusters(ChannelOrder.of(orders), sizes, pairs)


def _sections(dim: int, rotations: Sequence[Rotation]) -> list[Tensor]:
    """The units that move as a whole, int64 ``[units, 1 or 2]``, section by section."""
    found, at = [], 0
    for r in sorted(rotations, key=lambda r: r.start):
        if at < r.start:
            found.append(torch.arange(at, r.start).unsqueeze(1))
        rotated = torch.arange(r.start, r.stop)
        found.append(rotated.view(2, -1).T if r.kind == "halves" else rotated.view(-1, 2))
        at = r.stop
    if at < dim:
        found.append(torch.arange(at, dim).unsqueeze(1))
    return found


def _head(
    features: Tensor, group: int, sections: list[Tensor], seed: int, balanced: bool
) -> tuple[Tensor, list[int]]:
    """The order of one head's channels ``[D]``, and the sizes of its clusters."""
    orders, sizes = [], []
    for units in sections:
        clusters = max(1, units.numel() // group)
        ranked, counts = _ranked(features[units].flatten(1), clusters, seed)
        sizes += [count * units.shape[1] for count in counts]
        chosen = units[ranked]
        # Halves lie half a section apart, neighbours side by side.
        halves = units.shape[1] == 2 and int(units[0, 1] - units[0, 0]) != 1
        orders.append((chosen.T if halves else chosen).reshape(-1))
    return torch.cat(orders), [] if balanced else sizes


def _ranked(features: Tensor, clusters: int, seed: int) -> tuple[Tensor, list[int]]:
    """Units in the order of their clusters, those with the narrowest ranges first, and how many
    each cluster has."""
    if clusters == 1:
        return torch.arange(len(features)), [len(features)]
    widths = (features[:, 1::2] - features[:, 0::2]).mean(1)
    if len(features.unique(dim=0)) < clusters:
        # Any cut is as good.
        parts = torch.arange(len(features)).tensor_split(clusters)
        labels = torch.cat([torch.full_like(part, i) for i, part in enumerate(parts)])
    else:
        means = k_means()(n_clusters=clusters, n_init=4, random_state=seed)
        labels = torch.from_numpy(means.fit_predict(features.double().numpy())).long()
    counts = torch.bincount(labels, minlength=clusters)
    width = torch.zeros(clusters).index_add_(0, labels, widths.float()) / counts
    by_width = width.argsort(stable=True)
    rank = by_width.argsort()[labels]
    order = sorted(range(len(features)), key=lambda i: (int(rank[i]), float(widths[i])))
    return torch.tensor(order), counts[by_width].tolist()


def k_means() -> Any:
    """scikit-learn's class.

    Raises:
        OptionError: if it is not installed.
    """
    if find_spec("sklearn") is None:
        raise OptionError(
            "This recipe needs scikit-learn, which is not installed: "
            "pip install 'kvpass[calibration]'; skvq recipes do without it with reorder=False."
        )
    from sklearn.cluster import KMeans

    return KMeans
