"""Branches: copies of a cache tensor that share the tokens which they have in common.

What kernels read and write is one trunk. One branch at a time is inside: its own tokens, those
stored since the fork, lie in the trunk behind the common ones. The others keep theirs beside it
until their turn. So a branch holds the bytes of its own tokens, on any device, and a turn copies no
more than those.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import RLock, get_ident

import torch
from torch import Tensor

from kvpass.format.layout import Field
from kvpass.format.retention import MAX_STEP
from kvpass.format.tensor_plan import TensorPlan
from kvpass.ops.ring import read_ring, write_ring

# The exact window, a ring; the other tensors of a trunk are extended at their ends.
_RING = "window"


@dataclass(frozen=True)
class Ends:
    """Where the tokens of a branch end.

    Attributes:
        stored: how many the tensors hold that are extended at their ends.
        exact: the position of the first one that is read from the window.
        total: the position behind the last one.
    """

    stored: int
    exact: int
    total: int


class Trunk:
    """The memory of branches, which take turns in one thread: a branch that another thread uses
    gets a trunk of its own, so that threads may run branches at the same time.

    Attributes:
        names: of its tensors.
        base: where the tokens end that all branches have in common.
        kept: the common tokens of the window that a branch has replaced, in order; None without a
            window.
    """

    def __init__(self, tensors: Mapping[str, Tensor], fields: Sequence[Field], base: Ends) -> None:
        self._tensors = {name: another(tensor) for name, tensor in tensors.items()}
        self._fields = [field for field in fields if field.name in tensors]
        self.names, self.base = list(tensors), base
        self.kept = self._tensors[_RING][:, :, :0].clone() if _RING in tensors else None
        self._branches: weakref.WeakSet[Branch] = weakref.WeakSet()
        self._inside: weakref.ref[Branch] | None = None
        self._thread, self._lock = get_ident(), RLock()

    def join(self, branch: Branch, inside: bool) -> None:
        """Takes in ``branch``, whose own tokens are in the trunk if it is ``inside``."""
        with self._lock:
            self._branches.add(branch)
            if inside:
                self._inside = weakref.ref(branch)

    def alone(self) -> bool:
        """Whether all branches but one are gone."""
        return len(self._branches) < 2

    def has(self, branch: Branch) -> bool:
        """Whether the own tokens of ``branch`` are in the trunk, for this thread."""
        inside = self._inside is not None and self._inside() is branch
        return inside and self._thread == get_ident()

    def enter(self, branch: Branch) -> None:
        """The turn of ``branch``."""
        if self.has(branch):
            return
        with self._lock:
            if self._thread != get_ident():
                if not self.alone():
                    self.leave(branch)
                    return
                self._thread = get_ident()
            inside = None if self._inside is None else self._inside()
            if inside is not None:
                inside.own = self.taken(inside.ends())
            # None is, until all of it is there.
            self._inside = None
            self._put(branch, self.kept)
            self._inside, branch.own = weakref.ref(branch), {}

    def leave(self, branch: Branch) -> None:
        """Gives ``branch`` a trunk of its own."""
        with self._lock:
            if self.alone() and self.has(branch):
                return
            with torch.inference_mode(False):
                copies = {name: tensor.clone() for name, tensor in self._tensors.items()}
            trunk = Trunk(copies, self._fields, self.base)
            if self._inside is not None and self._inside() is branch:
                self._inside = None
            else:
                trunk._put(branch, self.kept)
            self._branches.discard(branch)
            branch.move(trunk, copies)

    def grow(self, name: str, tensor: Tensor) -> None:
        """Puts ``tensor``, which has more room, in the place of the one of this name."""
        with self._lock:
            refer(self._tensors[name], tensor)
            for branch in self._branches:
                branch.refer(name, tensor)

    def keep(self, total: int) -> None:
        """Keeps what tokens before position ``total`` will replace of the window at the fork."""
        if self.kept is None or self.alone():
            return
        ring, kept = self._tensors[_RING], self.kept.shape[2]
        # Some at a time; one round of the ring replaces all of it.
        count = -(-(total - self._kept_from) // MAX_STEP) * MAX_STEP
        count = min(count, self.base.total - self.base.exact)
        if count > kept:
            with self._lock:
                more = read_ring(ring, self._kept_from + kept, self._kept_from + count)
                self.kept = torch.cat([self.kept, more], dim=2)

    @property
    def _kept_from(self) -> int:
        """The position of the first token that takes the slot of one that is read at the fork."""
        return self.base.exact + self._tensors[_RING].shape[2]

    def taken(self, ends: Ends) -> dict[str, Tensor]:
        """Copies of the own tokens of the branch inside, those before ``ends``."""
        own = {}
        for field in self._fields:
            tensor = self._tensors[field.name]
            if field.name == _RING:
                own[_RING] = read_ring(tensor, self._own_from(ends), ends.total)
                continue
            first, last = self.base.stored // field.group, -(-ends.stored // field.group)
            own[field.name] = tensor.narrow(field.token_dim, first, last - first).clone()
        return own

    def _own_from(self, ends: Ends) -> int:
        return max(self.base.total, ends.exact)

    def _put(self, branch: Branch, kept: Tensor | None) -> None:
        """Stores the own tokens of ``branch``, in a window that is that of the fork again."""
        # Whether the tensors are those of inference mode or not.
        with torch.inference_mode():
            for field in self._fields:
                tensor, part = self._tensors[field.name], branch.own[field.name]
                if kept is not None and field.name == _RING:
                    write_ring(tensor, self._kept_from, kept)
                    write_ring(tensor, self._own_from(branch.ends()), part)
                    continue
                first, dim = self.base.stored // field.group, field.token_dim
                tensor.narrow(dim, first, part.shape[dim]).copy_(part)


class Branch:
    """One of the copies.

    Attributes:
        trunk: what it shares with others.
        own: copies of its own tokens while it is not inside.
    """

    def __init__(
        self,
        trunk: Trunk,
        tensors: Mapping[str, Tensor],
        own: dict[str, Tensor] | None = None,
        ends: Callable[[], Ends] | None = None,
    ) -> None:
        """``tensors`` refer to the memory of ``trunk``; who holds them holds the branch. It is
        inside if ``own`` is None. ``ends`` says where its tokens end; None: where `keep` says."""
        self._tensors = {name: weakref.ref(tensor) for name, tensor in tensors.items()}
        self.trunk, self.own, self._ends, self._total = trunk, own or {}, ends, trunk.base.total
        trunk.join(self, inside=own is None)

    def ends(self) -> Ends:
        """Where its tokens end."""
        if self._ends is not None:
            return self._ends()
        return Ends(self._total, self._total, self._total)

    def keep(self, total: int) -> None:
        """Prepares for a step that ends before position ``total``."""
        self._total = max(self._total, total)
        self.trunk.keep(total)

    @property
    def held(self) -> list[Tensor]:
        """What is in memory for it beside the tensors of the trunk."""
        kept = self.trunk.kept
        return [*self.own.values(), *([] if kept is None else [kept])]

    def stay(self) -> None:
        """Gives it a trunk of its own, where another branch has entered since it did: one call
        needs both."""
        if not self.trunk.has(self):
            self.trunk.leave(self)

    def move(self, trunk: Trunk, tensors: Mapping[str, Tensor]) -> None:
        """Makes it the one inside ``trunk``, which has these ``tensors``."""
        self.trunk, self.own = trunk, {}
        trunk.join(self, inside=True)
        for name, tensor in tensors.items():
            self.refer(name, tensor)

    def refer(self, name: str, tensor: Tensor) -> None:
        """Makes its tensor of this name refer to the memory of ``tensor``."""
        if (mine := self._tensors[name]()) is not None:
            refer(mine, tensor)


def ends_of(plan: TensorPlan, segment_ends: Tensor) -> Ends:
    """Where the tokens end that are stored so."""
    *_, packed, total = [0, 0, *segment_ends[:1].flatten().tolist()]
    if plan.codec.identity:
        return Ends(total, 0, total)
    return Ends(packed - plan.sinks, packed, total)


def branch_of(tensor: Tensor | None) -> Branch | None:
    """The branch of a tensor that all layers of a cache hold; None where it has none."""
    return None if tensor is None else tensor.__dict__.get("branch")


def refer(tensor: Tensor, other: Tensor) -> None:
    """Makes ``tensor`` refer to the memory of ``other``."""
    with torch.inference_mode():
        tensor.set_(other.untyped_storage(), other.storage_offset(), other.shape, other.stride())


def another(
    tensor: Tensor, shape: Sequence[int] | None = None, stride: Sequence[int] | None = None
) -> Tensor:
    """Another tensor on the same memory, by default of the same shape and strides, and no view:
    Dynamo would guard its graphs on which inputs are the same tensor, and compile others for a
    cache whose rows were reordered."""
    shape, stride = shape or tensor.shape, stride or tensor.stride()
    with torch.inference_mode(False):
        other = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return other.set_(tensor.untyped_storage(), tensor.storage_offset(), shape, stride)
