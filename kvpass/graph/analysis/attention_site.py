"""`AttentionSite`: an attention that a graph contains."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch.fx import Node

from kvpass.graph.analysis.scores import MaskStep
from kvpass.graph.pattern import Miss


@dataclass(frozen=True)
class AttentionSite:
    """An attention over keys and values, in one of the known forms.

    Attributes:
        form: ``sdpa`` or ``matmul``.
        root: the node of the attention's output, ``[B, Hq, n, Dv]`` or ``[B * Hq, n, Dv]``.
        path: of the attention module.
        q: ``[B, Hq, n, D]`` or ``[B * Hq, n, D]``; keys, values: the cats.
        heads: ``Hq``.
        mask: a tensor ``[B|1, Hq|1, n|1, T]``, bool (True is visible) or additive; None if there is
            none or ``mask_steps`` make it.
        causal: the top-left triangle is visible.
        scale: of the scores.
        mask_steps: how a mask that is not a tensor of the graph is made.
        sinks: ``[1, Hq, 1, ...]``, one more score per head, or None.
        softcap: see `kvpass.ops.attention.attention`.
        products: what multiplies query and keys, and what multiplies weights and values; one node
            for ``sdpa``.
        miss: why it cannot be computed from packed keys and values; None if it can.
    """

    form: str
    root: Node
    path: str
    q: Node
    keys: Node
    values: Node
    heads: int
    mask: Node | None = None
    causal: bool = False
    scale: float = 1.0
    mask_steps: tuple[MaskStep, ...] = ()
    sinks: Node | None = None
    softcap: float = 0.0
    products: tuple[Node, ...] = field(default=(), compare=False)
    miss: Miss | None = field(default=None, compare=False)

    def renamed(self, old: Node, new: Node) -> AttentionSite:
        """The site after ``new`` has taken the place of ``old``."""
        steps = [replace(s, by=new) if s.by is old else s for s in self.mask_steps]
        inputs = {name: new for name in ("q", "mask", "sinks") if getattr(self, name) is old}
        return replace(self, mask_steps=tuple(steps), **inputs)  # type: ignore[arg-type]
