"""Compiling a graph region by region, those that are alike once: compiling a model then takes as
long as its distinct layers do, however many it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from kvpass._torch import FakeTensorMode, compiling_mode, is_subclass, storage_key, tree_leaves
from kvpass._torch_inductor import Compile
from kvpass._torch_sizes import Numbering, all_symbols
from kvpass.graph.regions import Region, find_regions

# A region more costs about as much as a layer.
_LEAST_SAVED = 2


@dataclass(frozen=True, eq=False)
class _Kind:
    """Regions that are alike.

    Attributes:
        numbering: of the symbols in the inputs of the first of them.
        results: what that one makes of its inputs, as a compiler's stand-ins.
        passed: for each result the number of the input that it is itself; None if it is new.
    """

    numbering: Numbering
    results: list[Any]
    passed: list[int | None]


def compile_regions(
    module: GraphModule, examples: Sequence[Any], compile_one: Compile
) -> tuple[Callable[..., Any], tuple[int, int]]:
    """Compiles ``module``, region by region where some are alike.

    Args:
        module: to be called with ``examples``; its placeholders have example values.
        examples: its arguments.
        compile_one: compiles a graph for its examples.

    Returns:
        The callable, how many regions it consists of, and how many were compiled.
    """
    mode = compiling_mode()
    regions = find_regions(module) if mode is not None and _are_plain(examples) else []
    structures = {region.structure for region in regions}
    if mode is not None and len(regions) - len(structures) >= _LEAST_SAVED:
        search = _Search(module, examples, mode)
        found = [(region, *search.kind(region)) for region in regions]
        if search.succeeded and len(regions) - len(search.kinds) >= _LEAST_SAVED:
            functions = list(_compiled(found, search.values, compile_one))
            callee = _chain(module, regions, functions)
            return callee, (len(functions), len(set(functions)))
    return compile_one(module, list(examples)), (1, 1)


def _are_plain(examples: Sequence[Any]) -> bool:
    """Whether all tensors are dense ones on the CPU, and none is to be differentiated. (Nobody has
    measured what cuts do on a GPU.)"""
    tensors = [x for x in examples if isinstance(x, Tensor)]
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return not differentiated and all(x.device.type == "cpu" and _is_dense(x) for x in tensors)


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not is_subclass(tensor)


class _Search:
    """Finds which regions of a graph are alike.

    Attributes:
        values: examples of the graph's arguments, and stand-ins of what regions pass on.
        kinds: those found, by what makes regions alike.
        succeeded: whether all that regions pass on are numbers, what they got, and tensors with a
            memory of their own, and no two inputs of a region share theirs.
    """

    def __init__(self, module: GraphModule, examples: Sequence[Any], mode: FakeTensorMode) -> None:
        placeholders = module.graph.find_nodes(op="placeholder")
        self.values: dict[Node, Any] = dict(zip(placeholders, examples, strict=True))
        self.kinds: dict[Any, _Kind] = {}
        self.succeeded = True
        self._mode = mode
        self._stand_ins = {node: self._copy(node.meta["example_value"]) for node in placeholders}

    def kind(self, region: Region) -> tuple[_Kind, Numbering]:
        """The kind of a region, whose predecessors have been asked for, and the numbering of the
        symbols in its inputs."""
        given = [self._stand_ins[node] for node in region.inputs]
        numbering = Numbering(self._mode)
        shapes = tuple(_described(value, numbering) for value in given)
        tensors = [x for node in region.inputs if isinstance(x := self.values[node], Tensor)]
        if len(set(map(storage_key, tensors))) < len(tensors):
            # Inductor's caches do not tell such regions from others.
            self.succeeded = False
        offsets = tuple(str(x.storage_offset()) for x in tensors)
        key = region.structure, shapes, offsets, numbering.ranges()
        kind = self.kinds.get(key)
        if kind is None:
            kind = self.kinds[key] = self._run(region, given, numbering)
            results = kind.results
        elif all_symbols(kind.results).isdisjoint(kind.numbering.moved(numbering)):
            results = [self._copy(result) for result in kind.results]
        else:
            results = self._run(region, given, numbering).results
        for node, result, origin in zip(region.outputs, results, kind.passed, strict=True):
            self._stand_ins[node] = result if origin is None else given[origin]
            self.values[node] = result if origin is None else self.values[region.inputs[origin]]
        return kind, numbering

    def _run(self, region: Region, given: list[Any], numbering: Numbering) -> _Kind:
        with self._mode:
            results: list[Any] = region.module(*given)
        numbers = {id(x): number for number, x in enumerate(given) if isinstance(x, Tensor)}
        passed = [numbers.get(id(x)) for x in results]
        new = [x for x in results if isinstance(x, Tensor) and id(x) not in numbers]
        known = {storage_key(x) for x in given if isinstance(x, Tensor)}
        memories = set(map(storage_key, new)) - known
        if len(memories) < len(new) or not all(map(_is_passed, results)):
            self.succeeded = False
        return _Kind(numbering, results, passed)

    def _copy(self, value: Any) -> Any:
        """Another stand-in for ``value``."""
        if not isinstance(value, Tensor):
            return value
        with self._mode:
            return torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=value.device
            )


def _is_passed(value: Any) -> bool:
    return _is_dense(value) if isinstance(value, Tensor) else isinstance(value, int | torch.SymInt)


def _described(value: Any, numbering: Numbering) -> object:
    """What compiled code relies on of an argument like ``value``."""
    if not isinstance(value, Tensor):
        return numbering.number(value) if isinstance(value, int | torch.SymInt) else repr(value)
    sizes = [numbering.number(size) for size in (*value.shape, *value.stride())]
    return value.dtype, value.device, *sizes


def _compiled(
    found: Sequence[tuple[Region, _Kind, Numbering]],
    values: Mapping[Node, Any],
    compile_one: Compile,
) -> Iterator[Callable[..., Any]]:
    """The callable of each region."""
    known: dict[_Kind, Callable[..., Any]] = {}
    for region, kind, numbering in found:
        function = known.get(kind)
        # What compiling has made of one region's sizes must hold for those of the other.
        if function is None or not kind.numbering.holds_for(numbering):
            function = compile_one(region.module, [values[node] for node in region.inputs])
            known.setdefault(kind, function)
        yield function


def _chain(
    module: GraphModule, regions: Sequence[Region], functions: Sequence[Callable[..., Any]]
) -> Callable[..., list[Any]]:
    """What calls the regions one after the other, and forgets what is not read any more."""
    arguments = list(module.graph.find_nodes(op="placeholder"))
    results = tree_leaves(module.graph.output_node().args)
    passed = [node for region in regions for node in region.outputs]
    slots = {node: slot for slot, node in enumerate((*arguments, *passed))}
    last = {node: step for step, region in enumerate(regions) for node in region.inputs}
    kept = {*arguments, *module.graph.output_node().all_input_nodes}
    steps = [
        (
            function,
            [slots[node] for node in region.inputs],
            [slots[node] for node in region.outputs],
            [slots[node] for node in region.inputs if last[node] == step and node not in kept],
        )
        for step, (region, function) in enumerate(zip(regions, functions, strict=True))
    ]
    # A result of the graph may be a number.
    returned = [(slots[x], None) if isinstance(x, Node) else (None, x) for x in results]
    room = [None] * len(passed)

    def call(*args: Any) -> list[Any]:
        values = [*args, *room]
        for function, reads, writes, dead in steps:
            given = [values[slot] for slot in reads]
            for slot in dead:
                values[slot] = None
            for slot, result in zip(writes, function(*given), strict=True):
                values[slot] = result
        return [number if slot is None else values[slot] for slot, number in returned]

    return call
