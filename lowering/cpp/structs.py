"""`Struct`: the arguments of a generated function, declared in C++ and packed in Python alike."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from kvpass.format.layout import Field
from kvpass.format.parse import parse_plan
from lowering.triton.layouts import row_stride

_CODES = {"int64_t": "q", "double": "d"}
# The model's dtype is Scalar in C++.
_TYPES = {torch.int32: "int32_t", torch.int16: "int16_t", None: "Scalar"}
# Numbers beside the tensors of a state: sequences, KV heads, tokens that there is room for, slots
# of the window, and of the cosines and sines from one sequence to the next, and room for them.
_SIZES = ("batch", "heads", "capacity", "ring", "cos_sin_batch", "cos_sin_capacity")
# A C++ type, or a struct, and a name.
Member = tuple["str | Struct", str]


@dataclass(frozen=True)
class Struct:
    """A C++ struct of numbers of 8 bytes, pointers, and other such structs.

    Attributes:
        name: of the type.
        members: in their order.
        used_as: the type that other structs have of it, which adds functions.
    """

    name: str
    members: tuple[Member, ...]
    used_as: str = ""

    @cached_property
    def format(self) -> str:
        """As Python's `struct` has it."""
        return "".join(
            kind.format if isinstance(kind, Struct) else _CODES.get(kind, "P")
            for kind, _ in self.members
        )

    @cached_property
    def pack(self) -> Callable[..., bytes]:
        """The struct's bytes from its members; those of inner structs stand in their place."""
        return struct.Struct(self.format).pack

    def declaration(self, *aliases: str, **constants: int) -> str:
        """The struct in C++, with constants that kernels are made for."""
        kinds = [k.used_as or k.name if isinstance(k, Struct) else k for k, _ in self.members]
        members = [f"{kind} {name}" for kind, (_, name) in zip(kinds, self.members, strict=True)]
        for name, value in constants.items():
            members.append(f"static constexpr {type(value).__name__} {name} = {str(value).lower()}")
        lines = (f"  {member};" for member in (*members, *aliases))
        check = f"static_assert(sizeof({self.name}) == {struct.calcsize(self.format)});"
        return "\n".join([f"struct {self.name} {{", *lines, "};", check])


def _pointer(field: Field) -> str:
    unsigned = field.name == "codes" and not field.exact
    return f"{'uint16_t' if unsigned else _TYPES[field.dtype]}*"


@cache
def state_struct(name: str, plan: str, shared: bool = False) -> Struct:
    """The tensors of a state with this printed plan, and its sizes; ``shared``: with those that all
    layers share."""
    layout = parse_plan(plan).layout
    fields = layout.fields if shared else layout.own
    pointers = tuple((_pointer(field), field.name) for field in fields)
    return Struct(name, (*pointers, *_numbers(*_SIZES)), f"Cache<{name}>")


def state_numbers(state: Sequence[Tensor], plan: str) -> tuple[int, ...]:
    """The members of a `state_struct` for these tensors."""
    layout, codes, ring, stride, room = parse_plan(plan).layout, state[0], 0, 0, 0
    if "window" in layout:
        ring = state[layout.names.index("window")].shape[2]
    if len(state) > len(layout.own):
        cos_sin = state[-1]
        stride, room = row_stride(cos_sin), cos_sin.shape[1]
    return (*(t.data_ptr() for t in state), *codes.shape[:3], ring, stride, room)


def _numbers(*names: str) -> tuple[Member, ...]:
    return tuple(("int64_t", name) for name in names)


# Tokens [batch, heads, tokens, channels], whose last dimension is dense.
TOKENS = Struct(
    "NewTokens",
    (("const Scalar*", "data"), *_numbers("batch_stride", "head_stride", "token_stride")),
    "Tokens<NewTokens>",
)
# Cosines and sines [batch, tokens, 2 * pairs] with a dense last dimension, see rotary.h; no pairs:
# nothing is to be rotated. wide: they are float32, not of the tokens' type.
ROTARY = Struct(
    "Rotary",
    (
        ("const void*", "cos_sin"),
        *_numbers("batch_stride", "token_stride", "wide", "start", "pairs", "step", "distance"),
    ),
)
# What encoding needs besides: factors of clipping, and numbers halfway between those of a codebook,
# if any.
_ENCODING = (("const float*", "clip"), ("const float*", "midpoints"))


def arguments_name(op: str) -> str:
    """The name of the struct of an op's arguments."""
    return f"{op.title()}Arguments"


@cache
def tensor_structs(plan: str) -> dict[str, Struct]:
    """The arguments of ``pack``, ``append`` and ``unpack``."""
    state = (state_struct("State", plan), "state")
    tokens = (TOKENS, "tokens")
    members: dict[str, tuple[Member, ...]] = {
        "pack": (state, tokens, *_numbers("count", "packed", "threads"), *_ENCODING),
        "append": (state, tokens, *_numbers("count", "threads"), (ROTARY, "rotary"), *_ENCODING),
        "unpack": (state, ("Scalar*", "out"), *_numbers("count", "threads")),
    }
    return {op: Struct(arguments_name(op), parts) for op, parts in members.items()}


_SEGMENT = (
    ("const int32_t*", "positions"),
    *_numbers("positions_count", "segments", "segment"),
    ("float*", "carried"),
)


@cache
def attention_struct(k_plan: str, v_plan: str, segment: bool) -> Struct:
    """The arguments of ``attention``, of all tokens or of one segment. Strides count elements."""
    states = (
        (state_struct("KeyState", k_plan, shared=True), "k"),
        (state_struct("ValueState", v_plan, shared=True), "v"),
    )
    pointers = (
        ("const Scalar*", "query"), ("const void*", "mask"), ("const void*", "sinks"),
        ("Scalar*", "out"), ("const float*", "k_codebook"), ("const float*", "v_codebook"),
    )  # fmt: skip
    numbers = _numbers(
        "rows", "queries", "query_batch", "query_head", "query_token",
        "mask_kind", "mask_batch", "mask_head", "mask_query", "mask_token",
        "sinks_kind", "causal", "window", "retained", "threads",
    )  # fmt: skip
    doubles = (("double", "scale"), ("double", "softcap"))
    more = _SEGMENT if segment else ()
    return Struct(arguments_name("attention"), (*states, *pointers, *numbers, *doubles, *more))
