"""What a copy of a cache tensor shares with it, and what not."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from kvpass.tensor.branches import Branch, Ends, Trunk, another, branch_of, ends_of
from kvpass.tensor.packed import PackedKV


def branched(
    x: PackedKV, memo: dict[int, Any], total: int | None = None
) -> tuple[list[Tensor], Branch] | None:
    """The state of a copy that shares what it has in common with ``x``, and its branch. None where
    nothing is shared: in a static cache, where a window slides, where a prompt has chunks of
    different bits.

    Args:
        x: which is not stale.
        memo: that of `copy.deepcopy`.
        total: only tokens before this position are wanted, see `shares_crop`; None: all.
    """
    plan = x.plan
    bounded = plan.room is not None or plan.window_size is not None
    if type(x) is not PackedKV or bounded or not len(x) or ends_of(plan, x.segment_ends).stored < 1:
        return None
    trunk, state, shared = _trunk(x), [], {}
    for name, field in plan.layout.by_name.items():
        tensor = getattr(x, name)
        if name in trunk.names:
            tensor = shared[name] = another(tensor)
        elif field.shared:
            tensor = _fork_shared(x, memo)
        elif not field.constant:
            tensor = tensor.clone()
        state.append(tensor)
    segment_ends = state[plan.layout.names.index("segment_ends")]
    if total is not None:
        segment_ends[:, -1] = total
    ends = partial(ends_of, plan, segment_ends)
    return state, Branch(trunk, shared, trunk.taken(ends()), ends)


def shares_crop(x: PackedKV, total: int) -> bool:
    """Whether ``x`` without the tokens from position ``total`` on can be a branch: one that has
    all common tokens, and loses exact ones only."""
    branch = x._line.branch
    if branch is None or branch.trunk.alone() or x.plan.rope is not None:
        return False
    return total >= max(branch.trunk.base.total, branch.ends().exact)


def _trunk(x: PackedKV) -> Trunk:
    """The trunk of ``x``; one of all that it holds, unless others share less with it already."""
    branch, plan = x._line.branch, x.plan
    if branch is not None and not branch.trunk.alone():
        return branch.trunk
    names = [f.name for f in plan.layout.own if f.grows == "capacity"]
    if not plan.codec.identity and not plan.grows:
        names.append("window")
    tensors = {name: getattr(x, name) for name in names}
    ends = partial(ends_of, plan, x.segment_ends)
    trunk = Trunk(tensors, plan.layout.own, ends())
    # A step of it asks for room again.
    x._line.branch = Branch(trunk, tensors, ends=ends)
    return trunk


def _fork_shared(x: PackedKV, memo: dict[int, Any]) -> Tensor:
    """The cosines and sines for a branch of ``x``; all layers that are copied together get one
    tensor, as they have one."""
    old = x.cos_sin
    if id(old) not in memo:
        branch = branch_of(old)
        if branch is None or branch.trunk.alone():
            ends = Ends(x.written, x.written, x.written)
            trunk = Trunk({"cos_sin": old}, x.plan.layout.shared, ends)
            branch = Branch(trunk, {"cos_sin": old})
            old.__dict__["branch"] = branch
        new = another(old)
        ends = branch.ends()
        forked = Branch(branch.trunk, {"cos_sin": new}, branch.trunk.taken(ends))
        forked.keep(ends.total)
        new.__dict__["branch"] = forked
        memo[id(old)] = new
        # So that no other object gets its id meanwhile.
        memo.setdefault(id(memo), []).append(old)
    found: Tensor = memo[id(old)]
    return found
