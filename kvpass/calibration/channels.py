"""Channels that are alike share a group: clusters and orders (SKVQ, section 3.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpass.calibration.samples import STORED, AttentionSample, Stored
from kvpass.calibration.thresholds import Thresholds
from kvpass.errors import OptionError, check_installed
from kvpass.format.channels import ChannelOrder
from kvpass.format.codec import Codec
from kvpass.format.rope import Rope
from kvpass.plan import LayerPlan


class Sections(NamedTuple):
    """The channels of a head, by what moves as a whole.

    Attributes:
        units: int64 ``[units, 1 or 2]`` for each section: channels on their own, or pairs that are
            rotated together.
        codec: with groups that keep such pairs together.
    """

    units: Sequence[Tensor]
    codec: Codec


def sections(dim: int, codec: Codec, rotations: Sequence[Rope]) -> Sections | None:
    """The sections of a head of ``dim`` channels, rotated so; None where no order changes a group:
    there is one only, or one pair in each."""
    half_split = _all_rotated(dim, rotations) and rotations[0].kind == "halves"
    if codec.group >= dim or (half_split and codec.group % 2):
        return None
    units, at = [], 0
    for r in sorted(rotations, key=lambda r: r.start):
        if at < r.start:
            units.append(torch.arange(at, r.start).unsqueeze(1))
        rotated = torch.arange(r.start, r.stop)
        units.append(rotated.view(2, -1).T if r.kind == "halves" else rotated.view(-1, 2))
        at = r.stop
    if at < dim:
        units.append(torch.arange(at, dim).unsqueeze(1))
    return Sections(units, replace(codec, half_split=half_split))


def _all_rotated(dim: int, rotations: Sequence[Rope]) -> bool:
    return len(rotations) == 1 and (rotations[0].start, rotations[0].stop) == (0, dim)


def arranged(units: Tensor, ranked: Tensor) -> Tensor:
    """The channels of one section's units in the order ``ranked``, int64 ``[channels]``."""
    chosen = units[ranked]
    # Halves lie half a section apart, neighbours side by side.
    halves = units.shape[1] == 2 and int(units[0, 1] - units[0, 0]) != 1
    return (chosen.T if halves else chosen).reshape(-1)


Order = Callable[[Stored, Codec], tuple[ChannelOrder | None, Codec]]


def with_orders(plan: LayerPlan, order: Order) -> LayerPlan:
    """A layer's plan with the orders and the codecs that ``order`` finds; keys before their rotary
    embedding stay as they are."""
    found: dict[str, Any] = {}
    for kind, basis in zip(STORED, ("key_basis", "value_basis"), strict=True):
        if kind == "values" or not plan.before_rope:
            tensor, *_ = plan.stored(kind)
            found[basis], codec = order(kind, tensor.codec)
            found[kind] = replace(tensor, codec=codec)
    return replace(plan, **found)


class Clusters:
    """Groups of one layer's channels, on average as large as the codec's: k-means of their ranges
    (SKVQ, section 3.1).

    Args:
        plan: the layer's, in the model's order.
        tokens: how many all texts have behind the sinks.
        seed: for k-means.
    """

    def __init__(self, plan: LayerPlan, tokens: int, seed: int) -> None:
        self._plan, self._seed = plan, seed
        self._ranges = {kind: Thresholds(0, tokens, plan.keys.sinks) for kind in STORED}
        self._rotations: tuple[Rope, ...] = ()

    def add(self, sample: AttentionSample) -> None:
        """Adds the tokens of one batch."""
        self._rotations = sample.rotations
        for kind, ranges in self._ranges.items():
            ranges.add(sample.stored(kind, before_rope=False))

    def ordered(self) -> LayerPlan:
        """The layer's plan with these groups; raises as `cluster`."""
        return with_orders(self._plan, self._order)

    def _order(self, kind: Stored, codec: Codec) -> tuple[ChannelOrder | None, Codec]:
        features = torch.stack(self._ranges[kind].bounds(), dim=2).cpu()
        return cluster(features, codec, self._rotations if kind == "keys" else (), self._seed)


def cluster(
    features: Tensor, codec: Codec, rotations: Sequence[Rope], seed: int
) -> tuple[ChannelOrder | None, Codec]:
    """Groups of channels of every head, of unequal size.

    Channels that are rotated together stay together: what is clustered are such pairs.

    Args:
        features: least and largest value of every channel, ``[H, D, 2]``.
        codec: whose groups they are.
        rotations: which channels are rotated together.
        seed: for k-means.

    Returns:
        The order that puts the channels of a group together, and the codec with these groups. The
        order is None where none changes a group, see `sections`.

    Raises:
        OptionError: if only some channels are rotated, or scikit-learn is not installed.
    """
    dim = features.shape[1]
    parts = sections(dim, codec, rotations)
    if parts is None:
        return None, codec
    if rotations and not _all_rotated(dim, rotations):
        raise OptionError(
            "Groups of unequal size are not supported where only some channels are rotated; "
            "allowed: balanced groups."
        )
    (units,) = parts.units
    count = max(1, dim // codec.group)
    found = [_ranked(head[units].flatten(1), count, seed) for head in features]
    order = ChannelOrder.of(torch.stack([arranged(units, ranked) for ranked, _ in found]))
    sizes = tuple(size * units.shape[1] for _, counts in found for size in counts)
    return order, replace(parts.codec, sizes=sizes)


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
    but_for = "skvq recipes do without it, but for reorder='clusters'"
    check_installed(
        "This recipe", "scikit-learn", "sklearn", extra="calibration", otherwise=but_for
    )
    from sklearn.cluster import KMeans

    return KMeans
