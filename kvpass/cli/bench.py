"""``kvpass bench``: the command line of the benchmarks. Imports torch only when one runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from statistics import median
from typing import Any

import click

from kvpass.cli.dry_run import dry_options, run_dry
from kvpass.cli.options import (
    DTYPES,
    POSITIVE,
    Decorator,
    ListOf,
    given,
    json_file,
    outputs,
    recipes,
    together,
)
from kvpass.cli.output import show

Row = dict[str, Any]


@click.group(short_help="measure speed", no_args_is_help=False)
def bench() -> None:
    """Measures speed; every number stands behind a check of its result."""


# What `_device_and_dtype` takes.
_machine = together(
    click.option("--device", help="cpu or cuda; by default cuda where there is one."),
    click.option(
        "--dtype", type=click.Choice(DTYPES), help="By default float32, bfloat16 on a GPU."
    ),
    click.option("--threads", type=POSITIVE, help="CPU threads of torch."),
)


def _timing(rounds: int) -> Decorator:
    return together(
        _machine,
        click.option("--rounds", type=POSITIVE, default=rounds, help="Timed calls of each."),
        click.option("--batch", type=ListOf(click.INT), default="1"),
        recipes(),
        outputs("Draw the medians; needs kvpass[plot]."),
    )


@bench.command(
    short_help="one step's attention against SDPA",
    epilog="Example: kvpass bench attention --tokens 4096,32768 --recipes kivi-4bit,kivi-2bit",
)
@click.option("--tokens", type=ListOf(click.INT), default="4096,32768", help="In the cache.")
@click.option("--new", type=int, default=1, help="The last of them, which attend to all before.")
@click.option("--heads", type=int, default=32)
@click.option("--kv-heads", type=int, default=8)
@click.option("--head-dim", type=int, default=128)
@click.option(
    "--launch",
    type=click.Choice(["graph", "plain"]),
    default="graph",
    help="On a GPU: time CUDA graphs, or launches from Python.",
)
@_timing(rounds=30)
def attention(
    tokens: list[int],
    new: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    launch: str,
    recipes: list[str],
    rounds: int,
    batch: list[int],
    json: str | None,
    plot: str | None,
    **where: Any,
) -> int:
    """Times one step's attention, packed and dense."""
    from kvpass.bench.attention import attention_json, attention_section, bench_attention
    from kvpass.bench.contenders import Case
    from kvpass.report import check_outputs, plot_lines

    check_outputs(json, plot)
    device, dtype = _device_and_dtype(**where)
    cases = [
        Case(b, heads, kv_heads, head_dim, t, dtype, device, new) for b, t in product(batch, tokens)
    ]
    runs = bench_attention(cases, recipes, rounds, graphs=launch == "graph")
    rows = [row for run in runs for row in attention_json(run)]
    code = _report("attention", map(attention_section, runs), json, rows)
    if plot:
        series: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if row["times_ms"]:
                point = row["tokens"], median(row["times_ms"])
                series.setdefault(_label(batch, row), []).append(point)
        plot_lines(plot, series, "tokens in the cache", "ms per step's attention")
    return code


@bench.command(
    short_help="tokens per second against transformers' caches",
    epilog="Example: kvpass bench decode --model small,layers=4 --context 16384",
)
@click.option(
    "--model",
    default="small",
    help="Its sizes, with random weights: a folder, a config.json, small or llama-3.1-8b, also "
    "with sizes: small,layers=4.",
)
@click.option("--context", type=int, default=4096, help="Tokens in the cache.")
@click.option("--fill", default="random", help="random, or prompt: a prefill.")
@click.option("--inner", default="inductor", help="inductor or eager.")
@click.option(
    "--peers",
    type=ListOf(click.STRING),
    metavar="NAME,...",
    default=(),
    help="Other runtimes, on the CPU: llama.cpp, openvino; needs kvpass[peers].",
)
@_timing(rounds=20)
def decode(
    model: str,
    context: int,
    fill: str,
    inner: str,
    peers: list[str],
    recipes: list[str],
    rounds: int,
    batch: list[int],
    json: str | None,
    plot: str | None,
    **where: Any,
) -> int:
    """Times decode steps of a whole model, packed and with the caches of transformers."""
    from kvpass.bench.decode import bench_decode, decode_json, decode_section
    from kvpass.bench.filling import Setting
    from kvpass.bench.models import written_config
    from kvpass.report import check_outputs, plot_bars

    check_outputs(json, plot)
    device, dtype = _device_and_dtype(**where)
    config = written_config(model)
    settings = [Setting(config, context, b, dtype, device, fill, inner) for b in batch]
    runs = [(s, bench_decode(s, recipes, rounds, peers=peers)) for s in settings]
    rows = [row for s, results in runs for row in decode_json(s, results)]
    code = _report("decode", (decode_section(s, results) for s, results in runs), json, rows)
    if plot:
        bars = {_label(batch, row): row["tokens_per_s"] for row in rows if row["times_ms"]}
        plot_bars(plot, bars, f"tokens per second at {context} tokens")
    return code


