"""How much the loss depends on the weights that make keys and values: KVmix's importance."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from kvpass.calibration.samples import STORED, CapturedKV, Name, Numbers, Stored
from kvpass.errors import OptionError


@dataclass(frozen=True)
class Projection:
    """The part of one weight that keys or values are made with.

    Attributes:
        layer, kind: which keys or values.
        weight: a matrix, maybe one that queries, keys and values are made with.
        rows, columns: the part, int64.
    """

    layer: str
    kind: Stored
    weight: Parameter
    rows: Tensor
    columns: Tensor


def projections(model: Any, captured: Sequence[CapturedKV]) -> list[Projection]:
    """The matrices of each attention module that its keys and its values depend on.

    Autograd says which rows of a fused projection make keys: a product of keys with random numbers
    has a gradient there, and nowhere else.

    Raises:
        OptionError: if keys or values are made with none, as with quantized weights.
    """
    found: list[Projection] = []
    for kv in captured:
        if kv.kinds == ("before_rope",):
            continue
        kind: Stored = "values" if "values" in kv.kinds else "keys"
        weights = matrices(model.get_submodule(kv.layer))
        generator = torch.Generator(kv.x.device).manual_seed(0)
        random = torch.empty_like(kv.x).normal_(generator=generator)
        gradients = torch.autograd.grad(
            (kv.x * random).sum(), weights, allow_unused=True, retain_graph=True
        )
        before = len(found)
        for weight, gradient in zip(weights, gradients, strict=True):
            if gradient is not None and (used := gradient != 0).any():
                rows, columns = (used.any(d).nonzero().flatten() for d in (1, 0))
                found.append(Projection(kv.layer, kind, weight, rows, columns))
        if len(found) == before:
            raise OptionError(
                f"The {kind} of layer '{kv.layer}' are made with no matrix of floating numbers; "
                "importance needs one, sensitivities do not."
            )
    return found


def matrices(module: Any) -> list[Parameter]:
    """The parameters of ``module`` that can be projections."""
    return [p for p in module.parameters() if p.dim() == 2 and p.is_floating_point()]


def gradient_norms(model: Any, parts: Sequence[Projection], texts: Iterable[Tensor]) -> Numbers:
    """The L2 norm of the loss's gradient with respect to ``W_k``, or ``W_v``, of every layer, for
    each text (KVmix, section 3.1).

    One forward and one backward pass for each text gives all layers. Gradients of these weights
    only are computed, and each is dropped as soon as its norm is known; activations are computed
    anew in the backward pass where the model's layers can do that. Texts are token ids ``[1, T]``.
    """
    norms: Numbers = {(p.layer, p.kind): [] for p in parts}
    squares = dict.fromkeys(norms, 0.0)

    def take(weight: Parameter) -> None:
        assert weight.grad is not None
        for part in parts:
            if part.weight is weight:
                gradient = weight.grad.index_select(0, part.rows).index_select(1, part.columns)
                squares[part.layer, part.kind] += float(gradient.float().square().sum())
        weight.grad = None

    weights = {id(p.weight): p.weight for p in parts}.values()
    with ExitStack() as hooks, torch.enable_grad(), only_gradients_of(model, weights):
        hooks.enter_context(_checkpointed(model))
        for weight in weights:
            hooks.enter_context(weight.register_post_accumulate_grad_hook(take))
        for ids in texts:
            squares.update(dict.fromkeys(squares, 0.0))
            logits = model(input_ids=ids, use_cache=False).logits
            (summed_loss(logits, ids) / ids[:, 1:].numel()).backward()
            for name, square in squares.items():
                norms[name].append(square**0.5)
    return norms


def means(norms: Numbers) -> dict[Name, float]:
    """Means over texts."""
    return {name: sum(found) / max(1, len(found)) for name, found in norms.items()}


def rank_correlations(norms: Numbers, sets: int) -> dict[Stored, float]:
    """Whether other texts rank the layers alike (KVmix, appendix C): Spearman's coefficient of
    their means over two of ``sets`` disjoint sets of texts, itself a mean over pairs of sets.

    Raises:
        OptionError: if there are fewer than two sets, or fewer texts than sets.
    """
    from scipy.stats import spearmanr

    texts = min(len(found) for found in norms.values())
    if not 2 <= sets <= texts:
        raise OptionError(f"sets={sets} is not supported; allowed: 2 to {texts}, the texts.")
    parts = [means({name: found[i::sets] for name, found in norms.items()}) for i in range(sets)]
    result: dict[Stored, float] = {}
    for kind in STORED:
        ranked = [[mean for (_, k), mean in part.items() if k == kind] for part in parts]
        pairs = [float(spearmanr(a, b).statistic) for a, b in combinations(ranked, 2)]
        result[kind] = sum(pairs) / len(pairs)
    return result


def summed_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """The loss of all tokens ``[B, T]`` but the first: logits ``[B, T, V]`` at t predict token
    t + 1."""
    return cross_entropy(logits[:, :-1].float().transpose(1, 2), ids[:, 1:], reduction="sum")


@contextmanager
def only_gradients_of(model: Any, weights: Iterable[Parameter]) -> Iterator[None]:
    """Meanwhile only ``weights`` need gradients; those that parameters have are put back."""
    before = [(p, p.requires_grad, p.grad) for p in model.parameters()]
    for parameter, _, _ in before:
        parameter.requires_grad_(False)
        parameter.grad = None
    for weight in weights:
        weight.requires_grad_(True)
    try:
        yield
    finally:
        for parameter, needed, gradient in before:
            parameter.requires_grad_(needed)
            parameter.grad = gradient


@contextmanager
def _checkpointed(model: Any) -> Iterator[None]:
    """Meanwhile layers keep no activations but their inputs, where transformers supports that.

    They do so in training only: the layers alone are set to train, not the dropouts in them.
    transformers' own switch would leave a hook behind.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    changed = {
        "gradient_checkpointing": True,
        "_gradient_checkpointing_func": partial(checkpoint, use_reentrant=False),
        "training": True,
    }
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                stack.enter_context(patch.dict(module.__dict__, changed))
        yield
