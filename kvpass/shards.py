"""The processes that share a sequence, from what users name."""

from __future__ import annotations

from typing import Any

from torch import distributed

from kvpass.errors import OptionError, shown
from kvpass.format.shard import Shard

_ALLOWED = "an initialized process group that this process is in, or a mesh of one dimension"


def shard_of(group: Any) -> Shard | None:
    """The part of this process among those of ``group``, a process group or a mesh; None if it is
    alone there.

    Raises:
        OptionError: if it is neither.
    """
    if group is None:
        return None
    if distributed.is_available() and distributed.is_initialized():
        from torch.distributed.device_mesh import DeviceMesh

        if isinstance(group, DeviceMesh) and group.ndim == 1:
            group = group.get_group()
        if isinstance(group, distributed.ProcessGroup) and group.rank() >= 0:
            name, size = group.group_name, group.size()
            shard = Shard.parse(f"{group.rank()}of{size}@{name}")
            if shard is None:
                raise OptionError(
                    f"The name {shown(name)} of a process group is not supported for shard; "
                    "allowed: names without '/', '|' and ','."
                )
            return shard if size > 1 else None
    raise OptionError(f"shard={shown(group)} is not supported; allowed: {_ALLOWED}.")
