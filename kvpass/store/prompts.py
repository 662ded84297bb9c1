"""What prompts a store is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from kvpass.errors import check
from kvpass.store.cache_file import token_ids

# Options of `generate` that a store sets itself, or does not serve.
_REFUSED = ("past_key_values", "cache_implementation")
# Options that make several rows of each prompt.
_ROWS = ("num_beams", "num_return_sequences")


def sequence(tokens: Any) -> Tensor:
    """The ids of one sequence, int32 ``[T]``.

    Raises:
        OptionError: if they are something else.
    """
    ids = token_ids(tokens)
    check("tokens", tuple(ids.shape), len(ids) == 1, "those of one sequence, [1, T] or [T]")
    return ids[0]


def begun(model: Any, ids: Any, options: Mapping[str, Any]) -> tuple[Tensor, int]:
    """What all prompts of a call of ``generate`` with these ``options`` begin with, int32 ``[T]``,
    and one token more; and how many rows they become.

    Raises:
        OptionError: if a store cannot serve the call.
    """
    config = options.get("generation_config") or model.generation_config
    for name in _REFUSED:
        value = options.get(name, getattr(config, name, None))
        check(name, value, value is None, "None, within PrefixStore.use")
    mask = options.get("attention_mask")
    check("attention_mask", mask, mask is None or bool((mask != 0).all()), "without padding")
    prompts = token_ids([] if ids is None else ids)
    differ = (prompts != prompts[:1]).any(0).nonzero()
    same = int(differ[0]) if len(differ) else prompts.shape[1] - 1
    rows = (options.get(name, getattr(config, name, None)) or 1 for name in _ROWS)
    return prompts[0, : same + 1], len(prompts) * max(rows)
