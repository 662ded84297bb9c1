"""`Struct`: the arguments of a generated function, declared in C++ and packed in Python alike."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvpass.format.layout import Field
from kvpass.format.parse import parse_plan
from kvpass.ops.pages import PagedStep
from lowering.support import row_stride

_CODES = {"int64_t": "q", "double": "d"}
# The model's dtype is Scalar in C++.
_TYPES = {
    torch.int32: "int32_t", torch.int16: "int16_t", torch.float16: "Float16", None: "Scalar",
}  # fmt: skip
# Kernels read codebooks a vector at a time.
_WIDEST_VECTOR = 16
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
        """The types of the members, as Python's `struct` writes them."""
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


def _numbers(*names: str) -> tuple[Member, ...]:
    return tuple(("int64_t", name) for name in names)


def _pointer(field: Field) -> str:
    unsigned = field.name == "codes" and not field.exact
    return f"{'uint16_t' if unsigned else _TYPES[field.dtype]}*"


# Beside the tensors of a state. ring: slots of the window. cos_sin_batch: from one sequence's
# cosines and sines to the next one's. clip: a factor for the ends of each group of channels.
# midpoints: halfway between neighbours in the codebook.
_CALIBRATED: tuple[Member, ...] = tuple(
    ("const float*", name) for name in ("clip", "midpoints", "codebook")
)
_BESIDE_TENSORS = (
    *_numbers("batch", "heads", "capacity", "ring", "cos_sin_batch", "cos_sin_capacity"),
    *_CALIBRATED,
)


@cache
def state_struct(name: str, plan: str, shared: bool = False) -> Struct:
    """The tensors of a state with this printed plan, and what kernels get beside them;
    ``shared``: with the tensors that all layers share."""
    layout = parse_plan(plan).layout
    fields = layout.fields if shared else layout.own
    pointers = tuple((_pointer(field), field.name) for field in fields)
    return Struct(name, (*pointers, *_BESIDE_TENSORS), f"Cache<{name}>")


def state_numbers(tensors: Sequence[Tensor], plan: str, dim: int) -> tuple[int, ...]:
    """The members of a `state_struct` for ``tensors``, a state with this printed plan, whose tokens
    have ``dim`` channels in each head. (By position: this runs several times per layer and step.)
    """
    at = positions(plan)
    batch, heads, capacity, _ = tensors[at.codes].shape
    ring = 0 if at.window is None else tensors[at.window].shape[2]
    stride = room = 0
    if at.cos_sin is not None and at.cos_sin < len(tensors):
        stride, room = row_stride(tensors[at.cos_sin]), tensors[at.cos_sin].shape[1]
    addresses = map(Tensor.data_ptr, tensors)
    return (
        *addresses, batch, heads, capacity, ring, stride, room, *_calibrated(plan, heads, dim)
    )  # fmt: skip


@cache
def pages_struct(name: str, plan: str) -> Struct:
    """Pages of many requests with this printed plan, and what kernels get beside them: see
    `kvpass.ops.pages`. ``page_bytes``: from one page to the next one. ``table``: of one request."""
    pointers = tuple((_pointer(field), field.name) for field in parse_plan(plan).layout.encoded())
    beside = (*_numbers("batch", "heads", "capacity", "page_bytes"), ("const int32_t*", "table"))
    members = (*pointers, ("Scalar*", "window"), *beside, (TOKENS, "new_tokens"), *_CALIBRATED)
    return Struct(name, members, f"Cache<{name}>")


def pages_numbers(pages: Sequence[Tensor], plan: str, batch: int) -> tuple[int, ...]:
    """The members of a `pages_struct` for ``pages`` and a batch of so many."""
    *stored, exact, new = pages
    page_bytes = stored[0].stride(0) * stored[0].itemsize
    _, heads, capacity, dim = exact.shape
    addresses = [t.data_ptr() for t in (*stored, exact)]
    numbers = batch, heads, capacity, page_bytes, 0
    return *addresses, *numbers, *token_numbers(new), *_calibrated(plan, heads, dim)


def step_numbers(step: PagedStep) -> tuple[int, ...]:
    """The members of `REQUESTS` for a step."""
    addresses = map(Tensor.data_ptr, (step.requests, step.tables, step.exact_tables))
    return *addresses, step.tables.shape[1]


class Positions(NamedTuple):
    """Where fields are among the tensors of a state; ``tokens``: see `StateLayout.tokens`."""

    codes: int
    tokens: int
    window: int | None
    cos_sin: int | None


@cache
def positions(plan: str) -> Positions:
    """Places of the fields in a state with this printed plan."""
    layout = parse_plan(plan).layout
    names = layout.names
    window, cos_sin = (names.index(n) if n in names else None for n in ("window", "cos_sin"))
    return Positions(names.index("codes"), names.index(layout.tokens), window, cos_sin)


