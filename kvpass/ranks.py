"""Several processes, or ranks: each has some of the KV heads, and packs those, or a part of every
sequence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from kvpass._torch import default_store, is_sharded, process_group
from kvpass.errors import OptionError
from kvpass.format.ranks import Ranks
from kvpass.format.shard import Shard
from kvpass.options import planner_digest
from kvpass.plan import Plan
from kvpass.recipes import Recipe
from kvpass.version import VERSION

# How long a rank waits for the others to compile, too: they have to trace the same model.
_PATIENCE = timedelta(minutes=5)
# The recipe or plan that the ranks have agreed on, by the first sharded parameter of a graph.
_agreed = WeakIdKeyDictionary()
# The same by the part of a sequence.
_agreed_to_shard: dict[Shard, Recipe | Plan] = {}
# How often the ranks of each mesh have been asked.
_rounds: Counter[tuple[int, ...]] = Counter()


def sharded(tensors: Iterable[Any]) -> Tensor | None:
    """The first of ``tensors`` that several processes share; None if there is none."""
    return next((x for x in tensors if is_sharded(x) and x.device_mesh.size() > 1), None)


def ranks_of(parameter: Any) -> Ranks | None:
    """The processes that share ``parameter``; None if their mesh has several dimensions."""
    mesh = parameter.device_mesh
    if mesh.ndim != 1:
        return None
    return Ranks(mesh.get_local_rank(), tuple(mesh.mesh.flatten().tolist()))


def agreed_ranks(examples: Sequence[Any], planner: Recipe | Plan) -> Ranks | None:
    """The processes that share the model of a graph with these arguments; None if there are no
    others. Asks them, once for a model and ``planner``, whether they compile the same.

    Raises:
        OptionError: if one has another recipe or plan, or does not compile with kvpass.
    """
    parameter = sharded(examples)
    ranks = None if parameter is None else ranks_of(parameter)
    if ranks is not None and _agreed.get(parameter) != planner:
        _agree(ranks, planner, "tensor-parallel")
        _agreed[parameter] = planner
    return ranks


def agree_to_shard(shard: Shard | None, planner: Recipe | Plan) -> None:
    """Asks the processes that share a sequence, once for a ``planner``, whether they compile the
    same.

    Raises:
        OptionError: see `agreed_ranks`.
    """
    if shard is not None and _agreed_to_shard.get(shard) != planner:
        every = torch.distributed.get_process_group_ranks(process_group(shard.group))
        _agree(Ranks(shard.rank, tuple(every)), planner, "sharded")
        _agreed_to_shard[shard] = planner


# Through the store, not by a collective: with one, a rank that does not take part would be waited
# for as long as the process group allows.
def _agree(ranks: Ranks, planner: Recipe | Plan, kind: str) -> None:
    name, digest = planner_digest(planner)
    versions = f"kvpass {VERSION}, torch {version('torch')}"
    prefix = f"kvpass/{ranks.every}/{_rounds[ranks.every]}"
    _rounds[ranks.every] += 1
    store = default_store()
    store.set(f"{prefix}/{ranks.every[ranks.own]}", f"'{name}' ({digest[:8]}, {versions})")
    for rank in ranks.every:
        key = f"{prefix}/{rank}"
        try:
            store.wait([key], _PATIENCE)
        except torch.distributed.DistStoreError:
            raise OptionError(
                f"Rank {rank} of a {kind} model has not compiled it with kvpass within "
                f"{_PATIENCE.seconds} s of rank {ranks.every[ranks.own]}; all ranks have to."
            ) from None
    found = {rank: store.get(f"{prefix}/{rank}").decode() for rank in ranks.every}
    if len(set(found.values())) > 1:
        shown = ", ".join(f"rank {rank} {text}" for rank, text in found.items())
        raise OptionError(
            f"The ranks of a {kind} model do not compile it alike: {shown}. All ranks need the "
            "same recipe, options, plan and versions."
        )


def check_whole_model(model: Any, purpose: str) -> None:
    """Refuses a model whose weights several processes share.

    Raises:
        OptionError: if ``model`` is one; ``purpose`` is what needs all of it.
    """
    if sharded(model.parameters()) is not None:
        raise OptionError(
            f"{purpose} needs a whole model, and this one is shared by several ranks: load it "
            "without tp_plan, in one process. Ranks read their heads of a plan of all heads."
        )
