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
    """Keys of small norm: the tokens that attract attention (Devoto et al., 2024), found without
    the attention weights that no fused kernel has."""
    norms: Tensor = keys.float().norm(dim=-1)
    return -norms


@register_filter("outliers")
def outliers(tokens: Tensor) -> Tensor:
    """Tokens with the widest range, which rounding changes most."""
    low, high = tokens.float().aminmax(dim=-1)
    return high - low


def retain(retained: Tensor, positions: Tensor, name: str, start: int, x: Tensor) -> None:
    """Lets the best of the ``retained`` tokens and of tokens ``x`` ``[B, H, n, D]``, from position
    ``start`` on, take the slots of the retained ones, in place.

    ``positions`` of retained tokens: int32 ``[B, H, N]``, -1 where there is none.
    """
    best, known = chosen(retained, positions, name, start, x)
    retained.copy_(best)
    positions.copy_(known)


def chosen(
    retained: Tensor, positions: Tensor, name: str, start: int, x: Tensor
) -> tuple[Tensor, Tensor]:
    """What `retain` writes: tokens and their positions, the best ones first."""
    tokens = torch.cat([retained, x], dim=2)
    scores = filter_named(name)(tokens)
    if scores.shape != tokens.shape[:3]:
        raise OptionError(
            f"Filter '{name}' returned scores {list(scores.shape)} for tokens "
            f"{list(tokens.shape)}; allowed: one per token."
        )
    new = torch.arange(start, start + x.shape[2], dtype=torch.int32, device=x.device)
    known = torch.cat([positions, new.expand(*x.shape[:2], -1)], dim=2)
    scores = scores.masked_fill(known < 0, -torch.inf)
    # The earlier one of two with equal scores.
    order = scores.sort(dim=2, descending=True, stable=True).indices
    # Not a slice: slicing a fake tensor asks for the GPU that it pretends to be on.
    best = order.narrow(2, 0, retained.shape[2])
    return tokens.gather(2, best.unsqueeze(3).expand_as(retained)), known.gather(2, best)


def with_retained(out: Tensor, first: int, retained: Tensor, positions: Tensor) -> Tensor:
    """``out``, tokens ``[B, H, n, D]`` from position ``first`` on, with those of them that are
    ``retained``."""
    n = out.shape[2]
    inside = (positions >= first) & (positions < first + n)
    # The others go behind the last token.
    index = torch.where(inside, positions - first, n).long().unsqueeze(3).expand(retained.shape)
    longer = torch.cat([out, out.new_empty((*out.shape[:2], 1, out.shape[3]))], dim=2)
    return longer.scatter_(2, index, retained.to(out.dtype)).narrow(2, 0, n)


def filter_named(name: str) -> Filter:
    """The filter of that name.

    Raises:
        OptionError: if there is none.
    """
    if name not in FILTERS:
        raise OptionError(unknown("filter", name, FILTERS))
    return FILTERS[name]
