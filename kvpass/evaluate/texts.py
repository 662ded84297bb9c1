"""Texts to score and texts to calibrate on, which have nothing in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvpass.errors import OptionError, shown

# Of texts without others to calibrate on, each fourth one is not scored.
_EACH = 4
# Characters that two texts may have in common by chance, a licence's first line say.
_FEW = 100


def split_texts(
    texts: Iterable[Any], calibration_texts: Iterable[Any] | None, calibrates: bool
) -> tuple[list[str], list[str], str]:
    """Texts to score, texts to calibrate on, and a sentence about the latter.

    Args:
        texts: texts, or mappings with ``text``.
        calibration_texts: the same; None: each fourth of ``texts``, if some recipe ``calibrates``.

    Raises:
        OptionError: if one is no text, is on both sides, or there are too few.
    """
    held_out = list(map(_text, texts))
    if calibration_texts is None:
        if not calibrates:
            return held_out, [], "no recipe is calibrated"
        own = held_out[_EACH - 1 :: _EACH]
        if not own:
            raise OptionError(
                f"Calibrated recipes need texts of their own: of {len(held_out)} texts none can be "
                f"spared; give calibration texts, or {_EACH} texts at least."
            )
        del held_out[_EACH - 1 :: _EACH]
        sentence = f"each fourth text ({len(own)}) is for calibration, and not scored"
    else:
        own = list(map(_text, calibration_texts))
        sentence = f"calibrated recipes have seen {len(own)} other texts"
    for text in own:
        if any(_overlap(text, other) for other in held_out):
            raise OptionError(
                f"Calibration text {shown(text)} is also held out, or part of a text that is: what "
                "is scored must not be calibrated on."
            )
    return held_out, own, sentence


def _overlap(a: str, b: str) -> bool:
    """Whether one is part of the other, and more than a few words."""
    shorter, longer = sorted((a.strip(), b.strip()), key=len)
    return len(shorter) > _FEW and shorter in longer


def _text(item: Any) -> str:
    text = item.get("text") if isinstance(item, Mapping) else item
    if not isinstance(text, str):
        raise OptionError(f"{shown(item)} is no text; allowed: a text, or a mapping with 'text'.")
    return text
