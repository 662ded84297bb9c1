"""Watches the attentions of a model through its graphs, whatever family it is of."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from tqdm.auto import tqdm

from kvpass._torch import many_graphs
from kvpass.calibration.seen import Observer, Pass, Rotation, Seen
from kvpass.errors import UnmatchedGraphError
from kvpass.graph.forms import AttentionSite
from kvpass.graph.sites import Sites, find_sites
from kvpass.rules.fuse_attention import attention_call
from kvpass.rules.pushes.rotary import rotations

# Who looks on. Not part of a graph, so that Dynamo compiles a model once for all passes.
_observer: ContextVar[Observer] = ContextVar("observer")


def watch(model: Any, batches: Sequence[Tensor], progress: bool) -> Pass:
    """Runs of ``model`` over all ``batches``, each for one observer.

    The model itself is not changed; its graphs run op by op. A run raises `UnmatchedGraphError` if
    no attention is found in them.
    """
    compiled: Any = torch.compile(model, backend=_watched)
    known = inspect.signature(model.forward).parameters
    last = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
    device = next(model.parameters()).device

    def run(observer: Observer, name: str) -> None:
        found = 0

        def count(seen: Seen) -> None:
            nonlocal found
            found += 1
            observer(seen)

        token = _observer.set(count)
        try:
            with torch.no_grad(), many_graphs():
                for ids in tqdm(batches, desc=name, disable=not progress, leave=False):
                    compiled(input_ids=ids.to(device), use_cache=True, **last)
        finally:
            _observer.reset(token)
        if not found:
            raise UnmatchedGraphError(
                f"No attention over cached keys and values is found in {type(model).__name__}; "
                "kvpass.explain says why after a call with backend='kvpass'."
            )

    return run


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
    turned = tuple(
        Rotation(start, stop, "halves" if halves else "neighbours")
        for start, stop, halves in rotations(_new(site.keys, sites))
    )

    def look(*call: Any) -> None:
        q, keys, values, mask, scale, *more = call
        sinks, _, _, softcap = more or (None, False, 0, 0.0)
        seen = Seen(layer, q, keys, values, mask, scale, sinks, site.causal, softcap, turned)
        _observer.get()(seen)

    with graph.inserting_before(site.root):
        call = attention_call(graph, site, site.keys, site.values)
        graph.call_function(look, call.args)
        graph.erase_node(call)


def _new(read: Node, sites: Sites) -> Node:
    """What is appended to the cache tensor that attention reads."""
    update = sites.updates.get(read) or sites.static(read)
    assert update is not None
    return update.new
