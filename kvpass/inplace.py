"""Bases of channels, folded into a model's own weights instead of into copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from kvpass._torch import copy_module, is_compiled, is_traced, many_graphs
from kvpass.errors import PlanError
from kvpass.fingerprint import fingerprint
from kvpass.graph.analysis.sites import find_sites
from kvpass.graph.bind.state import bind_state
from kvpass.ops import logical
from kvpass.plan import LayerPlan, Plan
from kvpass.ranks import check_whole_model
from kvpass.rules import Context, apply_rules


@torch.no_grad()
def fold_inplace(model: Any, plan: Plan) -> Plan:
    """Rotates the weights of ``model``, which answers as before, so that its compiled graphs need
    no copies of them.

    Bases fold that leave nothing behind: those of values, and those of keys without rotary
    embeddings. Others of keys stay in the plan: an order is folded when the model is compiled,
    since a model cannot give its cosines and sines one for each head, and a rotation is done in
    every call. Bases that do not fold at all stay, too.

    Args:
        model: a causal language model of transformers, not compiled. Changed in place.
        plan: with a plan of its own for every layer, as `kvpass.calibrate` makes it.

    Returns:
        The plan for the changed model, without the bases that are in its weights now. The old one
        no longer fits.

    Raises:
        OptionError: if several processes share the model.
        PlanError: if the plan does not fit the model.
    """
    check_whole_model(model, "Folding in place")
    for kind in ("value_basis", "key_basis"):
        alone = {n: LayerPlan(**{kind: getattr(x, kind)}) for n, x in plan.layers.items()}
        changes = _changes(model, replace(plan, layers=alone, default=LayerPlan()))
        if not changes:
            continue
        for weight, rotated in changes:
            weight.copy_(rotated)
        none: Any = {kind: None}
        plan = replace(plan, layers={n: replace(x, **none) for n, x in plan.layers.items()})
    if plan.calibration is None:
        return plan
    weights = fingerprint(model, plan.layers)
    return replace(plan, calibration=replace(plan.calibration, weights=weights))


def _changes(model: Any, plan: Plan) -> list[tuple[Tensor, Tensor]]:
    """The weights that ``plan`` folds its bases into, and their new values; none if anything of
    the bases is left in a graph."""
    changes: dict[int, tuple[Tensor, Tensor]] = {}
    left = False

    def capture(gm: GraphModule, examples: list[Any]) -> Callable[..., Any]:
        nonlocal left
        module = copy_module(gm)
        apply_rules(Context(module.graph, find_sites(module.graph), plan))
        left |= logical.rotate_channels in [node.target for node in module.graph.nodes]
        binding = bind_state(module.graph, examples)
        for fold in binding.folds:
            weight = examples[fold.position]
            # A weight of two graphs would be rotated for one of them only.
            left |= is_traced(weight) or id(weight) in changes
            if not left:
                changes[id(weight)] = (weight, fold.rotated(weight))
        return gm.forward

    if is_compiled(model):
        raise PlanError("The model is compiled already; fold the plan before model.compile().")
    ids = torch.ones(1, 4, dtype=torch.int64, device=next(model.parameters()).device)
    with many_graphs():
        run: Any = torch.compile(model, backend=capture)
        run(input_ids=ids, use_cache=True)
    return [] if left else list(changes.values())
