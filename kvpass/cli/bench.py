"""``kvpass bench``: the command line of the benchmarks. Imports torch only when one runs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpass.bench.timing import Result

_DTYPES = ("float16", "bfloat16", "float32")
_SIZES = ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocab")


def add_bench(commands: Any) -> None:
    """Adds ``bench`` and its sub-commands to the sub-parsers of a command line."""
    bench = commands.add_parser("bench", help="measure speed and memory")
    kinds = bench.add_subparsers(required=True, metavar="benchmark")
    _add_attention(kinds)
    _add_decode(kinds)
    _add_memory(kinds)
    _add_gpu(kinds)


def _output_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="write the machine and all raw times")
    parser.add_argument("--plot", metavar="FILE", help="draw the medians (needs kvpass[plot])")


def _timing_options(parser: argparse.ArgumentParser, rounds: int) -> None:
    parser.add_argument("--device", help="cpu or cuda; default: cuda where there is one")
    parser.add_argument("--dtype", help=f"{', '.join(_DTYPES)}; default: float32 on CPU, else "
                        "bfloat16")  # fmt: skip
    parser.add_argument("--threads", type=int, help="CPU threads of torch")
    parser.add_argument("--rounds", type=int, default=rounds, help="timed calls of each contender")
    parser.add_argument("--recipes", nargs="+", default=["kivi-4bit", "kivi-2bit"], metavar="NAME",
                        help="also with fields: kivi-2bit,group=128")  # fmt: skip
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    _output_options(parser)


def _model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", default="small", help="small (default) or llama-3.1-8b")
    parser.add_argument("--config", metavar="FILE", help="a transformers config.json instead")
    for name in _SIZES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help="of the preset")


def _add_attention(kinds: Any) -> None:
    parser = kinds.add_parser("attention", help="one decode step's attention against SDPA")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 32768])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument(
        "--launch",
        choices=("graph", "plain"),
        default="graph",
        help="on a GPU: time CUDA graphs, or launches from Python",
    )
    _timing_options(parser, rounds=30)
    parser.set_defaults(run=run_attention)


def run_attention(args: argparse.Namespace) -> int:
    """``kvpass bench attention``."""
    from kvpass.bench.attention import attention_section, bench_attention
    from kvpass.bench.contenders import Case
    from kvpass.bench.report import check_outputs, plot_lines, result_json, write_json

    check_outputs(args.json, args.plot)
    device, dtype = _place(args)
    cases = [
        Case(b, args.heads, args.kv_heads, args.head_dim, t, dtype, device)
        for b in args.batch
        for t in args.tokens
    ]
    runs = bench_attention(cases, args.recipes, args.rounds, graphs=args.launch == "graph")
    print("\n\n".join(str(attention_section(run)) for run in runs))
    if args.json:
        rows = [
            {"tokens": run.case.tokens, "batch": run.case.batch, "copy_gb_s": run.copy_gb_s}
            | result_json(result)
            for run in runs
            for result in run.results
        ]
        write_json(args.json, "attention", _arguments(args), rows)
    if args.plot:
        series: dict[str, list[tuple[float, float]]] = {}
        for run in runs:
            for r in (r for r in run.results if r.times_ms):
                name = r.name if len(args.batch) == 1 else f"{r.name}, batch {run.case.batch}"
                series.setdefault(name, []).append((run.case.tokens, r.median_ms))
        plot_lines(args.plot, series, "tokens in the cache", "ms per decode step's attention")
    return _exit_code([r for run in runs for r in run.results])


def _add_decode(kinds: Any) -> None:
    parser = kinds.add_parser("decode", help="tokens per second against transformers' caches")
    parser.add_argument("--context", type=int, default=4096, help="tokens in the cache")
    parser.add_argument("--fill", default="random", help="random (default) or prompt: a prefill")
    parser.add_argument("--inner", default="inductor", help="inductor (default) or eager")
    _model_options(parser)
    _timing_options(parser, rounds=20)
    parser.set_defaults(run=run_decode)


def run_decode(args: argparse.Namespace) -> int:
    """``kvpass bench decode``."""
    from kvpass.bench.decode import bench_decode, decode_json, decode_section, tokens_per_second
    from kvpass.bench.filling import Setting
    from kvpass.bench.report import check_outputs, plot_bars, result_json, write_json

    check_outputs(args.json, args.plot)
    device, dtype = _place(args)
    config = _config(args)
    settings = [
        Setting(config, args.context, batch, dtype, device, args.fill, args.inner)
        for batch in args.batch
    ]
    runs = [(s, bench_decode(s, args.recipes, args.rounds)) for s in settings]
    print("\n\n".join(str(decode_section(s, results)) for s, results in runs))
    pairs = [(s, r) for s, results in runs for r in results]
    if args.json:
        rows = [decode_json(s, r) | result_json(r) for s, r in pairs]
        write_json(args.json, "decode", _arguments(args), rows)
    if args.plot:
        many = len(args.batch) > 1
        bars = {
            f"{r.name}, batch {s.batch}" if many else r.name: tokens_per_second(s, r)
            for s, r in pairs
            if r.times_ms
        }
        plot_bars(args.plot, bars, f"tokens per second at {args.context} tokens")
    return _exit_code([r for _, r in pairs])


def _add_memory(kinds: Any) -> None:
    parser = kinds.add_parser("memory", help="the context and the batch that fit into a budget")
    parser.add_argument("--budget", default="16GiB", help="bytes for the cache, e.g. 16GiB")
    parser.add_argument("--batch", type=int, default=1, help="for the largest context")
    parser.add_argument("--context", type=int, default=32768, help="for the largest batch")
    parser.add_argument("--dtype", default="bfloat16", help=", ".join(_DTYPES))
    parser.add_argument("--recipes", nargs="+", default=["kivi-4bit", "kivi-2bit"])
    _model_options(parser)
    _output_options(parser)
    parser.set_defaults(run=run_memory)


def run_memory(args: argparse.Namespace) -> int:
    """``kvpass bench memory``."""
    from dataclasses import asdict

    from kvpass.bench.device import pick_dtype
    from kvpass.bench.memory import bench_memory, memory_section, parse_bytes
    from kvpass.bench.models import cache_shape
    from kvpass.bench.report import check_outputs, plot_bars, write_json

    check_outputs(args.json, args.plot)
    shape = cache_shape(_config(args))
    budget, dtype = parse_bytes(args.budget), pick_dtype(args.dtype)
    fits = bench_memory(shape, args.recipes, budget, args.batch, args.context, dtype)
    title = (
        f"{budget:,} bytes for a {args.dtype} cache of {shape.layers} layers, {shape.kv_heads} KV "
        f"heads of {shape.head_dim}: context at batch {args.batch}, batch at {args.context} tokens"
    )
    print(memory_section(fits, title))
    if args.json:
        write_json(args.json, "memory", _arguments(args), [asdict(fit) for fit in fits])
    if args.plot:
        label = f"largest context at batch {args.batch}, tokens"
        plot_bars(args.plot, {fit.name: fit.context for fit in fits}, label)
    return int(any(fit.error for fit in fits))


def _add_gpu(kinds: Any) -> None:
    parser = kinds.add_parser("gpu", help="check and measure everything that needs a GPU")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=8, help="begin no part later than this")
    parser.add_argument("--json", metavar="FILE", help="default: kvpass_gpu.json")
    parts = "subnormals, model, long, decode, kernels, variants, attention, sizes (default: all)"
    parser.add_argument("--parts", nargs="+", metavar="NAME", help=parts)
    dry = parser.add_argument_group(
        "without a GPU", "compile a tiny model for a GPU that need not be there"
    )
    dry.add_argument("--dry-run", action="store_true", help="run nothing, say what was compiled")
    dry.add_argument("--target", nargs="+", default=["sm_90"], help="sm_80, sm_90 (default)")
    dry.add_argument("--recipes", nargs="+", default=["kivi-4bit", "kivi-2bit"], metavar="NAME")
    dry.add_argument("--dtype", nargs="+", default=["bfloat16"], help=", ".join(_DTYPES))
    dry.add_argument("--cache", nargs="+", default=["dynamic", "static"], help="dynamic, static")
    dry.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.set_defaults(run=run_gpu)


def run_gpu(args: argparse.Namespace) -> int:
    """``kvpass bench gpu``."""
    from kvpass.bench.report import check_outputs

    check_outputs(args.json, None)
    if args.dry_run:
        return _run_dry(args)
    from kvpass.bench.device import pick_device
    from kvpass.bench.gpu import PARTS, bench_gpu

    path = args.json or "kvpass_gpu.json"
    parts = args.parts or PARTS
    return int(not bench_gpu(pick_device(args.device), path, args.minutes, parts))


def _run_dry(args: argparse.Namespace) -> int:
    """``kvpass bench gpu --dry-run``."""
    from kvpass.bench.dry_run import dry_run, dry_run_json, dry_run_section, parse_routes
    from kvpass.bench.report import write_json
    from kvpass.errors import KvpassError, cut

    rows: list[dict[str, Any]] = []
    routes = parse_routes(args.recipes, args.dtype, args.cache, args.batch, args.target)
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
        if args.json:
            write_json(args.json, "gpu --dry-run", _arguments(args), rows)
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


def _place(args: argparse.Namespace) -> tuple[Any, Any]:
    """Device and dtype, the threads being set."""
    import torch

    from kvpass.bench.device import pick_device, pick_dtype
    from kvpass.errors import OptionError

    for name in ("rounds", "threads"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise OptionError(f"--{name} {getattr(args, name)} is not supported; at least 1.")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    device = pick_device(args.device)
    return device, pick_dtype(args.dtype or ("float32" if device.type == "cpu" else "bfloat16"))


def _arguments(args: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(args).items() if name != "run"}


def _exit_code(results: list[Result]) -> int:
    return int(any(result.wrong for result in results))
