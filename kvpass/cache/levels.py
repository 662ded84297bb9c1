"""The levels of a `TensorPlan`: codecs of the chunks of a prompt (Cocktail)."""

from __future__ import annotations

from kvpass.cache.codec import FP, Codec
from kvpass.errors import PlanError, shown


def check_levels(levels: tuple[Codec, ...], chunk: int) -> None:
    """Raises:
    PlanError: if chunks of ``chunk`` tokens cannot be stored so, or not be asked for.
    """
    if not levels or type(chunk) is not int or chunk < 1:
        raise PlanError(
            f"chunk={shown(chunk)} is not supported with {len(levels)} levels; allowed: a positive "
            "number of tokens, with at least one level."
        )
    for codec in levels:
        if chunk % codec.token_group:
            raise PlanError(
                f"chunk={chunk} is no multiple of the group of {codec.token_group} tokens that "
                f"share a scale in {codec}."
            )
        if codec.offline or codec.outliers:
            raise PlanError(
                f"Chunks cannot be stored as {codec}: calibrated ranges and outliers are not "
                "supported there."
            )
    if len(set(labels(levels))) < len(levels) + 1:
        raise PlanError(
            f"Levels {', '.join(map(str, levels))} cannot be told apart: each needs other bits."
        )


def labels(levels: tuple[Codec, ...]) -> tuple[float, ...]:
    """The bits by which a request asks for each level, and for exact tokens. A level that is stored
    as it is goes by its number."""
    return (*(i if c.identity else c.bits for i, c in enumerate(levels)), FP.bits)


def level_names(levels: tuple[Codec, ...]) -> tuple[str, ...]:
    """The tensors of all levels: codes, and params where there are any."""
    found: list[str] = []
    for i, codec in enumerate(levels):
        found += [f"codes{i}"] if codec.identity else [f"codes{i}", f"params{i}"]
    return tuple(found)
