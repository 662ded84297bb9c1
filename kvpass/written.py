"""A name and fields as a command line has them: ``kivi-2bit,group=64``."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from kvpass.errors import OptionError, shown


def written(text: str, kind: str, example: str) -> tuple[str, dict[str, Any]]:
    """The name and the fields of ``NAME[,FIELD=VALUE...]``.

    Args:
        text: what was written.
        kind: what it names, for the error.
        example: an allowed one, for the error.

    Raises:
        OptionError: if what follows the name is no field.
    """
    name, *assigned = text.split(",")
    found: dict[str, Any] = {}
    for item in assigned:
        field, equals, value = item.partition("=")
        if not equals:
            raise OptionError(f"{kind} {shown(text)} cannot be read; allowed: e.g. '{example}'.")
        found[field] = _value(value)
    return name, found


def _value(text: str) -> Any:
    """A whole number, another number, true, false, none, or the text itself."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for number in (int, float):
        with suppress(ValueError):
            return number(text)
    return text
