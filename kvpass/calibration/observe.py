"""Watches the attentions of a model through its graphs, whatever family it is of."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import checkpoint
from tqdm.auto import tqdm

from kvpass._torch import is_compiled, many_graphs
from kvpass.calibration.importance import (
    gradient_norms,
    matrices,
    only_gradients_of,
    projections,
    summed_loss,
)
from kvpass.calibration.samples import (
    AttentionSample,
    CapturedKV,
    Exact,
    GradientObserver,
    GradientSample,
    Kind,
    Numbers,
    Observer,
    Replacement,
    windowed,
)
from kvpass.errors import OptionError, UnmatchedGraphError
from kvpass.format.rope import Rope
from kvpass.graph.analysis.attention_site import AttentionSite
from kvpass.graph.analysis.sites import Sites, find_sites
from kvpass.graph.logical_calls import AttentionCall
from kvpass.graph.pattern import Miss
from kvpass.graph.specialize import specialize
from kvpass.rules.basis.rotary import rotations
from kvpass.rules.cache_before_rope import rope_match
from kvpass.rules.fuse_attention import attention_call


@dataclass
class _Pass:
    """What happens at the attentions of one pass over the texts. No part of their graphs, so that
    Dynamo compiles a model once for all passes.

    Attributes:
        observer: sees every attention.
        captured: gets what autograd is to watch; None: nothing is.
        exact: how many last keys, and values, gradients leave out.
        replacement: changes what is read of keys or values.
        found: how many attentions were run.
    """

    observer: Observer = lambda sample: None
    captured: list[CapturedKV] | None = None
    exact: Exact = (0, 0)
    replacement: Replacement | None = None
    found: int = 0


_current: ContextVar[_Pass] = ContextVar("current")


@contextmanager
def _during(one: _Pass) -> Iterator[None]:
    token = _current.set(one)
    try:
        yield
    finally:
        _current.reset(token)


class ModelRunner:
    """Runs a model over all batches, see `kvpass.calibration.samples.CalibrationRunner`.

    The model itself is not changed; its graphs run op by op. A run raises `UnmatchedGraphError` if
    no attention is found in them.

    Raises:
        OptionError: if the model is compiled.
    """

    def __init__(self, model: Any, batches: Sequence[Tensor], progress: bool) -> None:
        if is_compiled(model):
            raise OptionError("The model is compiled already; use it before model.compile().")
        self._model = model
        self._compiled: Any = torch.compile(model, backend=_watched)
        self._batches = batches
        self._progress = progress
        self._device = next(model.parameters()).device

    def tokens(self, skip: int = 0) -> int:
        """See `CalibrationRunner.tokens`."""
        return sum(len(ids) * max(0, ids.shape[1] - skip) for ids in self._batches)

    def __call__(self, observer: Observer, name: str) -> None:
        """See `CalibrationRunner.__call__`."""
        known = inspect.signature(self._model.forward).parameters
        last = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        with torch.no_grad():
            step = partial(self._compiled, use_cache=True, **last)
            self._run(_Pass(observer), lambda ids: step(input_ids=ids), name)

    def gradients(self, observer: GradientObserver, name: str, exact: Exact = (0, 0)) -> None:
        """See `CalibrationRunner.gradients`."""
        captured: list[CapturedKV] = []

        def step(ids: Tensor) -> None:
            logits = self._logits(ids)
            if captured:
                # The sum, not the mean, so that texts count alike however they are batched.
                summed_loss(logits, ids).backward()
            for kv in captured:
                x, gradient = kv.x.detach(), kv.probe.grad
                # Keys and values that the loss does not depend on have none.
                gradient = torch.zeros_like(x) if gradient is None else gradient
                for kind in kv.kinds:
                    observer(GradientSample(kv.layer, kind, x, gradient))
            captured.clear()

        with torch.enable_grad(), only_gradients_of(self._model, []):
            self._run(_Pass(captured=captured, exact=exact), step, name)

    def importance(self, name: str) -> Numbers:
        """See `CalibrationRunner.importance`."""
        captured: list[CapturedKV] = []
        one, every = _Pass(captured=captured), only_gradients_of(self._model, matrices(self._model))
        with _during(one), torch.enable_grad(), many_graphs(), every:
            # A few tokens show which weights make keys and values.
            self._logits(self._batches[0][:1, :8].to(self._device))
            parts = projections(self._model, captured)
        self._check(one)
        texts = [ids.to(self._device) for batch in self._batches for ids in batch.split(1)]
        return gradient_norms(self._model, parts, self._bar(texts, name))

    def loss(self, replacement: Replacement | None, name: str) -> float:
        """See `CalibrationRunner.loss`."""
        losses: list[float] = []
        with torch.no_grad():
            self._run(
                _Pass(replacement=replacement),
                lambda ids: losses.append(float(summed_loss(self._logits(ids), ids))),
                name,
            )
        return sum(losses) / sum(ids[:, 1:].numel() for ids in self._batches)

    def _logits(self, ids: Tensor) -> Tensor:
        logits: Tensor = self._compiled(input_ids=ids, use_cache=True).logits
        return logits

    def _bar(self, items: Sequence[Tensor], name: str) -> Iterable[Tensor]:
        return tqdm(items, desc=name, disable=not self._progress, leave=False)

    def _run(self, one: _Pass, step: Callable[[Tensor], Any], name: str) -> None:
        with _during(one), many_graphs():
            for ids in self._bar(self._batches, name):
                step(ids.to(self._device))
        self._check(one)

    def _check(self, one: _Pass) -> None:
        if not one.found:
            raise UnmatchedGraphError(
                f"No attention over cached keys and values is found in "
                f"{type(self._model).__name__}; kvpass.explain says why after a call with "
                "backend='kvpass'."
            )


def _watched(gm: GraphModule, examples: list[Any]) -> Callable[..., Any]:
    """The backend: behind every attention, a call of the observer."""
    specialize(gm.graph)
    sites = find_sites(gm.graph)
    watcher = _Watcher(gm.graph, sites)
    for site in sites.attentions:
        if site.miss is None:
            watcher.watch(site)
    gm.recompile()
    return gm.forward


class _Watcher:
    """Adds to a graph what observes its attentions, and replaces what they read."""

    def __init__(self, graph: Graph, sites: Sites) -> None:
        self.graph = graph
        self.sites = sites
        # What is read instead of keys and values; once, whoever shares them.
        self.read: dict[Node, Node] = {}

    def watch(self, site: AttentionSite) -> None:
        """Lets one attention be observed."""
        # Layers that share their keys and values are one layer of the plan: the first of them.
        layer = self.sites.roles[site.keys][1].path
        new = self._new(site.keys)
        rotated = tuple(
            Rope("halves" if halves else "neighbours", start, stop)
            for start, stop, halves in rotations(new)
        )
        before = _before_rope(new)
        read = (
            self._keys(new, before, layer),
            self._replaced(self._new(site.values), layer, "values"),
        )

        def observe(
            out: Tensor, read: Sequence[Tensor], before: Tensor | str, attention: Mapping[str, Any]
        ) -> Tensor:
            more: dict[str, Any] = {"rotations": rotated, "before_rope": before}
            sample = AttentionSample(layer, causal=site.causal, **attention, **more)
            one = _current.get()
            one.found += 1
            one.observer(sample)
            found = _attended(sample, *read)
            return out if found is None else found.reshape(out.shape)

        with self.graph.inserting_before(site.root.next):
            node = attention_call(self.graph, site, site.keys, site.values)
            call = AttentionCall.at(node)
            names = ("q", "keys", "values", "mask", "scale", "sinks", "softcap")
            attention = {name: getattr(call, name) for name in names}
            shown = str(before) if isinstance(before, Miss) else before
            out = self.graph.call_function(observe, (site.root, read, shown, attention))
        out.meta = {**site.root.meta}
        self.graph.erase_node(node)
        site.root.replace_all_uses_with(out, lambda user: user is not out)

    def _keys(self, new: Node, before: Node | Miss, layer: str) -> Node:
        """What is read of keys that can be replaced before their rotary embedding, and behind."""
        if before is new:
            return self._replaced(new, layer, "keys", "before_rope")
        if new in self.read or isinstance(before, Miss):
            return self._replaced(new, layer, "keys")
        replaced = self._replaced(before, layer, "before_rope")
        rotated = _recomputed(self.graph, before, new, replaced)
        found = self.read[new] = self._replaced(rotated, layer, "keys")
        return found

    def _replaced(self, x: Node, layer: str, *kinds: Kind) -> Node:
        """What is read of ``x``."""
        if x in self.read:
            return self.read[x]

        def replaced(tensor: Tensor) -> Tensor:
            one = _current.get()
            if one.replacement is not None and one.replacement.layer == layer:
                here = one.replacement.kind in kinds
                return one.replacement.by(tensor).to(tensor.dtype) if here else tensor
            if one.captured is None:
                return tensor
            probe = torch.zeros_like(tensor, requires_grad=True)
            one.captured.append(CapturedKV(layer, kinds, tensor, probe))
            return tensor + probe

        with self.graph.inserting_before(x.next):
            node = self.read[x] = self.graph.call_function(replaced, (x,))
        node.meta = {**x.meta}
        return node

    def _new(self, read: Node) -> Node:
        """What is appended to the cache tensor that attention reads."""
        update = self.sites.updates.get(read) or self.sites.static(read)
        assert update is not None
        return update.new


def _attended(sample: AttentionSample, keys: Tensor, values: Tensor) -> Tensor | None:
    """The attention's output with what is read instead; None: as it is."""
    one = _current.get()
    if one.replacement is not None:
        here = one.replacement.layer == sample.layer
        return windowed(sample, keys, values, one.replacement.exact) if here else None
    if one.captured is None:
        return None
    # Weights of all tokens for all tokens: computed anew in the backward pass.
    found: Tensor = checkpoint(windowed, sample, keys, values, one.exact, use_reentrant=False)
    return found


def _before_rope(new: Node) -> Node | Miss:
    """Keys before their rotary embedding, themselves if they have none."""
    found = rope_match(new)
    if found is None:
        return new
    if isinstance(found, Miss):
        return found
    if len(found.parts) > 1:
        return Miss("the keys before their rotary embedding are no tensor", new)
    (before,) = found.parts
    return before


def _recomputed(graph: Graph, start: Node, end: Node, other: Node) -> Node:
    """``end``, computed from ``other`` in the place of ``start``."""
    copies = {start: other}
    with graph.inserting_before(end.next):
        for node in list(graph.nodes):
            if node is not start and any(n in copies for n in node.all_input_nodes):
                copies[node] = graph.node_copy(node, lambda n: copies.get(n, n))
            if node is end:
                break
    for node in reversed(list(copies.values())):
        if not node.users and node not in (copies[end], other):
            graph.erase_node(node)
    return copies[end]
