"""Every error a user can meet: one class per kind, one clear sentence each.

They derive from Dynamo's ``ShortenTraceback`` because Dynamo hands such errors to the caller as
they are, where it would wrap any other one in ``BackendCompilerFailed``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from importlib.util import find_spec
from typing import TypeGuard

from kvpass._torch import ShortenTraceback

_MOST_SHOWN = 80
_MOST_PATH = 255


class KvpassError(ShortenTraceback, ValueError):
    """Base class. The message names the offending value and what is allowed."""

    def __init__(self, message: str) -> None:
        super().__init__(message, first_useful_frame=None)


class OptionError(KvpassError):
    """An unknown recipe or option, or a value that is not allowed."""


class PlanError(KvpassError):
    """A plan that does not fit the model, or a plan file that cannot be read."""


class UnmatchedGraphError(KvpassError):
    """``strict`` is set and some cache update or attention could not be rewritten."""


class StaleHandleError(KvpassError):
    """A cache tensor is used after a later step has overwritten its storage."""


class CacheFullError(KvpassError):
    """A cache of a fixed size has no room for the tokens of a step."""


class CacheStateError(KvpassError):
    """A cache was changed by other means than its own methods."""


class CacheFileError(KvpassError):
    """A cache that cannot be saved, or a file of one that cannot be read or is for another
    model."""


class RankError(KvpassError):
    """Another process of a sharded cache does not answer, or not with the same step."""


class KernelError(KvpassError):
    """A generated kernel cannot be rendered, compiled or launched."""


class GraphError(KvpassError):
    """A rewritten graph breaks an invariant. Always a bug in a rule, never the user's fault."""


def shown(value: object) -> str:
    """``value`` as an error names it: as Python prints it, in one line cut at 80 characters."""
    return cut(repr(value), _MOST_SHOWN)


def shown_path(path: object) -> str:
    """A path as an error names it: in quotes, in one line of which the beginning is cut at 255
    characters, for the end tells more."""
    line = " ".join(str(path).split())
    return f"'{line if len(line) <= _MOST_PATH else '...' + line[3 - _MOST_PATH :]}'"


def cut(text: str, most: int = 200) -> str:
    """``text`` in one line of at most so many characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


def check_installed(
    user: str, package: str, *modules: str, extra: str, otherwise: str = ""
) -> None:
    """Refuses what ``user`` asks for where a package, with these modules, is missing.

    Raises:
        OptionError: naming the extra of kvpass that has it, and ``otherwise``.
    """
    if not all(map(find_spec, modules)):
        more = f"; {otherwise}" if otherwise else ""
        raise OptionError(
            f"{user} needs {package}, which is not installed: pip install 'kvpass[{extra}]'{more}."
        )


def unknown(kind: str, name: object, allowed: Iterable[str]) -> str:
    """The sentence for an unknown ``name``: the close ones, then everything that is allowed."""
    names = sorted(allowed)
    close = get_close_matches(str(name), names, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(repr(c) for c in close)}?" if close else ""
    return f"Unknown {kind} {shown(name)}.{hint} Allowed: {', '.join(names)}."


def is_number(value: object) -> TypeGuard[float]:
    """Whether ``value`` is an int or a float; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check(name: str, value: object, fits: bool, allowed: str) -> None:
    """Raises an `OptionError` for option ``name`` unless its ``value`` ``fits``."""
    if not fits:
        raise OptionError(f"{name}={shown(value)} is not supported; allowed: {allowed}.")


def check_flag(name: str, value: object) -> None:
    """`check` that ``value`` is True or False."""
    check(name, value, isinstance(value, bool), "True, False")


def check_whole(name: str, value: object, least: int) -> None:
    """`check` that ``value`` is an int of at least ``least``."""
    fits = isinstance(value, int) and is_number(value) and value >= least
    check(name, value, fits, f"a whole number, at least {least}")


def check_choice(name: str, value: object, choices: Collection[object]) -> None:
    """`check` that ``value`` is one of ``choices``, and of the same type."""
    fits = any(type(value) is type(choice) and value == choice for choice in choices)
    check(name, value, fits, ", ".join(map(repr, choices)))
