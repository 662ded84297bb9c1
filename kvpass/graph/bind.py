"""Binds logical cache tensors to their inner tensors.

A `PackedKV` placeholder becomes one placeholder per inner tensor; ``append`` becomes an op that
mutates them in place, or, for a first prompt, one that makes them. `Binding` remembers how the
callable around the graph maps its arguments and results.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from kvpass._torch import Size, inner_source, symbol_node, symbol_positions
from kvpass.cache.packed import PackedKV
from kvpass.cache.residency import TensorPlan
from kvpass.errors import GraphError
from kvpass.ops import logical

ops = torch.ops.kvpass


@dataclass(frozen=True)
class PlainOutput:
    """Result ``index`` of the inner graph, as it is."""

    index: int


@dataclass(frozen=True)
class ExtendedOutput:
    """The cache tensor of argument ``argument``, longer by ``new`` tokens."""

    argument: int
    new: Size


@dataclass(frozen=True)
class FreshOutput:
    """A cache tensor made of the results from ``first`` on, holding ``tokens`` tokens."""

    first: int
    plan: TensorPlan
    tokens: Size
    dtype: torch.dtype


Output = PlainOutput | ExtendedOutput | FreshOutput


@dataclass(frozen=True)
class Binding:
    """How arguments and results of Dynamo's graph map to those of the inner graph.

    Attributes:
        packed: positions of the packed arguments.
        outputs: one per result of Dynamo's graph.
        examples: fake or real example arguments of the inner graph.
    """

    packed: tuple[int, ...]
    outputs: tuple[Output, ...]
    examples: tuple[Any, ...]


def unpack_unknown_readers(graph: Graph) -> list[tuple[str, str]]:
    """Puts ``unpack`` between a packed tensor and every reader that cannot read it.

    Returns:
        (packed node, reader) names of each.
    """
    found = []
    for node in list(graph.nodes):
        if not is_packed(node):
            continue
        readers = [u for u in node.users if u.target not in logical.LOGICAL and u.op != "output"]
        for reader in readers:
            if isinstance(reader.meta.get("example_value"), int | torch.SymInt):
                _replace_size(reader)
                continue
            with graph.inserting_before(reader):
                plain = graph.call_function(logical.unpack, (node,))
            example = node.meta["example_value"]
            plain.meta["example_value"] = (
                example.decode() if isinstance(example, PackedKV) else example
            )
            reader.replace_input_with(node, plain)
            found.append((node.name, reader.name))
    return found


def _replace_size(reader: Node) -> None:
    """Computes what ``reader`` asks of a packed tensor (``numel``, say) from the graph's
    symbols."""
    graph = reader.graph
    with graph.inserting_before(reader):
        size = symbol_node(graph, reader.meta["example_value"])
    for user in list(reader.users):
        user.args = map_arg(user.args, lambda n: size if n is reader else n)
        user.kwargs = map_arg(user.kwargs, lambda n: size if n is reader else n)
    graph.erase_node(reader)


def is_packed(node: Node) -> bool:
    """Whether ``node`` stands for a packed cache tensor."""
    if node.op == "placeholder":
        return isinstance(node.meta.get("example_value"), PackedKV)
    return node.target is logical.append


def bind_state(graph: Graph, example_inputs: list[Any]) -> Binding:
    """Rewrites ``graph`` in place, see the module's docstring.

    Args:
        graph: with logical ops.
        example_inputs: what Dynamo passed the backend.
    """
    binder = _Binder(graph)
    packed, examples = binder.bind_inputs(example_inputs)
    for node in list(graph.nodes):
        if node.target in logical.LOGICAL:
            binder.bind_op(node)
    outputs = binder.bind_outputs()
    for node in reversed(list(graph.nodes)):
        if node.target in logical.LOGICAL or node in binder.arguments:
            graph.erase_node(node)
    return Binding(packed, outputs, examples)


class _Binder:
    """The state of one binding: which nodes hold the inner tensors of each packed node."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.state: dict[Node, list[Node]] = {}
        self.plans: dict[Node, TensorPlan] = {}
        self.arguments: dict[Node, int] = {}
        self.symbols = symbol_positions(graph)

    def bind_inputs(self, example_inputs: list[Any]) -> tuple[tuple[int, ...], tuple[Any, ...]]:
        packed: list[int] = []
        examples: list[Any] = []
        for position, node in enumerate(self.graph.find_nodes(op="placeholder")):
            example = node.meta.get("example_value")
            if not isinstance(example, PackedKV):
                examples.append(example_inputs[position])
                continue
            packed.append(position)
            self.arguments[node], self.plans[node] = position, example.plan
            self.state[node] = []
            for name in example.plan.state_names:
                with self.graph.inserting_before(node):
                    inner = self.graph.placeholder(f"{node.name}_{name}")
                inner.meta["example_value"] = getattr(example, name)
                inner_source(node, inner, name)
                self.state[node].append(inner)
                examples.append(getattr(example, name))
        return tuple(packed), tuple(examples)

    def bind_op(self, node: Node) -> None:
        with self.graph.inserting_before(node):
            if node.target is logical.append:
                self._append(node)
            elif node.target is logical.attention:
                self._attention(node)
            else:
                self._unpack(node)

    def _append(self, node: Node) -> None:
        past, new, plan = node.args
        assert isinstance(plan, str)
        self.plans[node] = TensorPlan.parse(plan)
        if past is None:
            state = self._call(ops.pack.default, new, plan)
            self.state[node] = [
                self._with_example(self.graph.call_function(operator.getitem, (state, i)), value)
                for i, value in enumerate(state.meta["example_value"])
            ]
            return
        assert isinstance(past, Node)
        self._call(ops.append.default, self.state[past], new, plan)
        self.state[node] = self.state[past]

    def _attention(self, node: Node) -> None:
        q, keys, values, mask, scale = node.args
        assert isinstance(keys, Node)
        assert isinstance(values, Node)
        plans = (str(self.plans[keys]), str(self.plans[values]))
        bound = self._call(
            ops.attention.default, q, self.state[keys], self.state[values], mask, scale, *plans
        )
        bound.meta = {**node.meta, "example_value": bound.meta["example_value"]}
        node.replace_all_uses_with(bound)

    def _unpack(self, node: Node) -> None:
        (packed,) = node.args
        assert isinstance(packed, Node)
        example = node.meta["example_value"]
        tokens = symbol_node(self.graph, example.shape[2])
        bound = self._call(
            ops.unpack.default, self.state[packed], tokens, str(self.plans[packed]), example.dtype
        )
        node.replace_all_uses_with(bound)

    def _call(self, target: Callable[..., Any], *args: Any) -> Node:
        """A call with its example value, found by running it on the arguments' examples."""
        node = self.graph.call_function(target, args)
        values = map_arg(args, lambda n: n.meta["example_value"])
        return self._with_example(node, target(*values))

    @staticmethod
    def _with_example(node: Node, value: Any) -> Node:
        node.meta["example_value"] = value
        return node

    def bind_outputs(self) -> tuple[Output, ...]:
        output = self.graph.output_node()
        inner: list[Any] = []
        outputs: list[Output] = []
        (results,) = output.args
        assert isinstance(results, list | tuple)
        for result in results:
            if not (isinstance(result, Node) and result in self.state):
                outputs.append(PlainOutput(len(inner)))
                inner.append(result)
            elif result in self.arguments:
                outputs.append(ExtendedOutput(self.arguments[result], Size(0)))
            else:
                outputs.append(self._packed_output(result, inner))
        output.args = (tuple(inner),)
        return tuple(outputs)

    def _packed_output(self, result: Node, inner: list[Any]) -> Output:
        past, new, _ = result.args
        assert isinstance(new, Node)
        example = new.meta["example_value"]
        tokens = Size(example.shape[2], self.symbols)
        if past is None:
            first = len(inner)
            inner.extend(self.state[result])
            return FreshOutput(first, self.plans[result], tokens, example.dtype)
        if not isinstance(past, Node) or past not in self.arguments:
            raise GraphError(f"{result.name} appends to {past}, which is not a cache argument.")
        return ExtendedOutput(self.arguments[past], tokens)
