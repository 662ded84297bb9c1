"""``kvpass estimate``: memory and speed from a config. Imports torch only when it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvpass.cli.options import given, json_file, model_argument, named, recipes
from kvpass.cli.output import show

if TYPE_CHECKING:
    from kvpass.estimate.devices import Device
    from kvpass.estimate.links import Link

_RECIPES = "kivi-4bit,kivi-2bit,kvmix,cocktail,kvquant-nuq3-1%,skvq-k2v2,auto"


@click.command(
    short_help="predict memory and speed",
    epilog="Example: kvpass estimate llama-3.1-8b --device h100 --context 131072",
)
@model_argument
@recipes(_RECIPES)
@click.option("--batch", type=int, default=1, help="For the largest context.")
@click.option("--context", type=int, default=32768, help="Tokens; for the largest batch.")
@click.option("--device", default="h100", help="A GPU by name; an unknown one lists them.")
@click.option("--memory", help="Of another device, e.g. 16GiB, together with --bandwidth.")
@click.option("--bandwidth", type=float, help="Of its memory, GB/s.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float16"]), default="bfloat16")
@click.option("--efficiency", type=float, default=0.8, help="Share of the bandwidth reached.")
@click.option("--devices", type=int, default=1, help="Of which each holds a part of a sequence.")
@click.option("--link", default="nvlink4", help="Between them, by name; an unknown one lists them.")
@click.option("--link-bandwidth", type=float, help="Of another link, GB/s in one direction.")
@click.option("--link-latency", type=float, help="Of a collective over it, microseconds.")
@json_file
def estimate(
    model: str,
    recipes: list[str],
    batch: int,
    context: int,
    device: str,
    memory: str | None,
    bandwidth: float | None,
    dtype: str,
    efficiency: float,
    devices: int,
    link: str,
    link_bandwidth: float | None,
    link_latency: float | None,
    json: str | None,
) -> None:
    """Predicts what caches of MODEL hold and how long decode steps take, from its config alone: a
    folder, a config.json, or a preset such as llama-3.1-8b, also with sizes: llama-3.1-8b,layers=2.
    """
    import torch

    from kvpass.bench.models import written_config
    from kvpass.estimate.estimate import Setting
    from kvpass.estimate.estimate import estimate as predict
    from kvpass.estimate.report import estimate_json, estimate_section
    from kvpass.report import check_outputs, write_json

    check_outputs(json)
    setting = Setting(
        config=written_config(model),
        device=_device(device, memory, bandwidth),
        batch=batch,
        context=context,
        dtype=getattr(torch, dtype),
        efficiency=efficiency,
        devices=devices,
        link=_link(link, link_bandwidth, link_latency),
    )
    found = predict(setting, named(recipes))
    show(estimate_section(setting, found))
    write_json(json, "estimate", given(), estimate_json(setting, found))


def _device(name: str, memory: str | None, bandwidth: float | None) -> Device:
    from kvpass.errors import OptionError
    from kvpass.estimate.devices import Device, known_device, parse_bytes

    if memory is None and bandwidth is None:
        return known_device(name)
    if memory is None or bandwidth is None:
        raise OptionError("Another device needs both --memory and --bandwidth.")
    return Device("another device", parse_bytes(memory), bandwidth * 1e9)


def _link(name: str, bandwidth: float | None, latency: float | None) -> Link:
    from kvpass.errors import OptionError
    from kvpass.estimate.links import Link, known_link

    if bandwidth is None and latency is None:
        return known_link(name)
    if bandwidth is None or latency is None:
        raise OptionError("Another link needs both --link-bandwidth and --link-latency.")
    return Link("another link", bandwidth * 1e9, latency / 1e6)
