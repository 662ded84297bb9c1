"""Finds what there is to rewrite: cache updates, and the attention that reads them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor
from torch.fx import Graph, Node

from kvpass._torch import source_name
from kvpass.cache.packed import PackedKV
from kvpass.graph.pattern import (
    Call,
    Capture,
    Is,
    Miss,
    Pattern,
    argument,
    call,
    either,
    furthest,
    op_name,
)

Role = Literal["keys", "values"]
_CACHE_SOURCE = re.compile(r"\.(keys|values)$")
_MODULE = re.compile(r"^L\['self'\]\.?")


@dataclass(frozen=True)
class CacheUpdate:
    """``cat([past, new], dim=-2)``, which the graph returns.

    Attributes:
        cat: the node.
        past: the placeholder of the cache tensor; None where the cache is still empty.
        new: the keys or values to append, ``[B, H, n, D]``. The cat itself if ``past`` is a plain
        tensor.
    """

    cat: Node
    past: Node | None
    new: Node

    @property
    def packed(self) -> bool:
        """Whether the past is a packed cache tensor."""
        return self.past is not None


@dataclass(frozen=True)
class AttentionSite:
    """An attention over updated keys and values, in one of the known forms.

    Attributes:
        form: ``sdpa`` or ``matmul``.
        root: the node of the attention's output, ``[B, Hq, n, Dv]``.
        path: of the attention module.
        q: ``[B, Hq, n, D]``; keys, values: the cats.
        mask: a tensor, or None; ``causal``: the top-left triangle is visible.
        scale: of the scores.
    """

    form: str
    root: Node
    path: str
    q: Node
    keys: Node
    values: Node
    mask: Node | None
    causal: bool
    scale: float


@dataclass
class Sites:
    """Everything found in one graph, by cat node.

    Attributes:
        updates: the cache updates.
        attentions: the attentions over updated keys and values.
        roles: what the attention of each cat reads it as.
        misses: attentions that read an update but are in no known form.
        strange: cache updates in no known form, with the reason.
    """

    updates: dict[Node, CacheUpdate] = field(default_factory=dict)
    attentions: list[AttentionSite] = field(default_factory=list)
    roles: dict[Node, tuple[Role, AttentionSite]] = field(default_factory=dict)
    misses: list[Miss] = field(default_factory=list)
    strange: dict[Node, Miss] = field(default_factory=dict)


def _splits_heads(index: Any) -> bool:
    return isinstance(index, tuple) and len(index) >= 3 and index[2] is None


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def repeated(x: Pattern) -> Pattern:
    """``x`` with every KV head repeated for the query heads that share it."""
    split = call("getitem", input=x, index=Is(_splits_heads, "[:, :, None]"))
    return call("reshape", input=call("expand", input=split))


def _repeated(x: Pattern) -> Pattern:
    """``x``, repeated or not."""
    return either(repeated(x), x)


_LAST = Is(lambda dim: dim in (-1, 3), "the last dimension")
_QUERY, _KEYS, _VALUES = Capture("q"), Capture("keys"), Capture("values")
_SDPA = call(
    "sdpa",
    query=_QUERY,
    key=_repeated(_KEYS),
    value=_repeated(_VALUES),
    dropout_p=Is(lambda p: p == 0, "no dropout"),
)
_SCORES = call(
    "matmul",
    input=_QUERY,
    other=call(
        "transpose",
        input=_repeated(_KEYS),
        dim0=Is(lambda d: d in (2, -2, 3, -1), "the last two dimensions"),
        dim1=Is(lambda d: d in (2, -2, 3, -1), "the last two dimensions"),
    ),
)
_SCALED = either(
    call("mul", input=_SCORES, other=Capture("scale", _number, "a number")),
    call("div", input=_SCORES, other=Capture("divisor", _number, "a number")),
    _SCORES,
)
_MASKED = either(call("add", input=_SCALED, other=Capture("mask")), _SCALED)
_SOFTMAX = call("softmax", input=_MASKED, dim=_LAST)
_CAST = either(call("to", input=_SOFTMAX), _SOFTMAX)
_NO_DROPOUT = Is(lambda training: training is False, "no dropout")
_MATMUL = call(
    "matmul",
    input=either(call("dropout", input=_CAST, training=_NO_DROPOUT), _CAST),
    other=_repeated(_VALUES),
)
FORMS: dict[str, Call] = {"sdpa": _SDPA, "matmul": _MATMUL}


def find_sites(graph: Graph) -> Sites:
    """Cache updates and attentions of a Dynamo graph."""
    sites = Sites()
    for node in graph.output_node().all_input_nodes:
        update = _cache_update(node)
        if update is not None:
            sites.updates[node] = update
        elif strange := _strange_update(node):
            sites.strange[node] = strange
    for node in graph.nodes:
        found = _attention(node, sites)
        if isinstance(found, Miss):
            sites.misses.append(found)
        elif found is not None:
            sites.attentions.append(found)
            sites.roles[found.keys] = ("keys", found)
            sites.roles[found.values] = ("values", found)
    return sites


def _cache_update(node: Node) -> CacheUpdate | None:
    if op_name(node) != "cat" or argument(node, "dim") not in (-2, 2):
        return None
    tensors = argument(node, "tensors")
    if len(tensors) != 2 or not all(isinstance(t, Node) for t in tensors):
        return None
    past, new = tensors
    example = past.meta.get("example_value")
    if past.op == "placeholder" and _CACHE_SOURCE.search(source_name(past)):
        if isinstance(example, PackedKV):
            return CacheUpdate(node, past, new)
        return CacheUpdate(node, None, node) if _floating(example) else None
    if op_name(past) == "tensor" and isinstance(example, Tensor) and example.shape == (0,):
        return CacheUpdate(node, None, new)
    return None


def _strange_update(node: Node) -> Miss | None:
    """Why ``node``, which the graph returns, looks like a cache update that cannot be packed."""
    if (
        op_name(node) == "getitem"
        and isinstance(node.args[0], Node)
        and _cache_update(node.args[0])
    ):
        return Miss("the cache keeps a slice of the updated tensor (a sliding window)", node)
    return None


def _floating(example: Any) -> bool:
    return isinstance(example, Tensor) and example.is_floating_point() and example.dim() == 4


def _attention(node: Node, sites: Sites) -> AttentionSite | Miss | None:
    form = "sdpa" if op_name(node) == "sdpa" else "matmul" if _ends_softmax(node) else None
    if form is None:
        return None
    found: dict[str, Any] = {}
    miss = FORMS[form].match(node, found)
    if miss is None:
        strange = [name for name in ("keys", "values") if found[name] not in sites.updates]
        if strange:
            source = found[strange[0]]
            miss = Miss(
                f"{strange[0]} come from {op_name(source)}, not from a cache update", source
            )
    if miss is not None:
        return miss if reads_update(node, sites) else None
    causal = form == "sdpa" and bool(argument(node, "is_causal"))
    mask = argument(node, "attn_mask") if form == "sdpa" else found.get("mask")
    site = AttentionSite(
        form=form,
        root=node,
        path=module_path(node),
        q=found["q"],
        keys=found["keys"],
        values=found["values"],
        mask=mask,
        causal=causal,
        scale=_scale(form, node, found),
    )
    return _shape_miss(site) or site


def _ends_softmax(node: Node) -> bool:
    """Whether ``node`` multiplies attention weights with values."""
    if op_name(node) not in ("matmul", "bmm", "baddbmm") or not isinstance(node.args[0], Node):
        return False
    weights, steps = node.args[0], 0
    while op_name(weights) != "softmax" and steps < 6:
        inputs = weights.all_input_nodes
        if not inputs or op_name(weights) in ("matmul", "linear", "sdpa"):
            return False
        weights, steps = inputs[0], steps + 1
    return op_name(weights) == "softmax"


def reads_update(node: Node, sites: Sites, reach: int = 12) -> bool:
    """Whether ``node`` depends on an updated cache tensor within ``reach`` steps."""
    frontier, seen = {node}, {node}
    for _ in range(reach):
        frontier = {i for n in frontier for i in n.all_input_nodes} - seen
        if any(n in sites.updates for n in frontier):
            return True
        seen |= frontier
    return False


def _scale(form: str, node: Node, found: dict[str, Any]) -> float:
    if form == "sdpa":
        scale = argument(node, "scale")
        dim = int(found["q"].meta["example_value"].shape[-1])
        return float(dim**-0.5 if scale is None else scale)
    if "divisor" in found:
        return 1.0 / float(found["divisor"])
    return float(found.get("scale", 1.0))


def _shape_miss(site: AttentionSite) -> Miss | None:
    """The shapes that the patterns do not look at."""
    q, k, v = (n.meta["example_value"] for n in (site.q, site.keys, site.values))
    if not q.dim() == k.dim() == v.dim() == 4:
        return Miss(
            f"query, keys and values have {q.dim()}, {k.dim()} and {v.dim()} dimensions", site.root
        )
    if q.shape[1] % k.shape[1] or k.shape[1] != v.shape[1]:
        return Miss(
            f"{q.shape[1]} query heads do not share {k.shape[1]} key and {v.shape[1]} value heads",
            site.root,
        )
    if not (q.dtype == k.dtype == v.dtype):
        return Miss(f"query, keys and values are {q.dtype}, {k.dtype} and {v.dtype}", site.root)
    if site.mask is not None and site.mask.meta["example_value"].dim() != 4:
        return Miss("the mask is not four-dimensional", site.mask)
    return None


def module_path(node: Node) -> str:
    """The path of the module that ``node`` was traced in, e.g. ``model.layers.0.self_attn``."""
    stack = node.meta.get("nn_module_stack") or {}
    path = str(next(reversed(stack.values()))[0]) if stack else ""
    return _MODULE.sub("", path)


def nearest_miss(node: Node, sites: Sites) -> Miss:
    """Why no attention was found for the update ``node``: the attempt that got furthest."""
    path = module_path(node)
    near = [m for m in sites.misses if m.node is not None and module_path(m.node) == path]
    if near:
        return furthest(near)
    users = [u for u in node.users if u.op != "output"]
    reader = f"; it is read by {op_name(users[0])}" if users else ""
    return Miss(f"no attention over this cache tensor was found{reader}", node)
