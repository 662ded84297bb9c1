"""Operations of Dynamo's graphs: one name for all spellings of each, and for each argument."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as nnf
from torch.fx import Node

from kvpass._torch import LINEAR, SDPA


@dataclass(frozen=True)
class Op:
    """One operation: functions and names of methods that take the same parameters in order."""

    targets: tuple[Any, ...]
    params: tuple[str, ...]
    defaults: Mapping[str, Any]
    commutative: bool


def _op(
    names: str, params: str = "input", *functions: Any, commutative: bool = False, **defaults: Any
) -> Op:
    """What `operator`, `torch` and tensors' methods call by ``names``, and ``functions``."""
    targets = list(functions)
    for name in names.split():
        found = [vars(module).get(name) for module in (operator, torch)]
        targets += [function for function in found if callable(function)]
        targets += [name] if hasattr(torch.Tensor, name) else []
    return Op(tuple(targets), tuple(params.split()), defaults, commutative)


_BINARY = "input other"
OPS: dict[str, Op] = {
    "add": _op("add iadd add_", _BINARY, commutative=True),
    "addmm": _op("addmm", "input mat1 mat2"),
    "and_": _op("and_ bitwise_and __and__", _BINARY),
    "baddbmm": _op("baddbmm", "input batch1 batch2 beta alpha", beta=1, alpha=1),
    "cat": _op("", "tensors dim", torch.cat, torch.concat, dim=0),
    "chunk": _op("chunk", "input chunks dim", dim=0),
    "contiguous": _op("contiguous"),
    "div": _op("truediv itruediv div div_ true_divide", _BINARY),
    "dropout": _op("", "input p training", nnf.dropout, p=0.5, training=True),
    "eq": _op("eq __eq__", _BINARY),
    "expand": _op("expand"),
    "full": _op("full", "size fill_value"),
    "ge": _op("ge greater_equal __ge__", _BINARY),
    "getattr": _op("", "input name", getattr),
    "getitem": _op("getitem __getitem__", "input index"),
    "gt": _op("gt greater __gt__", _BINARY),
    "invert": _op("invert inv bitwise_not __invert__"),
    "le": _op("le less_equal __le__", _BINARY),
    "linear": _op("", "input weight bias", LINEAR, bias=None),
    "logsumexp": _op("logsumexp", "input dim keepdim", keepdim=False),
    "lt": _op("lt less __lt__", _BINARY),
    "masked_fill": _op("masked_fill masked_fill_", "input mask value"),
    # The attribute `mT` from torch 2.14 on; before that it is "getattr".
    "mT": _op("", "input", torch.ops.aten.mT),
    "matmul": _op("matmul bmm", _BINARY),
    "max": _op("max maximum", _BINARY),
    "mean": _op("mean", "input dim"),
    "mul": _op("mul imul mul_ multiply", _BINARY, commutative=True),
    "ne": _op("ne not_equal __ne__", _BINARY),
    "neg": _op("neg negative"),
    "or_": _op("or_ bitwise_or __or__", _BINARY),
    "permute": _op("permute"),
    "pow": _op("pow", "input exponent"),
    "repeat_interleave": _op("repeat_interleave", "input repeats dim", dim=None),
    "reshape": _op("reshape view flatten unflatten"),
    "sdpa": _op(
        "",
        "query key value attn_mask dropout_p is_causal scale enable_gqa",
        SDPA,
        attn_mask=None,
        dropout_p=0.0,
        is_causal=False,
        scale=None,
        enable_gqa=False,
    ),
    "sigmoid": _op("sigmoid"),
    "softmax": _op("softmax", "input dim", nnf.softmax),
    "split": _op("split", "input sizes dim", dim=0),
    "stack": _op("stack", "tensors dim", dim=0),
    "sub": _op("sub isub sub_ subtract", _BINARY),
    "tanh": _op("tanh"),
    "tensor": _op("tensor scalar_tensor", "data"),
    "to": _op("to float half bfloat16 type type_as"),
    "transpose": _op("transpose swapaxes", "input dim0 dim1"),
    "unsqueeze": _op("unsqueeze", "input dim"),
    # Not the method: its parameters come in another order.
    "where": _op("", "condition input other", torch.where),
}
# What hands on its input, or may.
VIEWS = {"chunk", "contiguous", "expand", "getattr", "getitem", "mT", "permute", "reshape"}
VIEWS |= {"split", "squeeze", "to", "transpose", "unsqueeze"}
_NAMES: dict[Any, str] = {target: name for name, op in OPS.items() for target in op.targets}


def op_name(node: Any) -> str:
    """The name of ``node``'s operation in `OPS`, else a readable form of its target."""
    if not isinstance(node, Node):
        return repr(node)
    if node.op not in ("call_function", "call_method"):
        return node.op
    if node.target in _NAMES:
        return _NAMES[node.target]
    name = str(getattr(node.target, "__name__", node.target))
    return f"another {name}" if name in OPS else name


def argument(node: Node, name: str) -> Any:
    """The argument of an operation in `OPS` by its name, however it was passed."""
    op = OPS[op_name(node)]
    if name in node.kwargs:
        return node.kwargs[name]
    position = op.params.index(name)
    return node.args[position] if position < len(node.args) else op.defaults.get(name)


def set_argument(node: Node, name: str, value: Any) -> None:
    """Makes ``value`` the argument ``name`` of an operation in `OPS`."""
    position = OPS[op_name(node)].params.index(name)
    if name in node.kwargs or position >= len(node.args):
        node.update_kwarg(name, value)
    else:
        node.update_arg(position, value)
