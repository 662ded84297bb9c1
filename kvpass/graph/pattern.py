"""A small pattern language over Dynamo's FX graphs.

A pattern either matches, filling in named captures, or says at which node it failed and why. Of
several
alternatives the failure that got furthest is kept: that is the near miss `kvpass.explain` shows.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as nnf
from torch.fx import Node

from kvpass._torch import LINEAR, SDPA

Captures = dict[str, Any]


@dataclass(frozen=True)
class Miss:
    """Why something did not match: ``reason`` at ``node``, ``depth`` steps into the pattern."""

    reason: str
    node: Node | None = None
    depth: int = 0

    def __str__(self) -> str:
        return f"{self.reason} (at {self.node.name})" if self.node is not None else self.reason


@dataclass(frozen=True)
class Op:
    """One operation in all its spellings, with the names of its parameters in order."""

    targets: tuple[Any, ...]
    params: tuple[str, ...]
    defaults: tuple[tuple[str, Any], ...] = ()
    commutative: bool = False


_BINARY = ("input", "other")
OPS: dict[str, Op] = {
    "add": Op((operator.add, operator.iadd, torch.add, "add", "add_"), _BINARY, commutative=True),
    "addmm": Op((torch.addmm, "addmm"), ("input", "mat1", "mat2")),
    "baddbmm": Op(
        (torch.baddbmm, "baddbmm"),
        ("input", "batch1", "batch2", "beta", "alpha"),
        (("beta", 1), ("alpha", 1)),
    ),
    "chunk": Op((torch.chunk, "chunk"), ("input", "chunks", "dim"), (("dim", 0),)),
    "cat": Op((torch.cat, torch.concat), ("tensors", "dim"), (("dim", 0),)),
    "contiguous": Op(("contiguous",), ("input",)),
    "div": Op(
        (operator.truediv, operator.itruediv, torch.div, torch.true_divide, "div", "div_"), _BINARY
    ),
    "dropout": Op((nnf.dropout,), ("input", "p", "training"), (("p", 0.5), ("training", True))),
    "expand": Op(("expand",), ("input",)),
    "full": Op((torch.full,), ("size", "fill_value")),
    "getattr": Op((getattr,), ("input", "name")),
    "getitem": Op((operator.getitem,), ("input", "index")),
    "linear": Op((LINEAR,), ("input", "weight", "bias"), (("bias", None),)),
    "logsumexp": Op(
        (torch.logsumexp, "logsumexp"), ("input", "dim", "keepdim"), (("keepdim", False),)
    ),
    "masked_fill": Op(
        (torch.masked_fill, "masked_fill", "masked_fill_"), ("input", "mask", "value")
    ),
    "matmul": Op((torch.matmul, operator.matmul, "matmul", torch.bmm, "bmm"), _BINARY),
    "max": Op((torch.max, "max", torch.maximum, "maximum"), _BINARY),
    "mul": Op((operator.mul, operator.imul, torch.mul, "mul", "mul_"), _BINARY, commutative=True),
    "mean": Op((torch.mean, "mean"), ("input", "dim")),
    "neg": Op((operator.neg, torch.neg, "neg", torch.negative), ("input",)),
    "permute": Op((torch.permute, "permute"), ("input",)),
    "pow": Op((operator.pow, torch.pow, "pow"), ("input", "exponent")),
    "reshape": Op(
        ("reshape", "view", torch.reshape, torch.flatten, "flatten", "unflatten"), ("input",)
    ),
    "repeat_interleave": Op(
        (torch.repeat_interleave, "repeat_interleave"),
        ("input", "repeats", "dim"),
        (("dim", None),),
    ),
    "sdpa": Op(
        (SDPA,),
        ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"),
        (
            ("attn_mask", None),
            ("dropout_p", 0.0),
            ("is_causal", False),
            ("scale", None),
            ("enable_gqa", False),
        ),
    ),
    "sigmoid": Op((torch.sigmoid, "sigmoid"), ("input",)),
    "softmax": Op((nnf.softmax, torch.softmax, "softmax"), ("input", "dim")),
    "split": Op((torch.split, "split"), ("input", "sizes", "dim"), (("dim", 0),)),
    "stack": Op((torch.stack,), ("tensors", "dim"), (("dim", 0),)),
    "sub": Op((operator.sub, operator.isub, torch.sub, "sub", "sub_"), _BINARY),
    "tanh": Op((torch.tanh, "tanh"), ("input",)),
    "tensor": Op((torch.tensor, torch.scalar_tensor), ("data",)),
    "to": Op(("to", "float", "half", "bfloat16", "type", "type_as"), ("input",)),
    "transpose": Op(
        (torch.transpose, "transpose", torch.swapaxes, "swapaxes"), ("input", "dim0", "dim1")
    ),
    "unsqueeze": Op((torch.unsqueeze, "unsqueeze"), ("input", "dim")),
    "where": Op((torch.where,), ("condition", "input", "other")),
}
_IN_PLACE = {
    operator.iadd,
    operator.isub,
    operator.imul,
    operator.itruediv,
    operator.iand,
    operator.ior,
    operator.setitem,
}
# Keywords with which an operation is another one.
_CHANGING = {"alpha", "rounding_mode"}
_NAMES: dict[Any, str] = {target: name for name, op in OPS.items() for target in op.targets}


def op_name(node: Any) -> str:
    """The name of ``node``'s operation in `OPS`, else a readable form of its target."""
    if not isinstance(node, Node):
        return repr(node)
    if node.op in ("call_function", "call_method"):
        if node.target in _NAMES:
            return _NAMES[node.target]
        return str(getattr(node.target, "__name__", node.target))
    return node.op


