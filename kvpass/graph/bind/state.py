"""Binds logical cache tensors to their inner tensors.

A `PackedKV` placeholder becomes one placeholder per inner tensor; ``append`` becomes an op that
mutates them in place, or, for a first prompt, one that makes them. `Binding` remembers how the
callable around the graph maps its arguments and results.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node

from kvpass._torch import inner_example, inner_source, mark_static_input, unkept
from kvpass._torch_sizes import Size, same_size, symbol_node, symbol_positions, symbols_of
from kvpass.errors import GraphError
from kvpass.format.channels import ChannelBasis, channel_basis
from kvpass.format.layout import Field
from kvpass.format.retention import MAX_STEP
from kvpass.format.sharded_plan import Sharded
from kvpass.format.tensor_plan import TensorPlan
from kvpass.graph.analysis.static import StaticUpdate
from kvpass.graph.bases import (
    constant_beside,
    constant_node,
    constant_value,
    inverse,
    is_rotation,
    of_heads,
    shared,
)
from kvpass.graph.bind.binding import (
    Binding,
    ExtendedOutput,
    FreshOutput,
    NumberOutput,
    Output,
    PaddingArgument,
    PlainBuffer,
    PlainOutput,
    StaticStep,
)
from kvpass.graph.bind.chunks import ChunkBinder
from kvpass.graph.bind.constants import bind_constants
from kvpass.graph.bind.padding import widen_padding
from kvpass.graph.bind.rotary import RotaryBinder
from kvpass.graph.bind.shard import ShardBinder
from kvpass.graph.bind.sizes import (
    drop_unread,
    growing_argument,
    number_arguments,
    room_argument,
    size_arguments,
)
from kvpass.graph.calls import add_call
from kvpass.graph.logical_calls import (
    AppendCall,
    AttentionCall,
    BasisCall,
    PackedCall,
    behind_slides,
)
from kvpass.ops import logical
from kvpass.ops.basis import rotate
from kvpass.ops.library import op_of
from kvpass.tensor.meta import Inner
from kvpass.tensor.packed import PackedKV

ops = torch.ops.kvpass


def bind_state(graph: Graph, example_inputs: list[Any], replayed: bool = False) -> Binding:
    """Rewrites ``graph`` in place, see the module's docstring.

    Args:
        graph: with logical ops.
        example_inputs: what Dynamo passed the backend.
        replayed: steps are to be replayed, and recorded anew when a cache tensor has moved.
    """
    binder = _Binder(graph, replayed)
    arguments = list(graph.find_nodes(op="placeholder"))
    known = [node.meta.get("example_value") for node in arguments]
    examples = binder.bind_inputs(example_inputs)
    inner = {node for nodes in binder.state.values() for node in nodes}
    binder.bind_ops()
    buffers = tuple(binder.plain_buffers())
    outputs = binder.bind_outputs()
    for node in reversed(list(graph.nodes)):
        bound = node.target in logical.LOGICAL and node.target is not logical.rotate_weight
        if bound or node in binder.arguments:
            graph.erase_node(node)
    folds, constants, more = bind_constants(graph, binder.positions)
    before = graph.find_nodes(op="placeholder")
    given = dict(zip(before, [*examples, *binder.chunks.examples, *more], strict=True))
    numbers = number_arguments(graph, binder.symbols) if replayed else ()
    masks = sorted({x.argument for x in binder.paddings})
    replaced, wide = widen_padding(graph, [arguments[i] for i in masks])
    dropped = drop_unread(graph, binder.positions, replaced)
    sizes = size_arguments(graph, known)
    packed = [node.meta["example_value"] for node in binder.arguments]
    room = replayed and room_argument(graph, packed)
    state, after = inner.union(wide), list(graph.find_nodes(op="placeholder"))
    return Binding(
        packed=tuple(binder.arguments.values()),
        shared=binder.rotary.groups(),
        statics=tuple(binder.statics),
        masks=tuple((mask, argument) for argument, mask in binder.masks.items()),
        counts=tuple(dict.fromkeys(binder.counts)),
        buffers=buffers,
        outputs=outputs,
        chunks=binder.chunks.step(),
        folds=folds,
        constants=constants,
        numbers=numbers,
        paddings=tuple(binder.paddings),
        sizes=sizes,
        widened=tuple(binder.positions[node] for node in replaced),
        dropped=dropped,
        replayed=room,
        growing=growing_argument(graph, packed),
        state=frozenset(i for i, node in enumerate(after) if node in state),
        examples=tuple(given.get(node, node.meta["example_value"]) for node in after),
    )


class _Binder:
    """The state of one binding: which nodes hold the inner tensors of each packed node."""

    def __init__(self, graph: Graph, replayed: bool) -> None:
        self.graph = graph
        self.replayed = replayed
        self.state: dict[Node, list[Node]] = {}
        self.plans: dict[Node, TensorPlan] = {}
        self.arguments: dict[Node, int] = {}
        self.positions = {n: i for i, n in enumerate(graph.find_nodes(op="placeholder"))}
        self.statics: list[StaticStep] = []
        self.masks: dict[int, int] = {}
        self.counts: list[tuple[int, int]] = []
        self.paddings: list[PaddingArgument] = []
        self.symbols = symbol_positions(graph)
        self.rotary = RotaryBinder(graph, self.positions)
        self.chunks = ChunkBinder(graph, self.positions)
        self.shards = ShardBinder(graph)
        self._bind = {
            logical.append: self._append,
            logical.attention: self._attention,
            logical.length: self._length,
            logical.rotate_channels: self._rotate,
            logical.reorder_chunks: self._reorder,
            logical.slide: self._slide,
            logical.stored: self._unpack,
            logical.unpack: self._unpack,
        }

    def bind_inputs(self, example_inputs: list[Any]) -> list[Any]:
        """Makes the placeholders of the inner tensors. Returns examples for all arguments."""
        examples: list[Any] = []
        for node, position in self.positions.items():
            example = node.meta.get("example_value")
            if not isinstance(example, PackedKV):
                examples.append(example_inputs[position])
                continue
            self.arguments[node], self.plans[node], self.state[node] = position, example.plan, []
            for field, known in zip(example.plan.layout.fields, example.meta.inner, strict=True):
                shared = field.name == "cos_sin"
                inner = self.rotary.known(node) if shared else None
                if inner is None:
                    inner = self._inner_argument(node, field, known)
                    examples.append(inner.meta["example_value"])
                    if shared:
                        self.rotary.hold(node, inner)
                self.state[node].append(inner)
        return examples

    def _inner_argument(self, node: Node, field: Field, known: Inner) -> Node:
        example, name = node.meta["example_value"], field.name
        with self.graph.inserting_before(node):
            inner = self.graph.placeholder(f"{node.name}_{name}")
        inner_source(node, inner, name)
        ends, room = example.segment_ends, 2 * example.plan.tile // field.group
        if name == "segment_ends":
            inner.meta["example_value"] = ends
        else:
            batch = example.shape[0]
            shape = [batch if isinstance(size, str) else size for size in known.shape]
            inner.meta["example_value"] = inner_example(inner, shape, known.dtype, ends, room)
        if self.replayed or example.plan.room is not None:
            mark_static_input(inner)
        return inner

    def bind_ops(self) -> None:
        """Puts ops on inner tensors in the place of logical ones."""
        # Inner tensors that are arguments have sizes of their own, in each layer.
        ends = [argument.meta["example_value"].segment_ends for argument in self.arguments]
        with unkept(ends[0]) if ends else nullcontext():
            for node in list(self.graph.nodes):
                if node.target in self._bind:
                    with self.graph.inserting_before(node):
                        self._bind[node.target](node)

    def _append(self, node: Node) -> None:
        call = AppendCall.at(node)
        past, plan = call.past, call.parsed
        self.plans[node] = plan
        if (static := node.meta.get("static")) is not None:
            self.statics.append(self._static_step(static))
        if past is None:
            stored = str(self._stored(node))
            pack, constants = op_of(plan, "pack"), {"ranges": call.ranges, **self._clip(node)}
            self._fresh(node, add_call(self.graph, pack, self._new(call), stored, **constants))
            if plan.rope is not None:
                self.state[node].append(self.rotary.packed(node, stored))
            return
        own = self._own(past)
        if plan.rope is not None:
            self.rotary.append(node, own[plan.layout.names.index("segment_ends")])
        rotated = () if call.rope is None else (self.rotary.kept(node), call.rope)
        arguments = (own, self._new(call), call.plan, *rotated)
        add_call(self.graph, op_of(plan, "append"), *arguments, **self._clip(node))
        self.state[node] = self.state[past]

    def _new(self, call: AppendCall) -> Node:
        """The new tokens of a step; those of a prompt that is sharded are compared with others'."""
        plan = call.parsed
        if not isinstance(plan, Sharded):
            return call.new
        prompt = call.past is None or call.new.meta["example_value"].shape[2] > MAX_STEP
        return self.shards.prompt(call.new, plan.shard) if prompt else call.new

    def _clip(self, node: Node) -> dict[str, Node]:
        """The factors of clipping of an ``append``, if each group has its own."""
        clip = self.plans[node].codec.clip
        if not isinstance(clip, tuple):
            return {}
        factors = torch.tensor(clip, device="cpu")
        return {"clip": constant_beside(self.graph, factors, AppendCall.at(node).new)}

    def _reorder(self, node: Node) -> None:
        call = AppendCall.at(node)
        self.plans[node] = call.parsed
        inputs = (self._new(call), self.chunks.scatter_index(call), call.plan)
        if call.past is None:
            self._fresh(node, add_call(self.graph, op_of(call.parsed, "reorder"), *inputs))
            return
        self.state[node] = self.state[call.past]
        add_call(self.graph, op_of(call.parsed, "extend"), self._own(call.past), *inputs)

    def _fresh(self, node: Node, made: Node) -> None:
        """The state of ``node`` is the list of tensors ``made``."""
        count = len(made.meta["example_value"])
        self.state[node] = [add_call(self.graph, operator.getitem, made, i) for i in range(count)]

    def _own(self, packed: Node) -> list[Node]:
        """The nodes of the state but for what all layers share."""
        return self.state[packed][: len(self.plans[packed].layout.own)]

    def _stored(self, node: Node) -> TensorPlan:
        """The plan by which the first prompt of an ``append`` is packed."""
        plan = self.plans[node]
        return replace(plan, window_size=None) if AppendCall.at(node).whole else plan

    def _slide(self, node: Node) -> None:
        packed = PackedCall.at(node).packed
        self.state[node], self.plans[node] = self.state[packed], self.plans[packed]

    def _length(self, node: Node) -> None:
        packed = PackedCall.at(node).packed
        plan = self.plans[packed]
        ends = self.state[packed][plan.layout.names.index("segment_ends")]
        length = add_call(self.graph, ops.length.default, ends, plan.side_by_side)
        node.replace_all_uses_with(length)

    def _tokens(self, node: Node) -> Size:
        return Size(node.meta["example_value"].shape[2], self.symbols)

    def _position(self, node: Node | None) -> int | None:
        return None if node is None else self.positions[node]

    def _static_step(self, update: StaticUpdate) -> StaticStep:
        if update.counter is not None and update.past is not None:
            mark_static_input(update.counter)
        argument, counter = self._position(update.past), self._position(update.counter)
        filled = None if update.filled is None else Size(update.filled, self.symbols)
        return StaticStep(argument, self._tokens(update.new), counter, filled)

    def plain_buffers(self) -> Iterator[PlainBuffer]:
        for node in self.graph.nodes:
            if (found := node.meta.get("pack_after")) is not None:
                update, plan, basis = found
                argument, counter = self.positions[update.buffer], self._position(update.counter)
                yield PlainBuffer(argument, plan, counter, self._tokens(update.new), basis)

    def _attention(self, node: Node) -> None:
        call = AttentionCall.at(node)
        plans = [self.plans[x] for x in (call.keys, call.values)]
        state = (self.state[call.keys], self.state[call.values])
        variant = (*map(str, plans), call.sinks, call.causal, call.window, call.softcap)
        if isinstance(plans[0], Sharded):
            bound = self.shards.attention(call, cast(Any, plans), state)
        else:
            attention = op_of(plans[0], "attention")
            bound = add_call(self.graph, attention, call.q, *state, call.mask, call.scale, *variant)
        bound.meta = {**node.meta, "example_value": bound.meta["example_value"]}
        node.replace_all_uses_with(bound)
        padding = None if call.mask is None else call.mask.meta.get("padding")
        if padding is not None:
            step = AppendCall.at(call.keys)
            assert step.past is not None
            at = (self.positions[padding], self.positions[step.past])
            self.paddings.append(PaddingArgument(*at, self._tokens(step.new)))
        mask, count = (node.meta.get(name) for name in ("hidden_by", "counted_by"))
        if mask is not None or count is not None:
            past = AppendCall.at(call.keys).past
            assert past is not None
            if mask is not None:
                self.masks[self.positions[past]] = self.positions[mask]
            if count is not None:
                self.counts.append((count, self.positions[past]))

    def _unpack(self, node: Node) -> None:
        packed, example = PackedCall.at(node).packed, node.meta["example_value"]
        unpack, plan = op_of(self.plans[packed], "unpack"), str(self.plans[packed])
        tokens = symbol_node(self.graph, example.shape[2])
        bound = add_call(self.graph, unpack, self.state[packed], tokens, plan, example.dtype)
        if isinstance(sharded := self.plans[packed], Sharded):
            bound = self.shards.unpacked(bound, tokens, sharded)
        basis = self._basis(packed) if node.target is logical.unpack else None
        if basis is not None:
            constant = constant_node(self.graph, inverse(of_heads(basis)), example.device)
            bound = self._rotated(bound, constant, example)
        node.replace_all_uses_with(bound)

    def _rotate(self, node: Node) -> None:
        call = BasisCall.at(node)
        bound = self._rotated(call.x, call.basis, node.meta["example_value"])
        node.replace_all_uses_with(bound)

    def _rotated(self, x: Node, basis: Node, example: Tensor) -> Node:
        if is_rotation(value := constant_value(basis)):
            basis = constant_node(self.graph, shared(value), example.device)
        node = self.graph.call_function(rotate, (x, basis))
        node.meta["example_value"] = example
        return node

    def _basis(self, packed: Node) -> ChannelBasis | None:
        """The basis of the channels of a packed tensor."""
        packed = behind_slides(packed)
        if packed.op == "placeholder":
            basis: ChannelBasis | None = packed.meta["example_value"].basis
            return basis
        constant = AppendCall.at(packed).basis
        return None if constant is None else channel_basis(constant_value(constant))

    def bind_outputs(self) -> tuple[Output, ...]:
        output = self.graph.output_node()
        inner: list[Any] = []
        outputs: list[Output] = []
        (results,) = output.args
        assert isinstance(results, list | tuple)
        for result in results:
            if isinstance(result, Node) and result in self.state:
                outputs.append(self._packed_output(result, inner))
            elif (number := self._number(result)) is not None:
                outputs.append(NumberOutput(number))
            else:
                outputs.append(PlainOutput(len(inner)))
                inner.append(result)
        output.args = (tuple(inner),)
        return tuple(outputs)

    def _number(self, result: Any) -> Size | None:
        """The number that a node computes of arguments that are numbers; None if it is no such."""
        example = result.meta.get("example_value") if isinstance(result, Node) else None
        if not isinstance(example, torch.SymInt) or not symbols_of(example) <= set(self.symbols):
            return None
        return Size(example, self.symbols)

    def _packed_output(self, result: Node, inner: list[Any]) -> Output:
        """The packed tensor ``result``, whose state joins the results ``inner`` if it is new."""
        tokens, after = self._tokens(result), result.meta["example_value"].shape[2]
        if result in self.arguments:
            return ExtendedOutput(self.arguments[result], Size(0), None)
        result = behind_slides(result)
        call = AppendCall.at(result)
        count = self._tokens(call.new)
        if call.past is not None:
            if call.past not in self.arguments:
                message = f"{result.name} appends to {call.past}, which is not a cache argument."
                raise GraphError(message)
            past, new = (n.meta["example_value"].shape[2] for n in (call.past, call.new))
            grown = None if same_size(past + new, after) else tokens
            return ExtendedOutput(self.arguments[call.past], count, grown)
        own, basis = self._own(result), self._basis(result)
        shared = self.state[result][len(own) :]
        inner += [node for node in shared if node not in inner]
        found = tuple(inner.index(node) for node in shared)
        first, dtype = len(inner), call.new.meta["example_value"].dtype
        inner += own
        plan, stored = self.plans[result], self._stored(result)
        return FreshOutput(first, plan, stored, count, dtype, basis, found)
