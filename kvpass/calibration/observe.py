"""Watches the attentions of a model through its graphs, whatever family it is of."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import checkpoint
from tqdm.auto import tqdm

from kvpass._torch import is_compiled, many_graphs
from kvpass.calibration.importance import (
    Norms,
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
    Observer,
    Replacement,
    Rotation,
    windowed,
)
from kvpass.errors import OptionError, UnmatchedGraphError
from kvpass.graph.analysis.attention_site import AttentionSite
from kvpass.graph.analysis.sites import Sites, find_sites
from kvpass.graph.logical_calls import AttentionCall
from kvpass.graph.pattern import Miss
from kvpass.rules.cache_before_rope import rope_match
from kvpass.rules.fuse_attention import attention_call
from kvpass.rules.permutation.rotary import rotations

# Of a text, enough to see which weights make keys and values.
_FEW_TOKENS = 8
# Who looks on. Not part of a graph, so that Dynamo compiles a model once for all passes.
_observer: ContextVar[Observer] = ContextVar("observer")
# What a forward pass has stored for the observer of gradients.
_stored: ContextVar[list[CapturedKV] | None] = ContextVar("stored", default=None)
# What keys or values are replaced by.
_replacement: ContextVar[Replacement | None] = ContextVar("replacement", default=None)
# How many last keys and values gradients leave out.
_exact: ContextVar[Exact] = ContextVar("exact", default=(0, 0))


class ModelRunner:
    """Runs of a model over all batches, see `kvpass.calibration.samples.CalibrationRunner`.

    The model itself is not changed; its graphs run op by op. A run raises `UnmatchedGraphError` if
    no attention is found in them.
    """

    def __init__(self, model: Any, batches: Sequence[Tensor], progress: bool) -> None:
        """Raises:
        OptionError: if the model is compiled.
        """
        if is_compiled(model):
            raise OptionError("The model is compiled already; use it before model.compile().")
        self._model = model
        self._compiled: Any = torch.compile(model, backend=_watched)
        self._batches = batches
        self._progress = progress
        self._device = next(model.parameters()).device
        self._found = 0

    def tokens(self, skip: int = 0) -> int:
        """See `CalibrationRunner.tokens`."""
        return sum(len(ids) * max(0, ids.shape[1] - skip) for ids in self._batches)

    def __call__(self, observer: Observer, name: str) -> None:
        """See `CalibrationRunner.__call__`."""
        known = inspect.signature(self._model.forward).parameters
        last = {"logits_to_keep": 1} if "logits_to_keep" in known else {}

        def count(seen: AttentionSample) -> None:
            self._found += 1
            observer(seen)

        token = _observer.set(count)
        try:
            with torch.no_grad():
                self._run(lambda ids: self._compiled(input_ids=ids, use_cache=True, **last), name)
        finally:
            _observer.reset(token)

    def gradients(self, observer: GradientObserver, name: str, exact: Exact = (0, 0)) -> None:
        """See `CalibrationRunner.gradients`."""
        tokens = (_observer.set(lambda _: None), _exact.set(exact))
        try:
            with torch.enable_grad(), only_gradients_of(self._model, []):
                self._run(lambda ids: self._gradients(ids, observer), name)
        finally:
            _observer.reset(tokens[0])
            _exact.reset(tokens[1])

    def importance(self, name: str) -> Norms:
        """See `CalibrationRunner.importance`."""
        token = _observer.set(lambda _: None)
        try:
            every = only_gradients_of(self._model, matrices(self._model))
            with torch.enable_grad(), many_graphs(), every:
                stored, _ = self._forward(self._batches[0][:1, :_FEW_TOKENS].to(self._device))
                found = projections(self._model, stored)
        finally:
            _observer.reset(token)
        self._found = len(found)
        self._check()
        texts = [ids.to(self._device) for batch in self._batches for ids in batch.split(1)]
        bar = tqdm(texts, desc=name, disable=not self._progress, leave=False)
        return gradient_norms(self._model, found, bar)

    def loss(self, replacement: Replacement | None, name: str) -> float:
        """See `CalibrationRunner.loss`."""
        tokens = (_observer.set(lambda _: None), _replacement.set(replacement))
        total = 0.0

        def step(ids: Tensor) -> None:
            nonlocal total
            self._found += 1
            logits = self._compiled(input_ids=ids, use_cache=True).logits
            total += float(summed_loss(logits, ids))

        try:
            with torch.no_grad():
                self._run(step, name)
        finally:
            _observer.reset(tokens[0])
            _replacement.reset(tokens[1])
        return total / sum(ids[:, 1:].numel() for ids in self._batches)

    def _forward(self, ids: Tensor) -> tuple[list[CapturedKV], Tensor]:
        """What a forward pass stores, and its logits."""
        stored: list[CapturedKV] = []
        token = _stored.set(stored)
        try:
            return stored, self._compiled(input_ids=ids, use_cache=True).logits
        finally:
            _stored.reset(token)

    def _gradients(self, ids: Tensor, observer: GradientObserver) -> None:
        stored, logits = self._forward(ids)
        self._found += len(stored)
        if stored:
            # The sum, not the mean, so that texts count alike however they are batched.
            summed_loss(logits, ids).backward()
        for s in stored:
            # Keys and values that the loss does not depend on have none.
            gradient = torch.zeros_like(s.x) if s.probe.grad is None else s.probe.grad
            for kind in s.kinds:
                observer(GradientSample(s.layer, kind, s.x, gradient))

    def _run(self, step: Callable[[Tensor], Any], name: str) -> None:
        self._found = 0
        with many_graphs():
            for ids in tqdm(self._batches, desc=name, disable=not self._progress, leave=False):
                step(ids.to(self._device))
        self._check()

    def _check(self) -> None:
        if not self._found:
            raise UnmatchedGraphError(
                f"No attention over cached keys and values is found in "
                f"{type(self._model).__name__}; kvpass.explain says why after a call with "
                "backend='kvpass'."
            )


def _watched(gm: GraphModule, examples: list[Any]) -> Callable[..., Any]:
    """The backend: behind every attention, a call of the observer."""
    sites = find_sites(gm.graph)
    watcher = _Watcher(gm.graph, sites)
    for site in sites.attentions:
        if site.miss is None:
            watcher.watch(site)
    gm.recompile()
    return gm.forward


class _Watcher:
    """Adds to a graph what looks at its attentions, and replaces what they read."""

    def __init__(self, graph: Graph, sites: Sites) -> None:
        self.graph = graph
        self.sites = sites
        # Of keys and values, what is read of them instead; once, whoever shares them.
        self.read: dict[Node, Node] = {}

    def watch(self, site: AttentionSite) -> None:
        """One attention."""
        # Layers that share their keys and values are one layer of the plan: the first of them.
        layer = self.sites.roles[site.keys][1].path
        new = self._new(site.keys)
        halves = tuple(
            Rotation(start, stop, "halves" if halves else "neighbours")
            for start, stop, halves in rotations(new)
        )
        before = _before_rope(new)
        keys, values = (
            self._keys(new, before, layer),
            self._replaced(self._new(site.values), layer, "values"),
        )

        def look(out: Tensor, read: Sequence[Tensor], before: Tensor | str, *call: Any) -> Tensor:
            q, keys, values, mask, scale, sinks, softcap = call
            known = (q, keys, values, mask, scale, sinks, site.causal, softcap, halves, before)
            seen = AttentionSample(layer, *known)
            _observer.get()(seen)
            return out if (found := _attended(seen, *read)) is None else found.reshape(out.shape)

        shown = str(before) if isinstance(before, Miss) else before
        with self.graph.inserting_before(site.root.next):
            node = attention_call(self.graph, site, site.keys, site.values)
            call = AttentionCall.at(node)
            known = (call.q, call.keys, call.values, call.mask, call.scale, call.sinks)
            reads = (keys, values)
            arguments = (site.root, reads, shown, *known, call.softcap)
            out = self.graph.call_function(look, arguments)
        out.meta = {**site.root.meta}
        self.graph.erase_node(node)
        site.root.replace_all_uses_with(out, lambda user: user is not out)

    def _keys(self, new: Node, before: Node | Miss, layer: str) -> Node:
        if before is new:
            return self._replaced(new, layer, "keys", "before_rope")
        if new in self.read or isinstance(before, Miss):
            return self._replaced(new, layer, "keys")
        turned_again = _again(self.graph, before, new, self._replaced(before, layer, "before_rope"))
        found = self.read[new] = self._replaced(turned_again, layer, "keys")
        return found

    def _replaced(self, x: Node, layer: str, *kinds: Kind) -> Node:
        """What is read of ``x``."""
        if x in self.read:
            return self.read[x]

        def replaced(tensor: Tensor) -> Tensor:
            replacement, stored = _replacement.get(), _stored.get()
            if replacement is not None and replacement.layer == layer:
                here = replacement.kind in kinds
                return replacement.by(tensor).to(tensor.dtype) if here else tensor
            if stored is None:
                return tensor
            probe = torch.zeros_like(tensor, requires_grad=True)
            stored.append(CapturedKV(layer, kinds, tensor.detach(), probe, tensor))
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


def _attended(seen: AttentionSample, keys: Tensor, values: Tensor) -> Tensor | None:
    """The attention's output with what is read instead; None: as it is."""
    replacement = _replacement.get()
    if replacement is not None:
        here = replacement.layer == seen.layer
        return windowed(seen, keys, values, replacement.exact) if here else None
    if _stored.get() is None:
        return None
    # Weights of all tokens for all tokens: computed anew in the backward pass.
    found: Tensor = checkpoint(windowed, seen, keys, values, _exact.get(), use_reentrant=False)
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


def _again(graph: Graph, start: Node, end: Node, other: Node) -> Node:
    """What ``end`` would be with ``other`` in the place of ``start``."""
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
