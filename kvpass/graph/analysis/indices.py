"""Reads the integer and bool tensors that masks are computed from as formulas."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sympy import Expr, Integer, Symbol
from torch import Tensor
from torch.fx import Graph, Node

from kvpass._torch import source_name
from kvpass._torch_sizes import size_expr, symbol_bounds
from kvpass.graph.analysis.effects import Writes, memory, node_number, written
from kvpass.graph.analysis.formulas import AXES, COMPARISONS, NEVER, Condition, Formula, position
from kvpass.graph.spellings import op_name

_LENGTH = re.compile(r"(.+)\.layers\[\d+\]\.cumulative_length$")
_ARITHMETIC: dict[str, Callable[..., Expr]] = {
    name: getattr(operator, name) for name in ("add", "mul", "neg", "sub")
}
# What `Indices` makes of operations, by their names.
_ROLES = {
    "and": ("and_", "logical_and"),
    "or": ("or_", "logical_or"),
    "not": ("invert", "logical_not"),
    "view": ("reshape", "unsqueeze", "squeeze"),
    "same": ("contiguous", "clone", "detach", "expand", "broadcast_to", "expand_as"),
    "to": ("to", "bool", "long", "int"),
    "arithmetic": tuple(_ARITHMETIC),
    "compare": (*COMPARISONS, "ne"),
    "ones": ("ones", "new_ones", "ones_like"),
    "zeros": ("zeros", "new_zeros", "zeros_like"),
    "full": ("full", "new_full", "full_like"),
}
_OWN = ("arange", "getitem", "masked_fill", "tril", "triu", "where")
_ROLE_OF = {name: role for role, names in _ROLES.items() for name in names}
_ROLE_OF |= dict(zip(_OWN, _OWN, strict=True))


def operation(node: Any) -> str | None:
    """The role of ``node``'s operation: one name for all that compute alike.

    Returns:
        None if it is not known, or writes to one of its arguments.
    """
    role = _ROLE_OF.get(op_name(node)) if isinstance(node, Node) else None
    return None if role is None or written(node) else role


def tensor_type(value: Any) -> torch.dtype | None:
    """The dtype of a node's tensor; None if ``value`` is anything else."""
    example = value.meta.get("example_value") if isinstance(value, Node) else None
    return example.dtype if isinstance(example, Tensor) else None


