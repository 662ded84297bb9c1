"""How the callable around a compiled graph maps its arguments and results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvpass._torch_sizes import Size
from kvpass.cocktail.placement import ChunkFormat, place
from kvpass.cocktail.placement import Placed as Placed
from kvpass.folding import Fold
from kvpass.format.channels import ChannelBasis
from kvpass.format.tensor_plan import TensorPlan


@dataclass(frozen=True)
class PlainOutput:
    """Result ``index`` of the inner graph, as it is."""

    index: int


@dataclass(frozen=True)
class NumberOutput:
    """A number of the host that follows from other ones: none of the inner graph's."""

    value: Size


@dataclass(frozen=True)
class ExtendedOutput:
    """The cache tensor of argument ``argument`` after ``new`` more tokens, of length ``tokens``;
    None: that many more than it was."""

    argument: int
    new: Size
    tokens: Size | None


@dataclass(frozen=True)
class FreshOutput:
    """A cache tensor made of the results from ``first`` on, from ``new`` tokens.

    ``stored`` is the plan by which they were packed, ``basis`` that of their channels, ``shared``
    the results that hold what all layers share.
    """

    first: int
    plan: TensorPlan
    stored: TensorPlan
    new: Size
    dtype: torch.dtype
    basis: ChannelBasis | None = None
    shared: tuple[int, ...] = ()


@dataclass(frozen=True)
class ChunkStep:
    """The prompt of a call, whose tokens go into segments of different bits.

    Attributes:
        chunk_format: of all cache tensors.
        batch, new: sequences, and tokens of each.
        device: where they are.
        pasts: the arguments that are extended; none in a first prompt.
    """

    chunk_format: ChunkFormat
    batch: Size
    new: Size
    device: torch.device
    pasts: tuple[int, ...]

    def place(self, args: Sequence[Any], warn: Callable[[], bool]) -> Placed:
        """Where the tokens of a call with ``args`` go, see `kvpass.cocktail.placement.place`."""
        handles = [args[p] for p in self.pasts]
        batch, new = self.batch(args), self.new(args)
        return place(handles, self.chunk_format, batch, new, self.device, warn)


Output = PlainOutput | NumberOutput | ExtendedOutput | FreshOutput


@dataclass(frozen=True)
class StaticStep:
    """A static cache's tensor is extended in place by ``new`` tokens.

    Attributes:
        argument: the tensor; None where the graph makes it.
        counter: the argument that says how many tokens are written; None for a window.
        filled: how many tokens a window must hold before, or more where it is full.
    """

    argument: int | None
    new: Size
    counter: int | None
    filled: Size | None


@dataclass(frozen=True)
class NumberArgument:
    """A number of the host that the inner graph gets as a tensor ``[]`` of int64: what replays its
    steps repeats numbers."""

    value: Size
    device: torch.device


@dataclass(frozen=True)
class PaddingArgument:
    """A padding mask ``[B, L]`` with a column for each token in a cache tensor, or more.

    Attributes:
        argument: the mask.
        packed: the cache tensor.
        new: the tokens that the call adds to it.
    """

    argument: int
    packed: int
    new: Size


@dataclass(frozen=True)
class PlainBuffer:
    """A static cache's plain buffer, to be packed by ``plan`` after a call with ``new`` tokens.

    Attributes:
        argument: the buffer.
        counter: the argument that says how many tokens were written before; None for a window that
            is full after the call.
        basis: of the stored channels.
    """

    argument: int
    plan: TensorPlan
    counter: int | None
    new: Size
    basis: ChannelBasis | None = None


@dataclass(frozen=True)
class Binding:
    """How arguments and results of Dynamo's graph map to those of the inner graph.

    Attributes:
        packed: positions of the packed arguments.
        shared: of those, the ones that hold the same cosines and sines: the inner graph gets those
            of the first.
        statics: static caches that are written.
        masks: arguments that must hide what is not written yet of a static cache, and the latter.
        counts: arguments that must be the number of tokens that a static cache holds, and the
            latter.
        buffers: plain buffers to be packed.
        outputs: one per result of Dynamo's graph.
        chunks: the prompt whose tokens go into segments, if there is one; where they go in these
            are the first further arguments of the inner graph.
        folds: weights in other orders, further arguments of the inner graph.
        constants: further arguments of it.
        numbers: further arguments of it.
        paddings: masks that must have a column for every token.
        widened: of those, the ones that the inner graph gets as further arguments, with columns
            for more tokens.
        sizes: arguments and dimensions whose sizes are its last arguments.
        dropped: numbers and masks among Dynamo's arguments that the inner graph does not get.
        replayed: one more, behind those, tells the inner graph what room cache tensors have.
        growing: what of the inner graph changes at every step, if anything does.
        state: positions of the inner tensors of caches, and of widened masks, among the inner
            graph's arguments.
        examples: fake or real example arguments of the inner graph.
    """

    packed: tuple[int, ...]
    shared: tuple[tuple[int, ...], ...]
    statics: tuple[StaticStep, ...]
    masks: tuple[tuple[int, int], ...]
    counts: tuple[tuple[int, int], ...]
    buffers: tuple[PlainBuffer, ...]
    outputs: tuple[Output, ...]
    chunks: ChunkStep | None
    folds: tuple[Fold, ...]
    constants: tuple[Tensor, ...]
    numbers: tuple[NumberArgument, ...]
    paddings: tuple[PaddingArgument, ...]
    widened: tuple[int, ...]
    sizes: tuple[tuple[int, int], ...]
    dropped: frozenset[int]
    replayed: bool
    growing: str | None
    state: frozenset[int]
    examples: tuple[Any, ...]
