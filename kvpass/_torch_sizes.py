"""Sizes that differ from call to call: symbols of Dynamo's graphs, and what is known of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, cast

import sympy
import torch
from torch import Tensor, fx
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    free_unbacked_symbols,
    statically_known_true,
)
from torch.utils._sympy.functions import Max as Max
from torch.utils._sympy.functions import Min as Min
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.reference import PythonReferenceAnalysis


def new_size(mode: FakeTensorMode, source: Any, example: int) -> torch.SymInt:
    """A size of its own in every call of a graph, with this source in Dynamo."""
    env = mode.shape_env
    assert env is not None
    symbol = env.create_symbol(example, source, DimDynamic.DYNAMIC, None)
    return cast(torch.SymInt, env.create_symintnode(symbol, hint=example, source=source))


def symbolic_mode() -> FakeTensorMode:
    """Fake tensors that may have sizes of `symbolic_size`."""
    return FakeTensorMode(shape_env=ShapeEnv())


def symbolic_size(mode: FakeTensorMode, name: str, example: int) -> torch.SymInt:
    """A size that compiled code takes as an argument."""
    return new_size(mode, LocalSource(name), example)


def divides(divisor: int, value: int | torch.SymInt) -> bool:
    """Whether ``divisor`` divides ``value`` in every call. Leaves no guard behind."""
    return statically_known_true(value % divisor == 0)


def at_most(value: int | torch.SymInt, limit: int) -> bool:
    """Whether ``value`` is no more than ``limit`` in every call. Leaves no guard behind."""
    return statically_known_true(value <= limit)


def symbol_positions(graph: fx.Graph) -> dict[Any, int]:
    """Positions of the placeholders that carry the graph's symbols."""
    examples = [n.meta.get("example_value") for n in graph.find_nodes(op="placeholder")]
    return {
        example.node.expr: position
        for position, example in enumerate(examples)
        if isinstance(example, torch.SymInt) and example.node.expr.is_symbol
    }


def symbol_node(graph: fx.Graph, value: int | torch.SymInt) -> int | fx.Node:
    """A node that computes ``value`` from the graph's symbol placeholders, or the plain number.

    Raises:
        KeyError: if a symbol has no placeholder.
    """
    if (number := constant(value)) is not None:
        return number
    placeholders = list(graph.find_nodes(op="placeholder"))
    env = {symbol: fx.Proxy(placeholders[i]) for symbol, i in symbol_positions(graph).items()}
    proxy = sympy_interp(PythonReferenceAnalysis, env, size_expr(value))
    node: fx.Node = proxy.node
    node.meta["example_value"] = value
    return node


# None of these leaves a guard behind.


def size_expr(value: int | torch.SymInt) -> sympy.Expr:
    """``value`` over the symbols of Dynamo's graph."""
    return sympy.Integer(value) if isinstance(value, int) else value.node.expr


def symbols_of(value: Any) -> set[sympy.Symbol]:
    """The symbols in a number."""
    return set(value.node.expr.free_symbols) if isinstance(value, torch.SymInt) else set()


def shape_symbols(tensor: Any) -> set[sympy.Symbol]:
    """The symbols in a tensor's sizes, and in strides that matter."""
    if not isinstance(tensor, Tensor):
        return set()
    strides = [s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if constant(n) != 1]
    return {symbol for number in (*tensor.shape, *strides) for symbol in symbols_of(number)}


def all_symbols(values: Iterable[Any]) -> set[sympy.Symbol]:
    """The symbols in numbers, and in the sizes of tensors."""
    return {symbol for x in values for symbol in symbols_of(x) | shape_symbols(x)}


def defined_symbols(value: Any) -> set[sympy.Symbol]:
    """The symbols that compiled code can read off an argument: by the names that they came in with,
    whatever Dynamo has found them to be equal to since."""
    sizes = (*value.shape, *value.stride()) if isinstance(value, Tensor) else (value,)
    found = {x.node._expr for x in sizes if isinstance(x, torch.SymInt)}
    return {expr for expr in found if expr.is_symbol}


def constant(value: int | torch.SymInt) -> int | None:
    """``value`` if it is the same in every call, else None."""
    if isinstance(value, int):
        return value
    expr = size_expr(value)
    return int(expr) if expr.is_number else None


