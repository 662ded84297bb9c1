"""The spellings of attention: patterns that lead from its output to query, keys and values.

What lies between the product of query and keys and the softmax may come in any order, so it is
matched as a chain of steps and then folded into ``softcap``, ``scale``, a mask and sinks by
`kvpass.graph.analysis.scores`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from kvpass.graph.analysis.attention_site import AttentionSite
from kvpass.graph.analysis.effects import disturbance
from kvpass.graph.analysis.gate import with_gate
from kvpass.graph.analysis.reads import Read, follow
from kvpass.graph.analysis.scores import Scores, fold_scores, number, row_maximum_of
from kvpass.graph.pattern import (
    As,
    Call,
    Capture,
    Captures,
    Chain,
    Either,
    Is,
    Items,
    Link,
    Miss,
    Pattern,
    Step,
)
from kvpass.graph.spellings import argument, op_name


def _splits_heads(index: Any) -> bool:
    return isinstance(index, tuple) and len(index) >= 3 and index[2] is None


def _drops_last(index: Any) -> bool:
    rows = (Ellipsis,), (slice(None),) * 3, (slice(None),) * 2
    return isinstance(index, tuple) and index[:-1] in rows and index[-1] == slice(None, -1)


def _number(value: Any) -> bool:
    return number(value) is not None


def _is_maximum(value: Any) -> bool:
    return row_maximum_of(value) is not None


def repeated(x: Pattern) -> Pattern:
    """``x`` with every KV head repeated for the query heads that share it."""
    split = Call("getitem", input=x, index=Is(_splits_heads, "[:, :, None]"))
    return Call("reshape", input=Call("expand", input=split))


_BY = Capture("by")
_NUMBER = Capture("by", _number, "a number")
_FILL = Capture("fill", _number, "a number")
_CAST = Link("cast", lambda x: Call("to", input=x))
_VIEW = Link("view", lambda x: Call("reshape", input=x))
_CONTIGUOUS = Link("contiguous", lambda x: Call("contiguous", input=x))
# From a cache tensor to the matrix that the query or the weights are multiplied with.
_READ = (
    _CAST,
    _CONTIGUOUS,
    Link("swap", lambda x: Call("transpose", input=x)),
    Link("swap", lambda x: Call("permute", input=x)),
    Link("swap", lambda x: Call("getattr", input=x, name=Is(lambda n: n == "mT", "mT"))),
    Link("swap", lambda x: Call("mT", input=x)),
    Link("repeat", repeated),
    Link("repeat", lambda x: Call("repeat_interleave", input=x)),
    Link("repeat", lambda x: Call("expand", input=x)),
    _VIEW,
)
_KEYS = Chain("key_steps", Capture("keys"), _READ)
_VALUES = Chain("value_steps", Capture("values"), _READ)
_PRODUCT = As(
    "product",
    Either(
        Call("matmul", input=Capture("q"), other=_KEYS),
        Call("baddbmm", batch1=Capture("q"), batch2=_KEYS),
    ),
)
_SCORES = Chain(
    "score_steps",
    _PRODUCT,
    (
        _CAST,
        _VIEW,
        _CONTIGUOUS,
        Link("mul", lambda x: Call("mul", input=x, other=_NUMBER), ("by",)),
        Link("div", lambda x: Call("div", input=x, other=_NUMBER), ("by",)),
        Link("tanh", lambda x: Call("tanh", input=x)),
        Link("add", lambda x: Call("add", input=x, other=_BY), ("by",)),
        Link("hide", lambda x: Call("masked_fill", input=x, mask=_BY, value=_FILL), ("by", "fill")),
        Link("hide", lambda x: Call("where", condition=_BY, input=_FILL, other=x), ("by", "fill")),
        Link("show", lambda x: Call("where", condition=_BY, input=x, other=_FILL), ("by", "fill")),
        Link("floor", lambda x: Call("max", input=x, other=_FILL), ("fill",)),
        Link(
            "sinks",
            lambda x: Call(
                "cat",
                tensors=Items((x, Call("expand", input=_BY))),
                dim=Is(lambda d: d in (-1, 3), "the last dimension"),
            ),
            ("by",),
        ),
        Link(
            "shift",
            lambda x: Call(
                "sub", input=x, other=Capture("by", _is_maximum, "the maximum of each row")
            ),
            ("by",),
        ),
    ),
)
_SOFTMAX = As(
    "softmax",
    Call("softmax", input=_SCORES, dim=Capture("dim", lambda d: d in (-1, 2, 3), "the last")),
)
_OFF = Is(lambda training: training is False, "no dropout")
_NONE = Is(lambda p: p == 0, "no dropout")
_WEIGHTS = Chain(
    "weight_steps",
    _SOFTMAX,
    (
        _CAST,
        _VIEW,
        _CONTIGUOUS,
        Link("dropout", lambda x: Call("dropout", input=x, p=_NONE)),
        Link("dropout", lambda x: Call("dropout", input=x, training=_OFF)),
        Link("drop_sinks", lambda x: Call("getitem", input=x, index=Is(_drops_last, "[..., :-1]"))),
    ),
)
_MATMUL = Call("matmul", input=_WEIGHTS, other=_VALUES)
_SDPA = Call("sdpa", query=Capture("q"), key=_KEYS, value=_VALUES, dropout_p=_NONE)
FORMS: dict[str, Call] = {"sdpa": _SDPA, "matmul": _MATMUL}


def _ends_softmax(node: Node) -> bool:
    """Whether ``node`` multiplies attention weights with values."""
    if op_name(node) not in ("matmul", "baddbmm") or not isinstance(node.args[0], Node):
        return False
    weights, steps = node.args[0], 0
    while op_name(weights) != "softmax" and steps < 6:
        inputs = weights.all_input_nodes
        if not inputs or op_name(weights) in ("matmul", "baddbmm", "linear", "sdpa"):
            return False
        weights, steps = inputs[0], steps + 1
    return op_name(weights) == "softmax"


def find_attention(
    node: Node, path: str, is_source: Callable[[Node], bool]
) -> AttentionSite | Miss | None:
    """The attention whose output ``node`` is. It may have a ``miss``; a `Miss` in its place means
    that not even the roles of keys and values are known; None that nothing looks like attention.

    ``is_source``: nodes that are keys or values although views lead to them: what is written into
    a cache and read beside it.
    """
    form = "sdpa" if op_name(node) == "sdpa" else "matmul"
    if form == "matmul" and not _ends_softmax(node):
        return None
    found: Captures = {}
    if miss := FORMS[form].match(node, found):
        return miss
    for name, steps in (("keys", "key_steps"), ("values", "value_steps")):
        for i, step in enumerate(found[steps]):
            if is_source(step.node):
                found[name], found[steps] = step.node, found[steps][i + 1 :]
                break
    q, k, v = (found[name] for name in ("q", "keys", "values"))
    products = (found.get("product", node), node)
    site = AttentionSite(form, node, path, q, k, v, heads=0, products=products)
    keys = follow(site.keys, found["key_steps"])
    values = follow(site.values, found["value_steps"])
    if isinstance(keys, Miss):
        return keys
    if isinstance(values, Miss):
        return values
    if keys.swapped != (form == "matmul") or values.swapped:
        return Miss("keys and values are not transposed as attention does", node)
    if miss := disturbance(found, node):
        return replace(site, miss=miss)
    return _complete(site, found, keys, values)


def _complete(site: AttentionSite, found: Captures, keys: Read, values: Read) -> AttentionSite:
    """Query, mask and scores of a site whose keys and values are known."""
    q, k = (n.meta["example_value"] for n in (site.q, site.keys))
    query = _query(site.q, k.dtype)
    joined = q.dim() == 3
    heads = keys.heads if joined else int(q.shape[1])
    site = replace(site, q=query, heads=heads)
    if miss := _shape_miss(site, keys, values):
        return replace(site, miss=miss)
    scores = _sdpa_scores(site) if site.form == "sdpa" else fold_scores(found, heads)
    if isinstance(scores, Miss):
        return replace(site, miss=scores)
    if site.form == "matmul" and (miss := _weights_miss(found, scores)):
        return replace(site, miss=miss)
    mask = scores.plain_mask
    site = replace(
        site,
        mask=mask,
        mask_steps=() if mask is not None else tuple(scores.mask),
        causal=site.form == "sdpa" and bool(argument(site.root, "is_causal")),
        scale=scores.scale,
        sinks=scores.sinks,
        softcap=scores.softcap,
    )
    return with_gate(site, found) if site.form == "matmul" else site


def _query(q: Node, dtype: torch.dtype) -> Node:
    """``q`` before it was widened for a product in higher precision."""
    if op_name(q) == "to" and isinstance(source := q.args[0], Node):
        example = source.meta["example_value"]
        if example.dtype == dtype != q.meta["example_value"].dtype:
            return source
    return q


def _sdpa_scores(site: AttentionSite) -> Scores | Miss:
    scale, mask = argument(site.root, "scale"), argument(site.root, "attn_mask")
    if isinstance(scale, Node):
        return Miss("its scale is computed in the graph", scale)
    dim = int(site.q.meta["example_value"].shape[-1])
    scores = Scores(site.heads, scale=float(dim**-0.5 if scale is None else scale))
    if mask is not None and (reason := scores.add(mask, site.root)):
        return Miss(reason, mask)
    return scores


def _weights_miss(found: Captures, scores: Scores) -> Miss | None:
    steps: tuple[Step, ...] = found["weight_steps"]
    for step in steps:
        if step.name == "view" and (reason := scores.view(step)):
            return Miss(reason, step.node)
    softmax: Node = found["softmax"]
    if found["dim"] not in (-1, softmax.meta["example_value"].dim() - 1):
        return Miss("the softmax is not over the last dimension", softmax)
    dropped = [s.node for s in steps if s.name == "drop_sinks"]
    if len(dropped) != (scores.sinks is not None):
        return Miss("a column of the weights is dropped, or the sinks' is not", steps[-1].node)
    return None


def _shape_miss(site: AttentionSite, keys: Read, values: Read) -> Miss | None:
    """The shapes and dtypes that the patterns do not look at."""
    q, k, v, out = (n.meta["example_value"] for n in (site.q, site.keys, site.values, site.root))
    if q.dim() != (3 if keys.merged else 4) or out.dim() != (3 if values.merged else 4):
        return Miss("batch and heads are one dimension of the keys, not of the query", site.root)
    if site.heads % k.shape[1] or k.shape[1] != v.shape[1]:
        return Miss(
            f"{site.heads} query heads do not share {k.shape[1]} key and {v.shape[1]} value heads",
            site.root,
        )
    if any(heads not in (site.heads, k.shape[1]) for heads in (keys.heads, values.heads)):
        return Miss(f"{keys.heads} and {values.heads} heads are read by {site.heads}", site.root)
    if not (q.dtype == k.dtype == v.dtype):
        return Miss(f"query, keys and values are {q.dtype}, {k.dtype} and {v.dtype}", site.root)
    if out.dtype != q.dtype:
        return Miss(f"the query is {q.dtype}, the output {out.dtype}", site.root)
    return None