class Indices:
    """The formulas of one graph, as it was when this was made.

    Attributes:
        writes: the graph's in-place writes.
        limits: of the sizes, as far as they were met.
    """

    def __init__(self, graph: Graph) -> None:
        self.writes = Writes(graph)
        self.limits: dict[Symbol, tuple[int | None, int | None]] = {}
        self._formulas: dict[Node, Formula | None] = {}
        self._lengths = self._same_lengths(graph)

    def formula(self, value: Any, reader: Node | None = None) -> Formula | None:
        """What ``value``, a node or a number, holds.

        Args:
            value: of integers or bools; a float that is a whole number counts as that.
            reader: what reads it, since numbers may be written to before; None: at once.

        Returns:
            None if that is no linear formula of the positions.
        """
        if isinstance(value, bool):
            return Condition() if value else NEVER
        if isinstance(value, int | float):
            return Integer(int(value)) if math.isfinite(value) and value == int(value) else None
        if not isinstance(value, Node):
            return None
        if (number := node_number(value)) is not None:
            return self.size(number)
        example = value.meta.get("example_value")
        if not isinstance(example, Tensor) or example.dim() > len(AXES):
            return None
        if example.dim() == 0 and example.dtype in (torch.int32, torch.int64):
            return self._scalar(value, reader)
        if value not in self._formulas:
            self._formulas[value] = None if self.writes.to(value) else self._computed(value)
        return self._formulas[value]

    def size(self, value: int | torch.SymInt) -> Expr:
        """A formula over sizes, whose limits are noted."""
        if not isinstance(value, int):
            self.limits |= symbol_bounds(value)
        return size_expr(value)

    def shape(self, node: Node) -> list[Expr]:
        """The shape of ``node``'s tensor, whose limits are noted."""
        return [self.size(size) for size in node.meta["example_value"].shape]

    def _scalar(self, node: Node, reader: Node | None) -> Formula | None:
        """A number in a tensor, with what has been added to it between ``node`` and ``reader``."""
        if operation(node) in ("same", "to", "view") and memory(node) == memory(node.args[0]):
            return self.formula(node.args[0], reader or node)
        found = self._computed(node)
        if found is None:
            found = self._lengths.get(node, Symbol(f"{node.name} ", integer=True))
        for write, added in self.writes.to(node):
            if reader is not None and node < write < reader:
                if added is None or isinstance(found, Condition):
                    return None
                found += added
        return found

    def _same_lengths(self, graph: Graph) -> dict[Node, Symbol]:
        """One symbol for the lengths of all layers of a static cache.

        Each layer counts its tokens by itself. They start at 0 together, and stay equal if every
        graph adds the same to each, which is checked here for this graph.
        """
        caches: dict[str, list[Node]] = {}
        for node in graph.find_nodes(op="placeholder"):
            match = _LENGTH.match(source_name(node))
            if match and isinstance(node.meta.get("example_value"), Tensor):
                caches.setdefault(match[1], []).append(node)
        found: dict[Node, Symbol] = {}
        for name, nodes in caches.items():
            added = {tuple(amount for _, amount in self.writes.to(node)) for node in nodes}
            if len(added) == 1 and None not in next(iter(added)):
                symbol = Symbol(f"{name}.cumulative_length", integer=True)
                found |= dict.fromkeys(nodes, symbol)
        return found

    def _computed(self, node: Node) -> Formula | None:
        compute = getattr(self, f"_{operation(node)}", None)
        return None if compute is None else compute(node)

    def _inputs(self, node: Node, count: int) -> list[Formula | None]:
        """Formulas of all arguments; Nones if there are others than ``count``."""
        if len(node.args) != count or node.kwargs:
            return [None] * count
        return [self.formula(x, node) for x in node.args]

    def _arithmetic(self, node: Node) -> Formula | None:
        name = op_name(node)
        count = 1 if name == "neg" else 2
        numbers = [x for x in self._inputs(node, count) if isinstance(x, Expr)]
        if len(numbers) < count or not _integral(node):
            return None
        if name == "mul" and not any(x.is_Integer for x in numbers):
            return None
        return _ARITHMETIC[name](*numbers)

    def _compare(self, node: Node) -> Formula | None:
        name, (left, right) = op_name(node), self._inputs(node, 2)
        if isinstance(left, Condition) and isinstance(right, Integer):
            # Zeros and ones of a triangle, say.
            truth = {("ne", 0): True, ("eq", 1): True, ("gt", 0): True, ("eq", 0): False}
            same = truth.get((name, int(right)))
            return left if same else left.negated() if same is False else None
        if name == "ne" or not (isinstance(left, Expr) and isinstance(right, Expr)):
            return None
        return Condition.of(*COMPARISONS[name](right - left))

    def _and(self, node: Node) -> Formula | None:
        both = self._inputs(node, 2)
        if NEVER in both:
            return NEVER
        terms = [t for x in both if isinstance(x, Condition) for t in x.terms]
        return Condition.of(*terms) if all(isinstance(x, Condition) for x in both) else None

    def _or(self, node: Node) -> Formula | None:
        both = self._inputs(node, 2)
        if Condition() in both:
            return Condition()
        others = [x for x in both if x != NEVER]
        return NEVER if not others else others[0] if len(others) == 1 else None

    def _not(self, node: Node) -> Formula | None:
        (x,) = self._inputs(node, 1)
        return x.negated() if isinstance(x, Condition) and _boolean(node) else None

    def _arange(self, node: Node) -> Formula | None:
        known = {"device", "dtype", "pin_memory", "requires_grad", "layout"}
        if len(node.args) not in (1, 2) or not node.kwargs.keys() <= known or not _integral(node):
            return None
        start = self.formula(node.args[0], node) if len(node.args) == 2 else Integer(0)
        return start + position(0, self.shape(node)) if isinstance(start, Expr) else None

    def _ones(self, node: Node) -> Formula | None:
        return Condition() if _boolean(node) else Integer(1)

    def _zeros(self, node: Node) -> Formula | None:
        return NEVER if _boolean(node) else Integer(0)

    def _full(self, node: Node) -> Formula | None:
        fill = node.kwargs.get("fill_value", node.args[-1])
        found = self.formula(fill, node)
        return _truth(found) if _boolean(node) else found

    def _tril(self, node: Node, sign: int = 1) -> Formula | None:
        source = node.args[0]
        offset = node.kwargs.get("diagonal", node.args[1] if len(node.args) > 1 else 0)
        x, diagonal = self.formula(source, node), self.formula(offset, node)
        x = Condition() if x == 1 else x
        if not isinstance(x, Condition) or not isinstance(diagonal, Expr):
            return None
        shape = self.shape(node)
        inside = sign * (position(1, shape) + diagonal - position(0, shape))
        return NEVER if x == NEVER else Condition.of(*x.terms, inside)

    def _triu(self, node: Node) -> Formula | None:
        return self._tril(node, sign=-1)

    def _to(self, node: Node) -> Formula | None:
        x = self.formula(node.args[0], node)
        if _boolean(node):
            return _truth(x)
        # A condition goes on as zeros and ones; integers are exact in wide integers only.
        return x if isinstance(x, Condition) or _integral(node) else None

    def _same(self, node: Node) -> Formula | None:
        return self.formula(node.args[0], node)

    def _getitem(self, node: Node) -> Formula | None:
        source, index = node.args
        if not isinstance(source, Node) or tensor_type(source) is None:
            return None
        positions = self._indexed(source, index, node)
        return None if positions is None else self._moved(source, node, positions)

    def _indexed(self, source: Node, index: Any, node: Node) -> list[Expr] | None:
        """Where an element of ``source[index]`` is found in ``source``, axis by axis."""
        before, after = self.shape(source), self.shape(node)
        parts = list(index) if isinstance(index, tuple) else [index]
        if Ellipsis not in parts:
            parts.append(Ellipsis)
        spare = len(before) - sum(p is not None and p is not Ellipsis for p in parts)
        at = parts.index(Ellipsis)
        parts[at : at + 1] = [slice(None)] * spare
        positions: list[Expr] = []
        axis = 0
        for part in parts:
            if part is None:
                axis += 1
                continue
            size = before[len(positions)]
            if isinstance(part, int) and not isinstance(part, bool):
                positions.append(Integer(part) if part >= 0 else size + part)
                continue
            start = self._start(part, size, after[axis], node)
            if start is None:
                return None
            positions.append(start + position(len(after) - 1 - axis, after))
            axis += 1
        return positions

    def _start(self, part: Any, size: Expr, left: Expr, node: Node) -> Expr | None:
        """Where a slice of ``size`` positions begins, of which ``left`` are left."""
        if not isinstance(part, slice) or part.step not in (None, 1):
            return None
        if part.start is None or part.start == 0:
            return Integer(0)
        if part.stop is None:
            return size - left
        start = self.formula(part.start, node)
        return start if isinstance(start, Integer) and start >= 0 else None

    def _view(self, node: Node) -> Formula | None:
        """Only views that add or remove axes of size 1."""
        source = node.args[0]
        if not isinstance(source, Node) or tensor_type(source) != tensor_type(node):
            return None
        before, after = self.shape(source), self.shape(node)
        wide = [axis for axis, size in enumerate(after) if size != 1]
        if [s for s in before if s != 1] != [after[axis] for axis in wide]:
            return None
        rest = iter(wide)
        positions = [
            Integer(0) if s == 1 else position(len(after) - 1 - next(rest), after) for s in before
        ]
        return self._moved(source, node, positions)

    def _moved(self, source: Node, node: Node, positions: Sequence[Expr]) -> Formula | None:
        """The formula of ``source`` at other positions."""
        x = self.formula(source, node)
        moved = dict(zip(AXES, reversed(positions), strict=False))
        if isinstance(x, Condition):
            return Condition.of(*(t.subs(moved, simultaneous=True) for t in x.terms))
        return None if x is None else x.subs(moved, simultaneous=True)


def _truth(x: Formula | None) -> Formula | None:
    if isinstance(x, Integer):
        return NEVER if x == 0 else Condition()
    return x if isinstance(x, Condition) else None


def _boolean(node: Node) -> bool:
    return tensor_type(node) == torch.bool


def _integral(node: Node) -> bool:
    return tensor_type(node) in (torch.int32, torch.int64)
