"""Channels that are alike share a group: clusters and orders (SKVQ, section 3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from kvpass.errors import OptionError
from kvpass.format.channels import ChannelOrder
from kvpass.format.codec import Codec
from kvpass.format.rope import Rope


def cluster(
    features: Tensor, codec: Codec, rotations: Sequence[Rope], seed: int, balanced: bool
) -> tuple[ChannelOrder | None, Codec]:
    """Groups of channels of every head, on average as large as the codec's, by k-means.

    Channels that are rotated together stay together: what is clustered are such pairs.

    Args:
        features: least and largest value of every channel, ``[H, D, 2]``.
        codec: whose groups they are.
        rotations: which channels are rotated together.
        seed: for k-means.
        balanced: the clusters are cut into groups of equal size; otherwise they are the groups.

    Returns:
        The order that puts the channels of a group together, and the codec with these groups. The
        order is None where none changes a group: there is one group only, or one pair in each.

    Raises:
        OptionError: if such groups cannot be of unequal size, or scikit-learn is not installed.
    """
    heads, dim, _ = features.shape
    all_rotated = len(rotations) == 1 and (rotations[0].start, rotations[0].stop) == (0, dim)
    half_split = all_rotated and rotations[0].kind == "halves"
    if codec.group >= dim or (half_split and codec.group % 2):
        return None, codec
    if not balanced and rotations and not all_rotated:
        raise OptionError(
            "Groups of unequal size are not supported where only some channels are rotated; "
            "allowed: balanced groups."
        )
    sections = _sections(dim, rotations)
    found = [_head(features[h], codec.group, sections, seed) for h in range(heads)]
    sizes = None if balanced else tuple(size for _, sizes in found for size in sizes)
    order = ChannelOrder.of(torch.stack([order for order, _ in found]))
    return order, replace(codec, half_split=half_split, sizes=sizes)


def _sections(dim: int, rotations: Sequence[Rope]) -> list[Tensor]:
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
    features: Tensor, group: int, sections: list[Tensor], seed: int
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
    return torch.cat(orders), sizes


def _ranked(features: Tensor, clusters: int, seed: int) -> tuple[Tensor, list[int]]:
    """Units in the order of their clusters, those with the narrowest ranges first, and how many
    units each cluster has."""
    if clusters == 1:
        return torch.arange(len(features)), [len(features)]
    widths = (features[:, 1::2] - features[:, 0::2]).mean(1)
    if len(features.unique(dim=0)) < clusters:
        # Any cut is as good.
        labels = torch.arange(len(features)) * clusters // len(features)
    else:
        means = k_means()(n_clusters=clusters, n_init=4, random_state=seed)
        labels = torch.from_numpy(means.fit_predict(features.double().numpy())).long()
    counts = torch.bincount(labels, minlength=clusters)
    width = torch.zeros(clusters).index_add_(0, labels, widths.float()) / counts
    by_width = width.argsort(stable=True)
    # By the width of the cluster, then by the unit's own.
    order = widths.argsort(stable=True)
    order = order[by_width.argsort()[labels[order]].argsort(stable=True)]
    return order, counts[by_width].tolist()


def k_means() -> Any:
    """scikit-learn's ``KMeans``; an `OptionError` if it is not installed."""
    if find_spec("sklearn") is None:
        raise OptionError(
            "This recipe needs scikit-learn, which is not installed: "
            "pip install 'kvpass[calibration]'; skvq recipes do without it with reorder=False."
        )
    from sklearn.cluster import KMeans

    return KMeans
