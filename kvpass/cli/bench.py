"""``kvpass bench``: the command line of the benchmarks. Imports torch only when one runs."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import asdict
from itertools import product
from statistics import median
from typing import Any

from kvpass.cli.options import DTYPES, TARGETS, given, positive

Row = dict[str, Any]
_SIZES = ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocab")


def add_bench(commands: Any) -> None:
    """Adds ``bench`` and its sub-commands to the sub-parsers of a command line."""
    bench = commands.add_parser("bench", help="measure speed and memory")
    kinds = bench.add_subparsers(required=True, metavar="benchmark", dest="benchmark")
    _add_attention(kinds)
    _add_decode(kinds)
    _add_memory(kinds)
    _add_gpu(kinds)


def _output_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    recipes = "also with fields: kivi-2bit,group=128"
    add("--recipes", nargs="+", default=["kivi-4bit", "kivi-2bit"], metavar="NAME", help=recipes)
    add("--json", metavar="FILE", help="write the machine and all raw times")
    add("--plot", metavar="FILE", help="draw the medians (needs kvpass[plot])")


def _timing_options(parser: argparse.ArgumentParser, rounds: int) -> None:
    add = parser.add_argument
    add("--device", help="cpu or cuda; default: cuda where there is one")
    add("--dtype", choices=DTYPES, help="default: float32 on CPU, else bfloat16")
    add("--threads", type=positive, help="CPU threads of torch")
    add("--rounds", type=positive, default=rounds, help="timed calls of each contender")
    add("--batch", type=int, nargs="+", default=[1])
    _output_options(parser)


def _model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", default="small", help="small (default) or llama-3.1-8b")
    parser.add_argument("--config", metavar="FILE", help="a transformers config.json instead")
    for name in _SIZES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help="of the preset")


def _add_attention(kinds: Any) -> None:
    parser = kinds.add_parser("attention", help="one decode step's attention against SDPA")
    add = parser.add_argument
    add("--tokens", type=int, nargs="+", default=[4096, 32768])
    add("--heads", type=int, default=32)
    add("--kv-heads", type=int, default=8)
    add("--head-dim", type=int, default=128)
    launch = "on a GPU: time CUDA graphs (default), or launches from Python"
    add("--launch", choices=("graph", "plain"), default="graph", help=launch)
    _timing_options(parser, rounds=30)
    parser.set_defaults(run=run_attention)


def run_attention(args: argparse.Namespace) -> int:
    """``kvpass bench attention``."""
    from kvpass.bench.attention import attention_json, attention_section, bench_attention
    from kvpass.bench.contenders import Case
    from kvpass.bench.report import check_outputs, plot_lines

    check_outputs(args.json, args.plot)
    device, dtype = _device_and_dtype(args)
    cases = [
        Case(b, args.heads, args.kv_heads, args.head_dim, t, dtype, device)
        for b, t in product(args.batch, args.tokens)
    ]
    runs = bench_attention(cases, args.recipes, args.rounds, graphs=args.launch == "graph")
    rows = [row for run in runs for row in attention_json(run)]
    code = _report(args, map(attention_section, runs), rows)
    if args.plot:
        series: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if row["times_ms"]:
                point = row["tokens"], median(row["times_ms"])
                series.setdefault(_label(args, row), []).append(point)
        plot_lines(args.plot, series, "tokens in the cache", "ms per decode step's attention")
    return code


def _add_decode(kinds: Any) -> None:
    parser = kinds.add_parser("decode", help="tokens per second against transformers' caches")
    add = parser.add_argument
    add("--context", type=int, default=4096, help="tokens in the cache")
    add("--fill", default="random", help="random (default) or prompt: a prefill")
    add("--inner", default="inductor", help="inductor (default) or eager")
    _model_options(parser)
    _timing_options(parser, rounds=20)
    parser.set_defaults(run=run_decode)


def run_decode(args: argparse.Namespace) -> int:
    """``kvpass bench decode``."""
    from kvpass.bench.decode import bench_decode, decode_json, decode_section
    from kvpass.bench.filling import Setting
    from kvpass.bench.report import check_outputs, plot_bars

    check_outputs(args.json, args.plot)
    device, dtype = _device_and_dtype(args)
    config = _config(args)
    settings = [
        Setting(config, args.context, batch, dtype, device, args.fill, args.inner)
        for batch in args.batch
    ]
    runs = [(s, bench_decode(s, args.recipes, args.rounds)) for s in settings]
    rows = [row for s, results in runs for row in decode_json(s, results)]
    code = _report(args, (decode_section(s, results) for s, results in runs), rows)
    if args.plot:
        bars = {_label(args, row): row["tokens_per_s"] for row in rows if row["times_ms"]}
        plot_bars(args.plot, bars, f"tokens per second at {args.context} tokens")
    return code


def _report(args: argparse.Namespace, sections: Iterable[object], rows: list[Row]) -> int:
    """Prints the tables and writes the file; the exit code."""
    from kvpass.bench.report import write_json

    print("\n\n".join(map(str, sections)))
    write_json(args.json, args.benchmark, given(args), rows)
    return int(any(row["status"] == "wrong" for row in rows))


def _label(args: argparse.Namespace, row: Row) -> str:
    return row["name"] if len(args.batch) == 1 else f"{row['name']}, batch {row['batch']}"


def _add_memory(kinds: Any) -> None:
    parser = kinds.add_parser("memory", help="the context and the batch that fit into a budget")
    add = parser.add_argument
    add("--budget", default="16GiB", help="bytes for the cache, e.g. 16GiB")
    add("--batch", type=int, default=1, help="for the largest context")
    add("--context", type=int, default=32768, help="for the largest batch")
    add("--dtype", default="bfloat16", choices=DTYPES)
    _model_options(parser)
    _output_options(parser)
    parser.set_defaults(run=run_memory)


def run_memory(args: argparse.Namespace) -> int:
    """``kvpass bench memory``."""
    import torch

    from kvpass.bench.memory import bench_memory, memory_section, parse_bytes
    from kvpass.bench.models import cache_shape
    from kvpass.bench.report import check_outputs, plot_bars, write_json

    check_outputs(args.json, args.plot)
    shape = cache_shape(_config(args))
    budget, dtype = parse_bytes(args.budget), getattr(torch, args.dtype)
    fits = bench_memory(shape, args.recipes, budget, args.batch, args.context, dtype)
    title = (
        f"{budget:,} bytes for a {args.dtype} cache of {shape.layers} layers, {shape.kv_heads} KV "
        f"heads of {shape.head_dim}: context at batch {args.batch}, batch at {args.context} tokens"
    )
    print(memory_section(fits, title))
    write_json(args.json, "memory", given(args), [asdict(fit) for fit in fits])
    if args.plot:
        label = f"largest context at batch {args.batch}, tokens"
        plot_bars(args.plot, {fit.name: fit.context for fit in fits}, label)
    return int(any(fit.error for fit in fits))


def _add_gpu(kinds: Any) -> None:
    parser = kinds.add_parser("gpu", help="check and measure everything that needs a GPU")
    add = parser.add_argument
    add("--device", default="cuda")
    add("--minutes", type=float, default=8, help="begin no part later than this")
    add("--json", metavar="FILE", help="default: kvpass_gpu.json")
    parts = "subnormals, model, long, decode, kernels, variants, attention, sizes (default: all)"
    add("--parts", nargs="+", metavar="NAME", help=parts)
    add = parser.add_argument_group(
        "without a GPU", "compile a tiny model for a GPU that need not be there"
    ).add_argument
    add("--dry-run", action="store_true", help="run nothing, say what was compiled")
    add("--target", nargs="+", default=["sm_90"], choices=TARGETS, help="default: sm_90")
    add("--recipes", nargs="+", default=["kivi-4bit", "kivi-2bit"], metavar="NAME")
    add("--dtype", nargs="+", default=["bfloat16"], choices=DTYPES)
    add("--cache", nargs="+", default=["dynamic", "static"], choices=("dynamic", "static"))
    add("--batch", type=positive, nargs="+", default=[1])
    parser.set_defaults(run=run_gpu)


def run_gpu(args: argparse.Namespace) -> int:
    """``kvpass bench gpu``."""
    from kvpass.bench.report import check_outputs

    check_outputs(args.json)
    if args.dry_run:
        return _run_dry(args)
    from kvpass.bench.device import pick_device
    from kvpass.bench.gpu import PARTS, bench_gpu

    path, parts = args.json or "kvpass_gpu.json", args.parts or PARTS
    return int(not bench_gpu(pick_device(args.device), path, args.minutes, parts))


def _run_dry(args: argparse.Namespace) -> int:
    """``kvpass bench gpu --dry-run``."""
    import torch

    from kvpass.bench.dry_run import HEAD_DIM, Route, dry_run, dry_run_json, dry_run_section
    from kvpass.bench.plans import check_recipe
    from kvpass.bench.report import write_json
    from kvpass.errors import KvpassError, cut

    for recipe in args.recipes:
        check_recipe(recipe, HEAD_DIM)
    routes = [
        Route(recipe, getattr(torch, dtype), cache, batch, TARGETS[target])
        for target, recipe, dtype, cache, batch in product(
            args.target, args.recipes, args.dtype, args.cache, args.batch
        )
    ]
    rows: list[dict[str, Any]] = []
    for route in routes:
        try:
            found = dry_run(route)
        except KvpassError:
            raise
        except Exception as error:
            problem = cut(f"{type(error).__name__}: {error}")
            print(f"{route}\n  FAILED {problem}\n", flush=True)
            rows.append({"route": str(route), "right": False, "problem": problem})
        else:
            print(f"{dry_run_section(route, found)}\n", flush=True)
            rows += dry_run_json(route, found)
        write_json(args.json, "gpu --dry-run", given(args), rows)
    wrong = sum(not row["right"] for row in rows)
    print(f"{len(routes)} routes, {len(rows)} graphs, {wrong} not right")
    return int(wrong > 0)


def _config(args: argparse.Namespace) -> Any:
    """The transformers config that the options name."""
    from kvpass.bench.models import load_config, preset
    from kvpass.errors import OptionError

    sizes = {name: getattr(args, name) for name in _SIZES if getattr(args, name) is not None}
    if args.config is None:
        return preset(args.preset, sizes).config()
    if sizes:
        raise OptionError(f"--config takes no {', '.join(sorted(sizes))} beside it.")
    return load_config(args.config)


def _device_and_dtype(args: argparse.Namespace) -> tuple[Any, Any]:
    """Where and in what the options compute, the threads being set."""
    import torch

    from kvpass.bench.device import pick_device

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    device = pick_device(args.device)
    default = "float32" if device.type == "cpu" else "bfloat16"
    return device, getattr(torch, args.dtype or default)
