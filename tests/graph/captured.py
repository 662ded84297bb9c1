"""Dynamo's graph of a function, with the values of its nodes; random masks as source text."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import sympy
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from kvpass.graph.analysis.formulas import AXES, Condition
from kvpass.graph.analysis.indices import Indices


class Captured:
    """The last graph of ``function`` and what it was called with."""

    def __init__(self, function: Callable[..., Any], dynamic: bool | None = None) -> None:
        torch._dynamo.reset()
        self.function = torch.compile(
            function, backend=self._backend, dynamic=dynamic, fullgraph=True
        )
        self.graphs: list[GraphModule] = []

    def _backend(self, module: GraphModule, _: list[Any]) -> Callable[..., Any]:
        self.graphs.append(module)

        def call(*args: Any) -> Any:
            self.args = copy.deepcopy(args)
            return module(*args)

        return call

    def __call__(self, *args: Any) -> Captured:
        with torch.no_grad():
            self.function(*args)
        self.module, self.graph = self.graphs[-1], self.graphs[-1].graph
        return self

    @property
    def results(self) -> tuple[Node, ...]:
        """The nodes that the graph returns."""
        return self.graph.output_node().args[0]

    def node(self, name: str) -> Node:
        """The only node whose target is called ``name``."""
        (found,) = (n for n in self.graph.nodes if name in (n.target, n.name, _name(n)))
        return found

    def values(self) -> dict[Node, Any]:
        """What every node was in the last call, when it was computed."""
        found: dict[Node, Any] = {}

        class Keeping(Interpreter):
            def run_node(self, n: Node) -> Any:
                result = super().run_node(n)
                found[n] = result.clone() if isinstance(result, Tensor) else result
                return result

        Keeping(self.module).run(*copy.deepcopy(self.args))
        return found

    def symbols(self, indices: Indices) -> dict[sympy.Symbol, int]:
        """The values of the symbols in formulas, in the last call."""
        found = {}
        for node, value in zip(self.graph.find_nodes(op="placeholder"), self.args, strict=True):
            example = node.meta["example_value"]
            if isinstance(example, torch.SymInt):
                found[example.node.expr] = int(value)
            elif example.dim() == 0:
                found[indices.formula(node)] = int(value)
        return found


def _name(node: Node) -> str:
    return str(getattr(node.target, "__name__", ""))


def materialised(formula: Any, shape: torch.Size, symbols: dict[sympy.Symbol, int]) -> Tensor:
    """The tensor that a formula stands for."""
    terms = formula.terms if isinstance(formula, Condition) else (formula,)
    places = [torch.arange(size).view(-1, *[1] * axis) for axis, size in enumerate(shape[::-1])]
    places += [torch.tensor(0)] * (len(AXES) - len(shape))
    found = []
    for term in terms:
        known = sympy.lambdify(AXES, term.subs(symbols), [{"Max": max, "Min": min}, "math"])
        value = torch.as_tensor(known(*places))
        found.append((value >= 0 if isinstance(formula, Condition) else value).expand(shape))
    if not isinstance(formula, Condition):
        return found[0]
    return torch.stack([*found, torch.ones(shape, dtype=torch.bool)]).all(0)


NAMES = "q, past, pad, data, c"
_KEYS = [
    "torch.arange(L)[None, None, None, :]",
    "torch.arange(L).view(1, 1, 1, L)",
    "(torch.arange(n, L + n) - n)[None, None, None]",
    "(torch.arange(L + 2)[2:] - 2).unsqueeze(0)",
    "torch.arange(0, L)",
]
_QUERIES = [
    "(torch.arange(n) + (L - n))[None, None, :, None]",
    "torch.arange(L - n, L).view(1, 1, n, 1)",
    "torch.arange(L)[-n:, None]",
    "(torch.arange(n).clone() + past.shape[2]).unsqueeze(-1)",
    "(torch.arange(n) + c)[:, None]",
]
_OPERATORS = ["<=", "<", ">=", ">", "==", "!="]


@st.composite
def conditions(draw: st.DrawFn, depth: int = 3) -> str:
    """A bool expression over the places in ``[B, 1, n, L]``, often one that masks are made of."""
    kind = draw(st.integers(0, 9 if depth else 5))
    if kind <= 3:
        k, q = draw(st.sampled_from(_KEYS)), draw(st.sampled_from(_QUERIES))
        shift = draw(st.sampled_from([0, 0, 0, 1, -1, 3, -4, -5]))
        if draw(st.booleans()):
            k, q = q, k
        return f"({k} {draw(st.sampled_from(_OPERATORS))} {q} + {shift})"
    if kind == 4:
        rows = "torch.arange(pad.shape[0])[:, None, None, None]"
        return draw(st.sampled_from([f"pad[{rows}, {_KEYS[0]}]", "pad[:, None, None, :]", "data"]))
    if kind == 5:
        shift = draw(st.integers(-2, 1))
        side = draw(st.sampled_from(["tril", "triu"]))
        ones = draw(st.sampled_from(["", ", dtype=torch.bool"]))
        constant = draw(st.sampled_from(["ones", "zeros"]))
        triangle = f"torch.ones(n, L{ones}).{side}(L - n + {shift}).to(torch.bool)"
        return draw(st.sampled_from([triangle, f"q.new_{constant}((), dtype=torch.bool)"]))
    x = draw(conditions(depth - 1))
    if kind == 9:
        return draw(
            st.sampled_from([f"(~{x})", f"{x}.expand(pad.shape[0], 1, n, L)", f"{x}.to('cpu')"])
        )
    y = draw(conditions(depth - 1))
    joins = [f"({x} & {y})", f"torch.logical_and({x}, {y})", f"({x} | {y})", f"({x} & ~{y})"]
    return draw(st.sampled_from(joins[: 2 if kind < 8 else 4]))


def function_of(*lines: str, returns: str) -> Callable[..., Any]:
    """A function of ``NAMES`` with these lines; ``n`` new tokens of ``L``."""
    body = ["n, L = q.shape[2], past.shape[2] + q.shape[2]", *lines, f"return {returns}"]
    space: dict[str, Any] = {"torch": torch}
    exec(f"def mask({NAMES}):\n" + "\n".join(f"    {line}" for line in body), space)
    return space["mask"]


def inputs(batch: int, n: int, past: int, seed: int = 0) -> tuple[Tensor, ...]:
    """Arguments for the ``NAMES`` of a step of ``n`` tokens after ``past`` ones."""
    generator = torch.Generator().manual_seed(seed)
    pad = torch.rand(batch, past + n, generator=generator) > 0.3
    data = torch.rand(batch, 1, n, past + n, generator=generator) > 0.3
    q = torch.zeros(batch, 1, n, 4)
    return q, torch.zeros(batch, 1, past, 4), pad, data, torch.tensor(past)