@cache
def _calibrated(plan: str, heads: int, dim: int) -> tuple[int, int, int]:
    """The addresses of factors of clipping, one for each group of channels of ``heads`` of ``dim``,
    of midpoints and of the numbers of a codebook; 0 of what the plan lacks."""
    codec = parse_plan(plan).codec
    clip: tuple[float, ...] = ()
    if isinstance(codec.clip, tuple):
        clip = codec.clip
    elif codec.clip != 1:
        clip = (codec.clip,) * (heads * (dim // codec.group if codec.axis == "token" else 1))
    return _address(clip), _address(codec.midpoints), _address(codec.decoded_codebook or ())


@cache
def _floats(numbers: tuple[float, ...]) -> Tensor:
    """Padded to a whole vector; never freed."""
    with torch.inference_mode(False):
        padding = (0.0,) * (_WIDEST_VECTOR - len(numbers))
        return torch.tensor((*numbers, *padding), dtype=torch.float32)


def _address(numbers: tuple[float, ...]) -> int:
    return _floats(numbers).data_ptr() if numbers else 0


# Tokens [batch, heads, tokens, channels], whose last dimension is dense.
TOKENS = Struct(
    "TokenStrides",
    (("const Scalar*", "data"), *_numbers("batch_stride", "head_stride", "token_stride")),
    "Tokens<TokenStrides>",
)
# The requests of a step, and the tables of their pages, `pages` numbers each.
REQUESTS: tuple[Member, ...] = (
    *(("const int32_t*", name) for name in ("requests", "tables", "exact_tables")),
    *_numbers("pages"),
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

# A rotation of the channels of each head, see basis.h; no data: there is none.
BASIS = Struct("Basis", (("const float*", "data"), *_numbers("head_stride", "size")))


def basis_numbers(basis: Tensor | None) -> tuple[int, int, int]:
    """The members of `BASIS` for a dense rotation ``[1, 1 or H, 1, blocks, size, size]``."""
    if basis is None:
        return 0, 0, 0
    stride = basis.stride(1) if basis.shape[1] != 1 else 0
    return basis.data_ptr(), stride, basis.shape[-1]


def token_numbers(x: Tensor) -> tuple[int, ...]:
    """The members of `TOKENS` for a tensor with a dense last dimension."""
    return (x.data_ptr(), *x.stride()[:3])


def arguments_name(op: str) -> str:
    """The name of the struct of an op's arguments."""
    return f"{op.title().replace('_', '')}Arguments"


def tensor_structs(plan: str) -> dict[str, Struct]:
    """The arguments of ``pack``, ``append`` and ``unpack``."""
    state, tokens = (state_struct("State", plan), "state"), (TOKENS, "tokens")
    members: dict[str, tuple[Member, ...]] = {
        "pack": (state, tokens, *_numbers("count", "packed", "threads")),
        "append": (
            state,
            tokens,
            *_numbers("count", "packed_end", "threads"),
            (ROTARY, "rotary"),
            (BASIS, "basis"),
        ),
        "unpack": (state, ("Scalar*", "out"), *_numbers("count", "threads")),
    }
    return {op: Struct(arguments_name(op), parts) for op, parts in members.items()}


@cache
def append_pages_struct(plan: str) -> Struct:
    """The arguments of ``append_pages``."""
    state = pages_struct("State", plan), "state"
    return Struct(arguments_name("append_pages"), (state, *REQUESTS, *_numbers("count", "threads")))


# A weight is of the tokens' type, or int8 with a scale for each row.
LINEAR_LAYER = Struct(
    "LinearLayer",
    (
        ("const LinearWeight*", "weight"),
        ("const Scalar*", "bias"),
        ("const float*", "scale"),
        ("Scalar*", "out"),
        *_numbers("outputs"),
    ),
)
# ``count`` layers come behind it.
LINEAR = Struct(
    arguments_name("linear"), (("const Scalar*", "x"), *_numbers("inputs", "threads", "count"))
)


def linear_struct(layers: int) -> Struct:
    """`LINEAR` with so many `LINEAR_LAYER` behind it."""
    return Struct(LINEAR.name, LINEAR.members + layers * LINEAR_LAYER.members)


REPLAY = Struct(
    arguments_name("replay"),
    (("const int64_t*", "calls"), *_numbers("count"), ("char*", "message"), *_numbers("room")),
)


_SEGMENT = (
    ("const int32_t*", "positions"),
    *_numbers("positions_count", "segments", "segment"),
    ("float*", "carried"),
)


@cache
def attention_struct(
    k_plan: str, v_plan: str, segment: bool, paged: bool = False, partial_sums: bool = False
) -> Struct:
    """The arguments of ``attention``, of all tokens, of one segment, of tokens in pages or of some
    tokens, whose sums are wanted in float32. Strides count elements."""
    make = pages_struct if paged else partial(state_struct, shared=True)
    more = (*REQUESTS, ("const int32_t*", "single")) if paged else _SEGMENT if segment else ()
    members: tuple[Member, ...] = (
        (make("KeyState", k_plan), "k"),
        (make("ValueState", v_plan), "v"),
        (TOKENS, "query"),
        (BASIS, "basis"),
        ("const void*", "mask"),
        *_numbers("mask_kind", "mask_batch", "mask_head", "mask_query", "mask_token"),
        ("const void*", "sinks"),
        *_numbers("sinks_kind"),
        ("float*" if partial_sums else "Scalar*", "out"),
        *_numbers("rows", "queries", "causal", "window", "retained", "threads"),
        *(("double", name) for name in ("scale", "softcap")),
    )
    return Struct(arguments_name("attention"), (*members, *more))
