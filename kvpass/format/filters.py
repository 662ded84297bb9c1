"""Filters: which tokens stay exact although they have left the exact window (SKVQ, section 3.2).

A filter gives every token of a cache tensor a score; the tokens with the highest scores of each KV
head stay exact. The first tokens, which stay too, are no filter but `RetentionPolicy.sinks`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvpass.errors import OptionError, shown, unknown

# From tokens [B, H, n, D] to scores [B, H, n]. A function of each token alone: what stays is
# scored again with every token that comes.
Filter = Callable[[Tensor], Tensor]
FILTERS: dict[str, Filter] = {}


def register_filter(name: str) -> Callable[[Filter], Filter]:
    """Makes a filter known under ``name``, which plans then can say.

    Raises:
        OptionError: if the name is taken, or has other characters than letters, digits and ``_``.
    """
    if name in FILTERS:
        raise OptionError(f"A filter named '{name}' is registered already.")
    if not name.isidentifier():
        raise OptionError(f"Filter name {shown(name)} is not supported; allowed: an identifier.")

    def register(function: Filter) -> Filter:
        FILTERS[name] = function
        return function

    return register


@register_filter("heavy_hitters")
def heavy_hitters(keys: Tensor) -> Tensor:
    """Keys of small norm: the tokens that attract attention (Devoto et al., 2024), as told from the
    cache alone, without the attention weights that no fused kernel has."""
    norms: Tensor = keys.float().norm(dim=-1)
    return -norms


@register_filter("outliers")
def outliers(tokens: Tensor) -> Tensor:
    """Tokens with the widest range, which rounding changes most."""
    low, high = tokens.float().aminmax(dim=-1)
    return high - low


def empty_kept(new: Tensor, count: int) -> list[Tensor]:
    """No tokens: ``[B, H, count, D]`` for them, and their positions, int32 ``[B, H, count]``, where
    -1 says that there is none."""
    b, h, _, d = new.shape
    kept = new.new_zeros((b, h, count, d))
    return [kept, new.new_full((b, h, count), -1, dtype=torch.int32)]


def keep(kept: Tensor, places: Tensor, name: str, start: int, x: Tensor) -> None:
    """Lets the best of ``kept`` and of tokens ``x`` ``[B, H, n, D]``, from position ``start`` on,
    take the places of ``kept``."""
    scores = filter_named(name)(torch.cat([kept, x], dim=2))
    if scores.shape != (*x.shape[:2], kept.shape[2] + x.shape[2]):
        raise OptionError(
            f"Filter '{name}' returned scores {list(scores.shape)} for tokens "
            f"{[*x.shape[:2], kept.shape[2] + x.shape[2], x.shape[3]]}; allowed: one per token."
        )
    new = torch.arange(start, start + x.shape[2], dtype=torch.int32, device=x.device)
    known = torch.cat([places, new.expand(*x.shape[:2], -1)], dim=2)
    scores = scores.masked_fill(known < 0, -torch.inf)
    # The earlier one of two with equal scores.
    best = scores.sort(dim=2, descending=True, stable=True).indices[..., : kept.shape[2]]
    chosen = torch.cat([kept, x], dim=2).take_along_dim(best.unsqueeze(3), dim=2)
    places.copy_(known.take_along_dim(best, dim=2))
    kept.copy_(chosen)


def restored(out: Tensor, first: int, kept: Tensor, places: Tensor) -> Tensor:
    """``out``, tokens ``[B, H, n, D]`` from position ``first`` on, with those of them that are
    ``kept``."""
    n = out.shape[2]
    inside = (places >= first) & (places < first + n)
    # The others go behind the last token.
    index = torch.where(inside, places - first, n).long().unsqueeze(3).expand(kept.shape)
    longer = torch.cat([out, out.new_empty((*out.shape[:2], 1, out.shape[3]))], dim=2)
    return longer.scatter_(2, index, kept.to(out.dtype))[:, :, :n]


def filter_named(name: str) -> Filter:
    """The filter of that name.

    Raises:
        OptionError: if there is none.
    """
    if name not in FILTERS:
        raise OptionError(unknown("filter", name, FILTERS))
    return FILTERS[name]
