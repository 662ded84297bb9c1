"""The choice of a provider for every ``kvpass::`` op of a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from kvpass._torch_cpp import CPP_PROBLEMS
from kvpass.ops.library import NAMES
from lowering.providers import PROVIDERS, Provider


@dataclass(frozen=True)
class Choice:
    """What one node was lowered to.

    Attributes:
        op, node, provider: names; that of the op is without its namespace.
        declined: better providers, each with the reason why it declined.
        waits: the provider waits for the device, if that is a GPU.
    """

    op: str
    node: str
    provider: str
    declined: tuple[tuple[str, str], ...] = ()
    waits: bool = False


def lower(graph: Graph) -> list[Choice]:
    """Retargets every ``kvpass::`` op to the first provider that supports its arguments.

    Args:
        graph: nodes carry their fake tensors in ``meta["example_value"]``.

    Returns:
        One choice for each such op, in the order of the graph.
    """
    choices = []
    for node in graph.nodes:
        op = NAMES.get(node.target) if node.op == "call_function" else None
        if op is None:
            continue
        provider, declined = _choose_for(op, node)
        node.target = provider.target
        choices.append(Choice(op, node.name, provider.name, declined, provider.waits))
    return choices


def served_by(node: Node) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The name of the provider that ``node`` of a ``kvpass::`` op would be lowered to, and the
    better ones, each with the reason why it declines."""
    provider, declined = _choose_for(NAMES[node.target], node)
    return provider.name, declined


def _choose_for(op: str, node: Node) -> tuple[Provider, tuple[tuple[str, str], ...]]:
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["example_value"])
    return choose(op, args, kwargs)


def choose(
    op: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Provider, tuple[tuple[str, str], ...]]:
    """The first provider of ``op`` that takes these arguments; those before it, with their
    reasons."""
    declined: list[tuple[str, str]] = []
    for provider in PROVIDERS[op]:
        reason = provider.unsupported_reason(*args, **kwargs)
        if reason is None:
            return provider, tuple(declined)
        declined.append((provider.name, reason))
    raise AssertionError(f"the last provider of kvpass::{op} declined: {declined[-1][1]}")


def compiler_problem(choices: Sequence[Choice]) -> str | None:
    """Why a provider could not be compiled for one of these nodes, if so."""
    reasons = (reason for choice in choices for _, reason in choice.declined)
    return next((reason for reason in reasons if reason in CPP_PROBLEMS), None)