@bench.command(
    short_help="time to the first tokens, cold and warm",
    epilog="Example: kvpass bench start --model small,layers=4 --recipes kivi-4bit",
)
@click.option("--model", default="small", help="As of bench decode, or a model's own weights.")
@click.option("--prompt", type=click.IntRange(min=2), default=1024, help="Tokens of it.")
@_machine
@recipes()
@json_file
def start(model: str, prompt: int, recipes: list[str], json: str | None, **where: Any) -> int:
    """Times the first tokens of processes that find nothing compiled, and of such that find what
    an earlier one left: the plain model, torch.compile and recipes."""
    from dataclasses import asdict

    from kvpass.bench.start import StartSetting, bench_start, start_section
    from kvpass.format.dtypes import dtype_name
    from kvpass.options import ready_planner
    from kvpass.report import check_outputs, write_json

    check_outputs(json)
    device, dtype = _device_and_dtype(**where)
    for name in recipes:
        ready_planner(name)
    setting = StartSetting(model, prompt, dtype_name(dtype), str(device), where["threads"])
    starts = list(bench_start(setting, recipes))
    show(start_section(setting, starts))
    write_json(json, "start", given(), [asdict(s) for s in starts])
    return int(any(s.problem for s in starts))


@bench.command(
    short_help="many requests at once against transformers' own pool",
    epilog="Example: kvpass bench serve --memory 16 --recipes kivi-2bit,residual=32",
)
@click.option(
    "--model",
    default="small,layers=4,hidden=256,heads=4,kv_heads=2,vocab=2048",
    help="As of bench decode, or a model's own weights.",
)
@click.option("--requests", type=POSITIVE, default=24, help="How many.")
@click.option("--memory", type=float, default=16.0, help="MiB of the pool of keys and values.")
@click.option("--scale", type=float, default=1.0, help="Of ShareGPT's lengths, which are drawn.")
@click.option("--rate", type=float, help="Requests per second; by default all come at once.")
@click.option("--batch-tokens", type=POSITIVE, default=512, help="The most of a step.")
@_machine
@recipes()
@json_file
def serve(
    model: str,
    requests: int,
    memory: float,
    scale: float,
    rate: float | None,
    batch_tokens: int,
    recipes: list[str],
    json: str | None,
    **where: Any,
) -> int:
    """Serves the same requests from packed pools and from transformers' own, which has the same
    bytes: requests per second, seconds to the first token, and the time between tokens as a line
    over the tokens of all requests."""
    from kvpass.bench.serve import ServeSetting, bench_serve, serve_json, serve_section
    from kvpass.cli.models import load_or_make_model
    from kvpass.format.dtypes import dtype_name
    from kvpass.report import check_outputs

    check_outputs(json)
    device, dtype = _device_and_dtype(**where)
    setting = ServeSetting(requests, int(memory * 2**20), scale, rate, batch_tokens)
    loaded = load_or_make_model(model, dtype_name(dtype), str(device))
    served = bench_serve(loaded, setting, recipes)
    return _report("serve", [serve_section(setting, served)], json, serve_json(served))


def _report(command: str, sections: Iterable[object], json: str | None, rows: list[Row]) -> int:
    """Prints the tables and writes the file; the exit code."""
    from kvpass.report import write_json

    for number, section in enumerate(sections):
        if number:
            print()
        show(section)
    write_json(json, command, given(), rows)
    return int(any(row["status"] == "wrong" for row in rows))


def _label(batch: Sequence[int], row: Row) -> str:
    return row["name"] if len(batch) == 1 else f"{row['name']}, batch {row['batch']}"


@bench.command(
    short_help="check and measure everything that needs a GPU",
    epilog="Example: kvpass bench gpu; without a GPU: kvpass bench gpu --dry-run --target sm_80",
)
@click.option("--device", default="cuda")
@click.option("--minutes", type=float, default=8, help="Begin no part later than this.")
@json_file
@click.option(
    "--parts",
    type=ListOf(click.STRING),
    help="Some of subnormals,model,long,decode,kernels,variants,attention,sizes.",
)
@click.option("--dry-run", is_flag=True, help="Compile a tiny model for a GPU; run nothing.")
@dry_options
def gpu(
    device: str,
    minutes: float,
    json: str | None,
    parts: list[str] | None,
    dry_run: bool,
    **dry: Any,
) -> int:
    """Checks and measures everything that needs a GPU; --json is kvpass_gpu.json by default. With
    --dry-run, what a model becomes there is compiled and said, which needs no GPU; the options
    behind --dry-run belong to it.
    """
    from kvpass.report import check_outputs

    check_outputs(json)
    if dry_run:
        return run_dry(json, **dry)
    from kvpass.bench.gpu import PARTS, bench_gpu
    from kvpass.machine import pick_device

    path = json or "kvpass_gpu.json"
    return int(not bench_gpu(pick_device(device), path, minutes, parts or PARTS))


def _device_and_dtype(device: str | None, dtype: str | None, threads: int | None) -> Any:
    """Where and in what the options compute, the threads being set."""
    import torch

    from kvpass.machine import pick_device

    if threads is not None:
        torch.set_num_threads(threads)
    found = pick_device(device)
    default = "float32" if found.type == "cpu" else "bfloat16"
    return found, getattr(torch, dtype or default)
