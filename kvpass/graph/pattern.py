"""A small pattern language over Dynamo's FX graphs.

A pattern either matches, filling in named captures, or says at which node it failed and why. Of
several alternatives the failure that got furthest is kept: that is the near miss `kvpass.explain`
shows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from kvpass.graph.spellings import OPS, argument, op_name

Captures = dict[str, Any]
# Keywords with which an operation is another one.
_CHANGING = {"alpha", "rounding_mode"}


@dataclass(frozen=True)
class Miss:
    """Why something did not match: ``reason`` at ``node``, ``depth`` steps into the pattern."""

    reason: str
    node: Node | None = None
    depth: int = 0

    def __str__(self) -> str:
        return f"{self.reason} (at {self.node.name})" if self.node is not None else self.reason


def furthest(misses: list[Miss]) -> Miss:
    """The miss that got deepest into its pattern; the first of equals."""
    return max(misses, key=lambda miss: miss.depth)


def _unexpected(value: Any, wanted: str, depth: int, name: str = "") -> Miss:
    node = value if isinstance(value, Node) else None
    return Miss(f"{name}{op_name(value)}, expected {wanted}", node, depth)


class Pattern(ABC):
    """Something an argument can match."""

    def match(self, value: Any, found: Captures, depth: int = 0) -> Miss | None:
        """None if ``value`` matches, with ``found`` filled in; else the reason, with ``found`` as
        it was."""
        trial = dict(found)
        miss = self._match(value, trial, depth)
        if miss is None:
            found.update(trial)
        return miss

    @abstractmethod
    def _match(self, value: Any, found: Captures, depth: int) -> Miss | None:
        """`match`, which may leave anything in ``found`` where it fails."""


@dataclass(frozen=True)
class Capture(Pattern):
    """Matches any node (or any value for which ``where`` holds) and remembers it by name."""

    name: str
    where: Callable[[Any], bool] = lambda value: isinstance(value, Node)
    wanted: str = "a tensor"

    def _match(self, value: Any, found: Captures, depth: int) -> Miss | None:
        if not self.where(value):
            return _unexpected(value, self.wanted, depth, f"{self.name} is ")
        found[self.name] = value
        return None


@dataclass(frozen=True)
class Is(Pattern):
    """Matches a value for which ``where`` holds."""

    where: Callable[[Any], bool]
    wanted: str

    def _match(self, value: Any, found: Captures, depth: int) -> Miss | None:
        return None if self.where(value) else _unexpected(value, self.wanted, depth)


class Call(Pattern):
    """Matches a call of the operation ``op`` whose named arguments match."""

    def __init__(self, op: str, **arguments: Pattern) -> None:
        self._op = op
        orders = [_Arguments(tuple(arguments.items()))]
        if OPS[op].commutative:
            swap = {"input": "other", "other": "input"}
            orders += [_Arguments(tuple((swap[name], x) for name, x in arguments.items()))]
        self._arguments = Either(*orders)

    def _match(self, value: Any, found: Captures, depth: int) -> Miss | None:
        if op_name(value) != self._op or not isinstance(value, Node):
            return _unexpected(value, self._op, depth)
        if extra := _CHANGING & value.kwargs.keys() - set(OPS[self._op].params):
            return Miss(f"{self._op} with {min(extra)}", value, depth + 1)
        return self._arguments.match(value, found, depth)


@dataclass(frozen=True)
class _Arguments(Pattern):
    """Matches a call whose arguments do, by name."""

    arguments: tuple[tuple[str, Pattern], ...]

    def _match(self, value: Any, found: Captures, depth: int) -> Miss | None:
        for name, pattern in self.arguments:
            if miss := pattern.match(argument(value, name), found, depth + 1):
                return Miss(miss.reason, miss.node or value, miss.depth)
        return None


class Either(Pattern):
    """Matches the first alternative that does."""

    def __init__(self, *alternatives: Pattern) -> None:
        self._alternatives = alternatives

    def _match(self, value: Any, found: Captures, depth: int) -> Miss | None:
        misses = []
        for pattern in self._alternatives:
            if (miss := pattern.match(value, found, depth)) is None:
                return None
            misses.append(miss)
        return furthest(misses)


@dataclass(frozen=True)
class As(Pattern):
    """Matches what ``pattern`` does, and remembers it by name."""

    name: str
    pattern: Pattern

    def _match(self, value: Any, found: Captures, depth: int) -> Miss | None:
        miss = self.pattern.match(value, found, depth)
        found[self.name] = value
        return miss


@dataclass(frozen=True)
class Items(Pattern):
    """Matches a list or tuple, item by item."""

    items: tuple[Pattern, ...]

    def _match(self, value: Any, found: Captures, depth: int) -> Miss | None:
        if not isinstance(value, list | tuple) or len(value) != len(self.items):
            return Miss(f"{value}, expected {len(self.items)} items", None, depth)
        for pattern, item in zip(self.items, value, strict=True):
            if miss := pattern.match(item, found, depth):
                return miss
        return None


@dataclass(frozen=True)
class Link:
    """One kind of step of a `Chain`.

    Attributes:
        name: of the step.
        around: the pattern of the step, given that of the rest of the chain.
        captures: the names that it captures itself.
    """

    name: str
    around: Callable[[Pattern], Pattern]
    captures: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """A step that a `Chain` has matched: its `Link`'s name, its node and what it captured."""

    name: str
    node: Node
    found: Captures


@dataclass(frozen=True)
class Chain(Pattern):
    """Matches ``end`` inside any number of links in any order. The steps are captured as ``name``,
    a tuple from the end outwards."""

    name: str
    end: Pattern
    links: tuple[Link, ...]

    def _match(self, value: Any, found: Captures, depth: int) -> Miss | None:
        misses = []
        for link in self.links:
            trial = dict(found)
            miss = link.around(self).match(value, trial, depth)
            if miss is None:
                step = Step(link.name, value, {name: trial.pop(name) for name in link.captures})
                found.update(trial)
                found[self.name] = (*trial[self.name], step)
                return None
            misses.append(miss)
        if miss := self.end.match(value, found, depth):
            return furthest([miss, *misses])
        found[self.name] = ()
        return None