def same_size(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Whether two sizes are known to be the same in every call."""
    return bool(size_expr(a) == size_expr(b))


def same_shape(a: Sequence[int | torch.SymInt], b: Sequence[int | torch.SymInt]) -> bool:
    """Whether two shapes are known to be equal."""
    return len(a) == len(b) and all(map(same_size, a, b))


def symbol_bounds(value: torch.SymInt) -> dict[sympy.Symbol, tuple[int | None, int | None]]:
    """Smallest and largest value of each symbol in ``value`` that the graph's guards let through;
    None: unbounded."""
    found: dict[sympy.Symbol, tuple[int | None, int | None]] = {}
    for symbol in symbols_of(value):
        known = value.node.shape_env.var_to_range.get(symbol)
        ends = (None, None) if known is None else (known.lower, known.upper)
        low, high = (int(end) if isinstance(end, sympy.Integer) else None for end in ends)
        found[symbol] = (low, high)
    return found


class Size:
    """A tensor's size as a function of the arguments that a compiled graph is called with."""

    def __init__(
        self, value: int | torch.SymInt, positions: Mapping[Any, int] | None = None
    ) -> None:
        expr = size_expr(value)
        symbols = sorted(expr.free_symbols, key=str)
        self._positions = [(positions or {})[s] for s in symbols]
        self._compute = _function_of(tuple(map(str, symbols)), PythonPrinter().doprint(expr))

        # Those that depend on nothing are computed once.
        self._number = None if self._positions else int(self._compute())

    def __call__(self, arguments: Sequence[Any]) -> int:
        """The size for these arguments."""
        if self._number is not None:
            return self._number
        return int(self._compute(*[arguments[p] for p in self._positions]))


@cache
def _function_of(names: tuple[str, ...], expression: str) -> Callable[..., int]:
    # As Dynamo's guards are made: a step has several sizes for each layer, and to interpret their
    # expressions anew would take as long as attention.
    function: Callable[..., int] = eval(f"lambda {', '.join(names)}: {expression}", {"math": math})
    return function


def is_unbacked(value: Any) -> bool:
    """Whether a number, or a size of a tensor, depends on what tensors hold."""
    sized = isinstance(value, Tensor | torch.SymInt | torch.SymFloat | torch.SymBool)
    return sized and bool(free_unbacked_symbols(value))


class Numbering:
    """Numbers symbols in the order in which they appear: two lists of sizes are alike if they are
    the same over these numbers, with the same ranges."""

    def __init__(self, mode: FakeTensorMode) -> None:
        assert mode.shape_env is not None
        self._env = mode.shape_env
        self._symbols: list[sympy.Symbol] = []

    def number(self, value: int | torch.SymInt) -> object:
        """``value`` over numbers, and what it is in the example."""
        if isinstance(value, int):
            return value
        expr = size_expr(value)
        self._symbols += sorted(expr.free_symbols.difference(self._symbols), key=str)
        numbers = {s: sympy.Symbol(f"_{n}", integer=True) for n, s in enumerate(self._symbols)}
        return expr.xreplace(numbers), value.node.hint

    def ranges(self) -> tuple[object, ...]:
        """Lowest and highest value of each symbol, in their order."""
        found = [self._env.var_to_range.get(symbol) for symbol in self._symbols]
        return tuple(None if known is None else (known.lower, known.upper) for known in found)

    def moved(self, other: Numbering) -> dict[sympy.Symbol, sympy.Symbol]:
        """The symbols that are others in ``other``, with these."""
        pairs = zip(self._symbols, other._symbols, strict=True)
        return {mine: its for mine, its in pairs if mine != its}

    def holds_for(self, other: Numbering) -> bool:
        """Whether all that is known of the symbols holds for those of ``other``; from now on that
        is guarded."""
        moved = self.moved(other)
        for fact in [guard.expr for guard in self._env.guards]:
            if not moved.keys().isdisjoint(fact.free_symbols):
                claim = fact.xreplace(moved)
                if claim != sympy.true and not self._env.create_symboolnode(claim):
                    return False
        return True
