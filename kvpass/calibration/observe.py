"""Watches the attentions of a model through its graphs, whatever family it is of."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from tqdm.auto import tqdm

from kvpass._torch import is_compiled, many_graphs
from kvpass.calibration.importance import (
    gradient_norms,
    matrices,
    only_gradients_of,
    projections,
    summed_loss,
)
from kvpass.calibration.seen import (
    GradientObserver,
    Kind,
    Observer,
    Replace,
    Rotation,
    Seen,
    SeenGradient,
    Stored,
)
from kvpass.errors import OptionError, UnmatchedGraphError
from kvpass.graph.forms import AttentionSite
from kvpass.graph.pattern import Miss
from kvpass.graph.sites import Sites, find_sites
from kvpass.rules.cache_before_rope import turned
from kvpass.rules.fuse_attention import attention_call
from kvpass.rules.pushes.rotary import rotations

# Of a text, enough to see which weights make keys and values.
_FEW_TOKENS = 8
# Who looks on. Not part of a graph, so that Dynamo compiles a model once for all passes.
_observer: ContextVar[Observer] = ContextVar("observer")
# What a forward pass has stored for the observer of gradients.
_stored: ContextVar[list[Made] | None] = ContextVar("stored", default=None)
# What keys and values are replaced by.
_replace: ContextVar[Replace | None] = ContextVar("replace", default=None)


@dataclass(frozen=True)
class Made:
    """Keys or values in a forward pass; ``probe`` is zero, was added to them, and gets their
    gradient; ``made`` is ``x`` with what autograd knows of it."""

    layer: str
    kinds: tuple[Kind, ...]
    x: Tensor
    probe: Tensor
    made: Tensor


class Watched:
    """Runs of a model over all batches, see `kvpass.calibration.seen.Pass`.

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
        """See `Pass.tokens`."""
        return sum(len(ids) * max(0, ids.shape[1] - skip) for ids in self._batches)

    def __call__(self, observer: Observer, name: str) -> None:
        """See `Pass.__call__`."""
        known = inspect.signature(self._model.forward).parameters
        last = {"logits_to_keep": 1} if "logits_to_keep" in known else {}

        def count(seen: Seen) -> None:
            self._found += 1
            observer(seen)

        token = _observer.set(count)
        try:
            with torch.no_grad():
                self._run(lambda ids: self._compiled(input_ids=ids, use_cache=True, **last), name)
        finally:
            _observer.reset(token)

    def gradients(self, observer: GradientObserver, name: str) -> None:
        """See `Pass.gradients`."""
        token = _observer.set(lambda _: None)
        try:
            with torch.enable_grad(), only_gradients_of(self._model, []):
                self._run(lambda ids: self._gradients(ids, observer), name)
        finally:
            _observer.reset(token)

    def importance(self, name: str) -> dict[tuple[str, Stored], float]:
        """See `Pass.importance`."""
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

    def loss(self, replace: Replace | None, name: str) -> float:
        """See `Pass.loss`."""
        tokens = (_observer.set(lambda _: None), _replace.set(replace))
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
            _replace.reset(tokens[1])
        return total / sum(ids[:, 1:].numel() for ids in self._batches)

    def _forward(self, ids: Tensor) -> tuple[list[Made], Tensor]:
        """What a forward pass stores, and its logits."""
        stored: list[Made] = []
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
                observer(SeenGradient(s.layer, kind, s.x, gradient))

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
    """The backend: beside every attention, a call of the observer."""
    sites = find_sites(gm.graph)
    for site in sites.attentions:
        if site.miss is None:
            _watch(gm.graph, site, sites)
    gm.recompile()
    return gm.forward


def _watch(graph: Graph, site: AttentionSite, sites: Sites) -> None:
    # Layers that share their keys and values are one layer of the plan: the first of them.
    layer = sites.roles[site.keys][1].path
    new = _new(site.keys, sites)
    halves = tuple(
        Rotation(start, stop, "halves" if halves else "neighbours")
        for start, stop, halves in rotations(new)
    )
    found = turned(new)
    if found is None:
        before: Node | Miss = new
    elif isinstance(found, Miss):
        before = found
    elif len(found.parts) > 1:
        before = Miss("the keys before their rotary embedding are no tensor", new)
    else:
        (before,) = found.parts

    def look(keys_before: Tensor | str, *call: Any) -> None:
        q, keys, values, mask, scale, *more = call
        sinks, _, _, softcap = more or (None, False, 0, 0.0)
        known = (q, keys, values, mask, scale, sinks, site.causal, softcap, halves, keys_before)
        _observer.get()(Seen(layer, *known))

    with graph.inserting_before(site.root):
        call = attention_call(graph, site, site.keys, site.values)
        shown = str(before) if isinstance(before, Miss) else before
        graph.call_function(look, (shown, *call.args))
        graph.erase_node(call)
    if before is new:
        _probe(graph, new, layer, "keys", "before_rope")
    else:
        _probe(graph, new, layer, "keys")
        if isinstance(before, Node):
            _probe(graph, before, layer, "before_rope")
    _probe(graph, _new(site.values, sites), layer, "values")


def _probe(graph: Graph, x: Node, layer: str, *kinds: Kind) -> None:
    """Adds a probe to ``x`` while gradients are asked for; once, whoever shares it."""
    if any(getattr(user.target, "__name__", "") == "probed" for user in x.users):
        return

    def probed(tensor: Tensor) -> Tensor:
        if (replace := _replace.get()) is not None:
            return replace(layer, kinds, tensor)
        stored = _stored.get()
        if stored is None:
            return tensor
        probe = torch.zeros_like(tensor, requires_grad=True)
        stored.append(Made(layer, kinds, tensor.detach(), probe, tensor))
        return tensor + probe

    with graph.inserting_after(x):
        node = graph.call_function(probed, (x,))
    node.meta = {**x.meta}
    x.replace_all_uses_with(node, lambda user: user is not node)


def _new(read: Node, sites: Sites) -> Node:
    """What is appended to the cache tensor that attention reads."""
    update = sites.updates.get(read) or sites.static(read)
    assert update is not None
    return update.new
