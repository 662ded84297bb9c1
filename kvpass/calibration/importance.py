"""How much the loss depends on the weights that make keys and values: KVmix's importance."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from kvpass.calibration.samples import STORED, CapturedKV, Stored
from kvpass.errors import OptionError

# Of the keys, or values, of each layer, for every text.
Norms = dict[tuple[str, Stored], list[float]]


@dataclass(frozen=True)
class Projection:
    """The part of one weight that keys or values are made with.

    Attributes:
        layer, kind: of which keys or values.
        weight: a matrix, maybe one that queries, keys and values are made with.
        rows, columns: int64, of the part.
    """

    layer: str
    kind: Stored
    weight: Parameter
    rows: Tensor
    columns: Tensor

    def squared_norm(self, gradient: Tensor) -> float:
        """Of this part of the weight's gradient."""
        part = gradient.detach().index_select(0, self.rows).index_select(1, self.columns)
        return float(part.float().square().sum())


def projections(model: Any, stored: Sequence[CapturedKV]) -> list[Projection]:
    """The matrices of each attention module that its keys and its values depend on.

    Which rows of a fused projection make keys is told by autograd: a product of keys with random
    numbers has a gradient there, and nowhere else.

    Args:
        model: whose graphs have stored keys and values with what autograd knows of them.
        stored: see `kvpass.calibration.observe`.

    Raises:
        OptionError: if keys or values are made with none, as with quantized weights.
    """
    found: list[Projection] = []
    for x in stored:
        if not {"keys", "values"} & set(x.kinds):
            continue
        kind: Stored = "values" if "values" in x.kinds else "keys"
        module = model.get_submodule(x.layer)
        weights = matrices(module)
        generator = torch.Generator(x.made.device).manual_seed(0)
        random = torch.empty_like(x.made).normal_(generator=generator)
        gradients = torch.autograd.grad(
            (x.made * random).sum(), weights, allow_unused=True, retain_graph=True
        )
        before = len(found)
        for weight, gradient in zip(weights, gradients, strict=True):
            if gradient is not None and (used := gradient != 0).any():
                rows, columns = (used.any(d).nonzero().flatten() for d in (1, 0))
                found.append(Projection(x.layer, kind, weight, rows, columns))
        if len(found) == before:
            raise OptionError(
                f"The {kind} of layer '{x.layer}' are made with no matrix of floating numbers; "
                "importance needs one, sensitivities do not."
            )
    return found


def matrices(module: Any) -> list[Parameter]:
    """Its parameters that can be projections."""
    return [p for p in module.parameters() if p.dim() == 2 and p.is_floating_point()]


def gradient_norms(model: Any, parts: Sequence[Projection], texts: Iterable[Tensor]) -> Norms:
    """The L2 norm of the loss's gradient with respect to ``W_k``, or ``W_v``, of every layer, for
    each text (KVmix, section 3.1).

    One forward and one backward pass for each text gives all layers. Gradients of these weights
    only are computed, and each is dropped as soon as its norm is known; activations are computed
    anew in the backward pass where the model's layers can do that.

    Args:
        model: a causal language model. It is not changed.
        parts: the weights.
        texts: token ids ``[1, T]`` each.

    Returns:
        By layer and kind.
    """
    norms: Norms = {(p.layer, p.kind): [] for p in parts}
    squares = dict.fromkeys(norms, 0.0)

    def take(weight: Parameter) -> None:
        assert weight.grad is not None
        for part in parts:
            if part.weight is weight:
                squares[part.layer, part.kind] += part.squared_norm(weight.grad)
        weight.grad = None

    weights = {id(p.weight): p.weight for p in parts}.values()
    hooks = []
    try:
        with torch.enable_grad(), only_gradients_of(model, weights), _checkpointed(model):
            hooks = [w.register_post_accumulate_grad_hook(take) for w in weights]
            for ids in texts:
                squares.update(dict.fromkeys(squares, 0.0))
                logits = model(input_ids=ids, use_cache=False).logits
                (summed_loss(logits, ids) / ids[:, 1:].numel()).backward()
                for name, square in squares.items():
                    norms[name].append(square**0.5)
    finally:
        for hook in hooks:
            hook.remove()
    return norms


def means(norms: Norms) -> dict[tuple[str, Stored], float]:
    """Over texts."""
    return {name: sum(found) / max(1, len(found)) for name, found in norms.items()}


def rank_correlations(norms: Norms, sets: int) -> dict[Stored, float]:
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
    """Of all tokens ``[B, T]`` but the first; labels are shifted once: logits ``[B, T, V]`` at t
    tell of token t + 1."""
    return cross_entropy(logits[:, :-1].float().transpose(1, 2), ids[:, 1:], reduction="sum")


@contextmanager
def only_gradients_of(model: Any, weights: Iterable[Parameter]) -> Iterator[None]:
    """Only these need gradients meanwhile; those that parameters have are put back."""
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
    """Layers keep no activations but their inputs, where transformers has built them for that.

    They do so in training only; the layers alone are told that they train, not the dropouts in
    them. transformers' own switch would leave a hook behind.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    again = {
        "gradient_checkpointing": True,
        "_gradient_checkpointing_func": partial(checkpoint, use_reentrant=False),
        "training": True,
    }
    before = [{name: m.__dict__[name] for name in again if name in m.__dict__} for m in layers]
    for module in layers:
        module.__dict__.update(again)
    try:
        yield
    finally:
        for module, known in zip(layers, before, strict=True):
            for name in again:
                module.__dict__.pop(name)
            module.__dict__.update(known)