def mutates(node: Node) -> bool:
    """Whether ``node`` changes a tensor in place."""
    if node.op == "call_function" and node.target in _IN_PLACE:
        return True
    name = str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or "out" in node.kwargs or node.kwargs.get("inplace") is True


def argument(node: Node, name: str) -> Any:
    """The argument of an operation in `OPS` by its name, however it was passed."""
    op = OPS[op_name(node)]
    if name in node.kwargs:
        return node.kwargs[name]
    position = op.params.index(name)
    if position < len(node.args):
        return node.args[position]
    return dict(op.defaults).get(name)


class Pattern:
    """Something an argument can match."""

    def match(self, value: Any, found: Captures, depth: int = 0) -> Miss | None:
        """None if ``value`` matches, with ``found`` filled in; else the reason."""
        raise NotImplementedError


@dataclass(frozen=True)
class Capture(Pattern):
    """Matches any node (or any value for which ``where`` holds) and remembers it by name."""

    name: str
    where: Callable[[Any], bool] = lambda value: isinstance(value, Node)
    wanted: str = "a tensor"

    def match(self, value: Any, found: Captures, depth: int = 0) -> Miss | None:
        """See `Pattern.match`."""
        if not self.where(value):
            node = value if isinstance(value, Node) else None
            return Miss(f"{self.name} is {op_name(value)}, expected {self.wanted}", node, depth)
        found[self.name] = value
        return None


@dataclass(frozen=True)
class Is(Pattern):
    """Matches a value for which ``where`` holds."""

    where: Callable[[Any], bool]
    wanted: str

    def match(self, value: Any, found: Captures, depth: int = 0) -> Miss | None:
        """See `Pattern.match`."""
        if self.where(value):
            return None
        node = value if isinstance(value, Node) else None
        return Miss(f"{op_name(value)}, expected {self.wanted}", node, depth)


@dataclass(frozen=True)
class Call(Pattern):
    """Matches a call of the operation ``op`` whose named arguments match."""

    op: str
    arguments: tuple[tuple[str, Pattern], ...]

    def match(self, value: Any, found: Captures, depth: int = 0) -> Miss | None:
        """See `Pattern.match`."""
        if op_name(value) != self.op or not isinstance(value, Node):
            node = value if isinstance(value, Node) else None
            return Miss(f"{op_name(value)}, expected {self.op}", node, depth)
        if extra := _CHANGING & value.kwargs.keys() - set(OPS[self.op].params):
            return Miss(f"{self.op} with {min(extra)}", value, depth + 1)
        orders = [dict(self.arguments)]
        if OPS[self.op].commutative:
            swap = {"input": "other", "other": "input"}
            orders.append({swap[name]: pattern for name, pattern in self.arguments})
        misses = []
        for order in orders:
            trial = dict(found)
            miss = self._match_order(value, order, trial, depth)
            if miss is None:
                found.update(trial)
                return None
            misses.append(miss)
        return furthest(misses)

    def _match_order(
        self, node: Node, order: dict[str, Pattern], found: Captures, depth: int
    ) -> Miss | None:
        for name, pattern in order.items():
            value = argument(node, name)
            if miss := pattern.match(value, found, depth + 1):
                return Miss(miss.reason, miss.node or node, miss.depth)
        return None


def call(op: str, **arguments: Pattern) -> Call:
    """`Call` with its arguments as keywords."""
    return Call(op, tuple(arguments.items()))


@dataclass(frozen=True)
class Either(Pattern):
    """Matches the first alternative that does."""

    alternatives: tuple[Pattern, ...]

    def match(self, value: Any, found: Captures, depth: int = 0) -> Miss | None:
        """See `Pattern.match`."""
        misses = []
        for pattern in self.alternatives:
            trial = dict(found)
            miss = pattern.match(value, trial, depth)
            if miss is None:
                found.update(trial)
                return None
            misses.append(miss)
        return furthest(misses)


def either(*alternatives: Pattern) -> Either:
    """`Either`, with its alternatives as arguments."""
    return Either(alternatives)


def furthest(misses: list[Miss]) -> Miss:
    """The miss that got deepest into its pattern; the first of equals."""
    return max(misses, key=lambda miss: miss.depth)


@dataclass(frozen=True)
class As(Pattern):
    """Matches what ``pattern`` does, and remembers it by name."""

    name: str
    pattern: Pattern

    def match(self, value: Any, found: Captures, depth: int = 0) -> Miss | None:
        """See `Pattern.match`."""
        miss = self.pattern.match(value, found, depth)
        if miss is None:
            found[self.name] = value
        return miss


@dataclass(frozen=True)
class Items(Pattern):
    """Matches a list or tuple, item by item."""

    items: tuple[Pattern, ...]

    def match(self, value: Any, found: Captures, depth: int = 0) -> Miss | None:
        """See `Pattern.match`."""
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
    """Matches ``end`` inside any number of links in any order.

    The steps are captured as ``name``, a tuple from the end outwards.
    """

    name: str
    end: Pattern
    links: tuple[Link, ...]

    def match(self, value: Any, found: Captures, depth: int = 0) -> Miss | None:
        """See `Pattern.match`."""
        misses = []
        for link in self.links:
            trial = dict(found)
            miss = link.around(self).match(value, trial, depth)
            if miss is None:
                step = Step(link.name, value, {name: trial.pop(name) for name in link.captures})
                trial[self.name] = (*trial[self.name], step)
                found.update(trial)
                return None
            misses.append(miss)
        trial = dict(found)
        if miss := self.end.match(value, trial, depth):
            return furthest([miss, *misses])
        found.update(trial)
        found[self.name] = ()
        return None
