"""Binds logical cache tensors to their inner tensors.

A `PackedKV` placeholder becomes one placeholder per inner tensor; ``append`` becomes an op that
mutates them in place, or, for a first prompt, one that makes them. `Binding` remembers how the
callable around the graph maps its arguments and results.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from kvpass._torch import (
    Size,
    derived_source,
    inner_source,
    mark_static_input,
    symbol_node,
    symbol_positions,
)
from kvpass.errors import GraphError
from kvpass.folding import Fold
from kvpass.format.order import ChannelOrder
from kvpass.format.tensor_plan import TensorPlan
from kvpass.graph.analysis.static import StaticUpdate
from kvpass.graph.bind.binding import (
    Binding,
    ExtendedOutput,
    FreshOutput,
    Output,
    PlainBuffer,
    PlainOutput,
    StaticStep,
)
from kvpass.graph.bind.chunks import ChunkBinder
from kvpass.graph.bind.rotary import RotaryBinder
from kvpass.graph.calls import add_call
from kvpass.graph.logical_calls import AppendCall, AttentionCall, PackedCall, behind_slides
from kvpass.graph.orders import (
    constant_node,
    constant_value,
    drop_constants,
    inverse,
    is_constant,
)
from kvpass.ops import logical
from kvpass.ops.library import op_of
from kvpass.tensor.packed import PackedKV

ops = torch.ops.kvpass


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
    buffers = tuple(binder.plain_buffers())
    outputs = binder.bind_outputs()
    for node in reversed(list(graph.nodes)):
        bound = node.target in logical.LOGICAL and node.target is not logical.permute_weight
        if bound or node in binder.arguments:
            graph.erase_node(node)
    masks = tuple((mask, argument) for argument, mask in binder.masks.items())
    counts = tuple(dict.fromkeys(binder.counts))
    folds, constants, more = binder.bind_constants()
    return Binding(
        packed=packed,
        shared=tuple(binder.rotary.groups()),
        statics=tuple(binder.statics),
        masks=masks,
        counts=counts,
        buffers=buffers,
        outputs=outputs,
        chunks=binder.chunks.step(),
        folds=folds,
        constants=constants,
        examples=examples + binder.chunks.examples + more,
    )


class _Binder:
    """The state of one binding: which nodes hold the inner tensors of each packed node."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.state: dict[Node, list[Node]] = {}
        self.plans: dict[Node, TensorPlan] = {}
        self.arguments: dict[Node, int] = {}
        self.positions = {n: i for i, n in enumerate(graph.find_nodes(op="placeholder"))}
        self.statics: list[StaticStep] = []
        self.masks: dict[int, int] = {}
        self.counts: list[tuple[int, int]] = []
        self.symbols = symbol_positions(graph)
        self.rotary = RotaryBinder(graph, self.positions)
        self.chunks = ChunkBinder(graph, self.positions)

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
            for field in example.plan.layout.fields:
                name, shared = field.name, field.name == "cos_sin"
                if shared and (known := self.rotary.known(node)) is not None:
                    self.state[node].append(known)
                    continue
                with self.graph.inserting_before(node):
                    inner = self.graph.placeholder(f"{node.name}_{name}")
                inner.meta["example_value"] = getattr(example, name)
                inner_source(node, inner, name)
                if example.plan.room is not None:
                    mark_static_input(inner)
                self.state[node].append(inner)
                if shared:
                    self.rotary.hold(node, inner)
                examples.append(getattr(example, name))
        return tuple(packed), tuple(examples)

    def bind_op(self, node: Node) -> None:
        with self.graph.inserting_before(node):
            if node.target is logical.append:
                self._append(node)
            elif node.target is logical.reorder_chunks:
                self._reorder(node)
            elif node.target is logical.attention:
                self._attention(node)
            elif node.target is logical.slide:
                packed = PackedCall.at(node).packed
                self.state[node], self.plans[node] = self.state[packed], self.plans[packed]
            elif node.target is logical.permute_channels:
                x, order = node.args
                bound = self._permuted(x, order, node.meta["example_value"])
                node.replace_all_uses_with(bound)
            elif node.target in (logical.unpack, logical.stored):
                self._unpack(node)

    def _append(self, node: Node) -> None:
        call = AppendCall.at(node)
        past, new = call.past, call.new
        self.plans[node] = call.parsed
        if (static := node.meta.get("static")) is not None:
            self.statics.append(self._static_step(static))
        if past is None:
            stored = str(self._stored(node))
            state = add_call(self.graph, ops.pack.default, new, stored, call.ranges)
            self.state[node] = [
                self._with_example(self.graph.call_function(operator.getitem, (state, i)), value)
                for i, value in enumerate(state.meta["example_value"])
            ]
            if self.plans[node].rope is not None:
                self.state[node].append(self.rotary.packed(node, stored))
            return
        layout, own = self.plans[node].layout, self._own(past)
        if self.plans[node].rope is not None:
            self.rotary.append(node, ends=own[layout.names.index("segment_ends")])
        rotated = () if call.rope is None else (self.rotary.kept(node), call.rope)
        add_call(self.graph, op_of(self.plans[node], "append"), own, new, call.plan, *rotated)
        self.state[node] = self.state[past]

    def _own(self, packed: Node) -> list[Node]:
        """The nodes of the state but for what all layers share."""
        return self.state[packed][: len(self.plans[packed].layout.own)]

    def _reorder(self, node: Node) -> None:
        call = AppendCall.at(node)
        past, new, text = call.past, call.new, call.plan
        self.plans[node] = call.parsed
        slots = self.chunks.slots(node, new)
        if past is not None:
            self.state[node] = self.state[past]
            own = self._own(past)
            add_call(self.graph, ops.extend_chunks.default, own, new, slots, text)
            return
        made = add_call(self.graph, ops.reorder_chunks.default, new, slots, text)
        self.state[node] = [
            self._with_example(self.graph.call_function(operator.getitem, (made, i)), value)
            for i, value in enumerate(made.meta["example_value"])
        ]

    def _static_step(self, update: StaticUpdate) -> StaticStep:
        if update.counter is not None and update.past is not None:
            mark_static_input(update.counter)
        return StaticStep(
            argument=None if update.past is None else self.positions[update.past],
            new=Size(update.new.meta["example_value"].shape[2], self.symbols),
            counter=None if update.counter is None else self.positions[update.counter],
            filled=None if update.filled is None else Size(update.filled, self.symbols),
        )

    def plain_buffers(self) -> Iterator[PlainBuffer]:
        for node in self.graph.nodes:
            if (found := node.meta.get("pack_after")) is not None:
                update, plan, order = found
                counter = None if update.counter is None else self.positions[update.counter]
                new = Size(update.new.meta["example_value"].shape[2], self.symbols)
                yield PlainBuffer(self.positions[update.buffer], plan, counter, new, order)

    def _stored(self, node: Node) -> TensorPlan:
        """The plan by which the first prompt of an ``append`` is packed."""
        whole = AppendCall.at(node).whole
        return replace(self.plans[node], window_size=None) if whole else self.plans[node]

    def _attention(self, node: Node) -> None:
        call = AttentionCall.at(node)
        keys, values = call.keys, call.values
        plans = (str(self.plans[keys]), str(self.plans[values]))
        bound = add_call(
            self.graph,
            op_of(self.plans[keys], "attention"),
            call.q,
            self.state[keys],
            self.state[values],
            call.mask,
            call.scale,
            *plans,
            call.sinks,
            call.causal,
            call.window,
            call.softcap,
        )
        bound.meta = {**node.meta, "example_value": bound.meta["example_value"]}
        node.replace_all_uses_with(bound)
        mask, count = (node.meta.get(name) for name in ("hidden_by", "counted_by"))
        if mask is not None:
            self.masks[self._past(keys)] = self.positions[mask]
        if count is not None:
            self.counts.append((count, self._past(keys)))

    def _past(self, packed: Node) -> int:
        """The argument that an ``append`` extends."""
        past = AppendCall.at(packed).past
        assert past is not None
        return self.positions[past]

    def _unpack(self, node: Node) -> None:
        packed = PackedCall.at(node).packed
        example = node.meta["example_value"]
        tokens = symbol_node(self.graph, example.shape[2])
        bound = add_call(
            self.graph,
            op_of(self.plans[packed], "unpack"),
            self.state[packed],
            tokens,
            str(self.plans[packed]),
            example.dtype,
        )
        order = self._order(packed) if node.target is logical.unpack else None
        if order is not None:
            index = inverse(order.tensor())[None, :, None]
            bound = self._permuted(bound, constant_node(self.graph, index, example.device), example)
        node.replace_all_uses_with(bound)

    def _permuted(self, x: Any, order: Any, example: Any) -> Node:
        node = self.graph.call_function(torch.take_along_dim, (x, order), {"dim": -1})
        return self._with_example(node, example)

    def _order(self, packed: Node) -> ChannelOrder | None:
        """The order of the channels of a packed tensor."""
        packed = behind_slides(packed)
        if packed.op == "placeholder":
            order: ChannelOrder | None = packed.meta["example_value"].order
            return order
        constant = AppendCall.at(packed).order
        return None if constant is None else ChannelOrder.of(constant_value(constant))

    def bind_constants(self) -> tuple[tuple[Fold, ...], tuple[Tensor, ...], tuple[Any, ...]]:
        """Makes arguments of permuted weights and of constants.

        Returns:
            Those, and example arguments for all of them.
        """
        folds: dict[Node, Fold] = {}
        for node in self.graph.find_nodes(op="call_function", target=logical.permute_weight):
            weight, order, dim = node.args
            assert isinstance(weight, Node)
            assert isinstance(order, Node)
            assert isinstance(dim, int)
            folds[node] = Fold(self.positions[weight], constant_value(order), dim)
        self._make_arguments(folds)
        used = [n for n in self.graph.find_nodes(op="get_attr") if is_constant(n) and n.users]
        constants = {node: constant_value(node) for node in used}
        examples = [n.meta["example_value"] for n in folds]
        self._make_arguments(constants)
        drop_constants(self.graph)
        return tuple(folds.values()), tuple(constants.values()), (*examples, *constants.values())

    def _make_arguments(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            # What has a fold or a constant has an argument, which other graphs may lack.
            last = list(self.graph.find_nodes(op="placeholder"))[-1]
            with self.graph.inserting_after(last):
                last = self.graph.placeholder(f"kvpass_{node.name}")
            last.meta["example_value"] = node.meta["example_value"]
            derived_source(self.graph, last)
            mark_static_input(last)
            node.replace_all_uses_with(last)
            self.graph.erase_node(node)

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
                tokens = Size(result.meta["example_value"].shape[2], self.symbols)
                outputs.append(ExtendedOutput(self.arguments[result], Size(0), tokens))
            else:
                outputs.append(self._packed_output(result, inner))
        output.args = (tuple(inner),)
        return tuple(outputs)

    @staticmethod
    def _output_once(node: Node, inner: list[Any]) -> int:
        """The place of ``node`` among the results ``inner``, which it joins if it is not there."""
        if node not in inner:
            inner.append(node)
        return inner.index(node)

    def _packed_output(self, result: Node, inner: list[Any]) -> Output:
        tokens = Size(result.meta["example_value"].shape[2], self.symbols)
        result = behind_slides(result)
        call = AppendCall.at(result)
        past, example = call.past, call.new.meta["example_value"]
        count = Size(example.shape[2], self.symbols)
        if past is None:
            plan, stored = self.plans[result], self._stored(result)
            own = self._own(result)
            shared = tuple(self._output_once(n, inner) for n in self.state[result][len(own) :])
            first = len(inner)
            inner.extend(own)
            order = self._order(result)
            return FreshOutput(first, plan, stored, count, example.dtype, order, shared)
        if past not in self.arguments:
            raise GraphError(f"{result.name} appends to {past}, which is not a cache argument.")
        return ExtendedOutput(self.arguments[past], count, tokens)
