"""``kvpass bench decode``: tokens per second, packed caches against those of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from kvpass.bench.decoders import (
    EAGER_NAME,
    packed_contender,
    packed_static_contender,
    plain_contenders,
)
from kvpass.bench.filling import Setting
from kvpass.bench.models import model_bytes, random_model
from kvpass.bench.peers import PEERS, check_peers, peer_contenders
from kvpass.bench.plans import check_recipe
from kvpass.bench.report import Column, result_json, speed_ups, timing_section
from kvpass.bench.timing import Contender, Result, made_or_failing, measure, memory_copy
from kvpass.estimate.shapes import model_shape
from kvpass.format.dtypes import dtype_name
from kvpass.machine import require_memory
from kvpass.report import Section, number

COPY_NAME = "a copy of the weights' bytes"
_WARM_UP = 3
# A step follows a step: the first of a turn reads what the contender before has pushed out of the
# processor's caches, code included (a millisecond, measured).
_LEAD = 1
# Threads of llama.cpp spin for 8 ms behind a step (measured), on cores that others need.
_PAUSE_S = 0.02
# Plain caches that are alive at once: three contenders and the reference.
_PLAIN_CACHES = 4


@torch.no_grad()
def bench_decode(
    setting: Setting,
    recipes: Sequence[str],
    rounds: int = 20,
    *,
    go_on: bool = False,
    peers: Sequence[str] = (),
) -> list[Result]:
    """Times decode steps of a model with random weights, with packed and with plain caches.

    A step decodes one token per sequence and keeps it, so contexts grow. Contenders take turns of
    two steps, of which the second is timed.

    Args:
        setting: the model and its context.
        recipes: names of recipes.
        rounds: turns, that is timed steps, of each contender.
        go_on: a recipe that fails becomes a result with a ``problem``.
        peers: names of other runtimes to be measured as well. They compute a prompt themselves.

    Raises:
        OptionError: if a recipe or a peer is not known, the model has layers that are not packed,
        or memory does not suffice.
        PlanError: if a recipe does not fit the head dimension.
    """
    shape = setting.shape
    check_peers(peers)
    for name in recipes:
        check_recipe(name, shape.head_dim)
    plain = shape.plain_bytes(setting.batch, setting.context, setting.dtype)
    what = f"Decoding at {setting.context} tokens with batch {setting.batch}"
    weights = model_bytes(setting.config, setting.dtype)
    caches = _PLAIN_CACHES + sum(len(PEERS[name].caches) for name in peers)
    # The model, what a copy moves, and those of the peers.
    weights *= 2 + sum(PEERS[name].copies for name in peers)
    require_memory(weights + caches * plain, setting.device, what)
    torch.compiler.reset()
    model = random_model(setting.config, setting.dtype, setting.device)
    # A packed static cache takes a step more, by which it is packed.
    room = setting.context + 2 + _WARM_UP + rounds * (_LEAD + 1)
    contenders = []
    for name in recipes:
        make = partial(packed_contender, setting, model, name)
        contenders.append(made_or_failing(f"kvpass {name}", make, go_on))
    # Steps are replayed, as they are on a CPU without it.
    for name in recipes if (setting.inner, setting.device.type) == ("inductor", "cuda") else ():
        make = partial(packed_contender, setting, model, name, "reduce-overhead")
        contenders.append(made_or_failing(f"kvpass {name}, reduce-overhead", make, go_on))
    for name in recipes if setting.device.type == "cuda" else ():
        make = partial(packed_static_contender, setting, model, name, room)
        contenders.append(made_or_failing(f"kvpass {name}, StaticCache", make, go_on))
    contenders += plain_contenders(setting, model, room)
    contenders.append(made_or_failing(COPY_NAME, partial(_copy_contender, setting), go_on=True))
    with TemporaryDirectory(prefix="kvpass-peers-") as folder:
        contenders += peer_contenders(peers, setting, model, room, Path(folder))
        pause = _PAUSE_S if peers else 0.0
        return measure(
            contenders, rounds, setting.device, warm_up=_WARM_UP, lead=_LEAD, pause=pause
        )


def _copy_contender(setting: Setting) -> Contender:
    """What reading the weights would take: a copy that moves as many bytes."""
    moved = round(model_shape(setting.config, setting.dtype).read_weights(setting.batch))
    return Contender(COPY_NAME, [memory_copy(moved, setting.device)], lambda out: 0.0, 0.0, moved)


def decode_section(setting: Setting, results: Sequence[Result]) -> Section:
    """The table. Speed-ups are medians of a peer over medians of the row."""
    columns: list[Column] = [
        ("tokens/s", lambda r: number(tokens_per_second(setting, r))),
        *speed_ups([r for r in results if r.name != COPY_NAME], (EAGER_NAME,)),
        ("first step s", lambda r: number(r.first_call_s)),
        ("warm-up s", lambda r: number(r.warm_up_s)),
    ]
    shape = setting.shape
    title = (
        f"{setting.context} tokens ({setting.fill}), batch {setting.batch}, {shape.layers} layers, "
        f"{shape.kv_heads} KV heads of {shape.head_dim}, "
        f"{dtype_name(setting.dtype)} on {setting.device}"
    )
    return timing_section(title, ("decode", "ms/step"), results, columns)


def tokens_per_second(setting: Setting, result: Result) -> float:
    """Tokens of the whole batch per second, at the median."""
    return setting.batch * 1e3 / result.median_ms


def decode_json(setting: Setting, results: Sequence[Result]) -> list[dict[str, Any]]:
    """A row for each result, raw times included."""
    case = {"context": setting.context, "batch": setting.batch}
    return [
        case
        | {"tokens_per_s": tokens_per_second(setting, r) if r.times_ms else None}
        | result_json(r)
        for r in results
    ]
