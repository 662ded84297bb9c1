"""``kvpass calibrate`` and ``kvpass profile``: the command line of calibration.

Imports torch only when it runs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvpass.cli.options import DTYPES


def add_calibrate(commands: Any) -> None:
    """Adds ``calibrate`` to the sub-parsers of a command line."""
    command = commands.add_parser(
        "calibrate",
        help="make a plan from texts",
        description="Calibrates a recipe for a local model on texts, and saves the plan. Use it "
        "with model.compile(backend='kvpass', options={'recipe': 'FILE.safetensors'}).",
    )
    _add_inputs(command)
    add = command.add_argument
    add("--out", required=True, metavar="FILE", help="where the plan goes, *.safetensors")
    recipe = "default: skvq-k2v2; or e.g. skvq-k2v2,group=64"
    add("--recipe", default="skvq-k2v2", metavar="NAME", help=recipe)
    add("--batch", type=int, default=4, help="pieces at once (default: 4)")
    add("--seed", type=int, default=0)
    command.set_defaults(run=run_calibrate)


def add_profile(commands: Any) -> None:
    """Adds ``profile`` to the sub-parsers of a command line."""
    command = commands.add_parser(
        "profile",
        help="the importance of layers",
        description="Prints how much the loss of a local model depends on the weights that make "
        "keys and values, layer by layer (KVmix): the more, the more bits they deserve.",
    )
    _add_inputs(command)
    add = command.add_argument
    sets = "also say whether N disjoint sets of the texts rank the layers alike"
    add("--sets", type=int, default=0, metavar="N", help=sets)
    add("--json", metavar="FILE", help="write the table there, too")
    add("--plot", metavar="FILE", help="draw it; needs matplotlib")
    command.set_defaults(run=run_profile)


def _add_inputs(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("model", metavar="MODEL", help="folder of a transformers model")
    texts = "text files; of .jsonl, the field text of every line"
    add("texts", nargs="+", metavar="TEXT", help=texts)
    add("--samples", type=int, default=64, help="pieces of text (default: 64)")
    add("--length", type=int, default=1024, help="tokens each (default: 1024)")
    add("--dtype", default="float32", choices=DTYPES, help="default: float32")
    add("--device", default="cpu", help="default: cpu")


def run_calibrate(options: argparse.Namespace) -> int:
    """``kvpass calibrate``."""
    from kvpass.calibration.calibrate import calibrate
    from kvpass.errors import OptionError
    from kvpass.recipes import written_recipe

    if not options.out.endswith(".safetensors"):
        raise OptionError(f"--out {options.out} is not supported; allowed: a *.safetensors file.")
    if not Path(options.out).resolve().parent.is_dir():
        raise OptionError(f"--out {options.out}: its folder does not exist.")
    recipe = written_recipe(options.recipe)
    model, tokenizer = _load(options)
    sizes = {name: getattr(options, name) for name in ("samples", "length", "batch", "seed")}
    plan = calibrate(model, recipe, _texts(options.texts), tokenizer=tokenizer, **sizes)
    plan.save(options.out)
    assert plan.calibration is not None
    print(
        f"{plan.recipe}: {len(plan.layers)} layers calibrated on {plan.calibration.tokens:,} "
        f"tokens, saved as {options.out}"
    )
    return 0


def run_profile(options: argparse.Namespace) -> int:
    """``kvpass profile``."""
    from kvpass.bench.report import check_outputs, plot_bars, write_json
    from kvpass.calibration.importance import means, rank_correlations
    from kvpass.calibration.samples import STORED
    from kvpass.calibration.scores import by_layer, importance_of_texts

    check_outputs(options.json, options.plot)
    model, tokenizer = _load(options)
    norms = importance_of_texts(
        model, _texts(options.texts), tokenizer, options.samples, options.length, True
    )
    found = by_layer(means(norms))
    alike = rank_correlations(norms, options.sets) if options.sets else None
    width = max(len(layer) for layer in found)
    print(f"{'layer':{width}}{'keys':>12}{'values':>12}")
    for layer, score in found.items():
        print(f"{layer:{width}}{score.keys:>12.4g}{score.values:>12.4g}")
    if alike is not None:
        print(
            f"rank correlation of {options.sets} sets of texts: keys {alike['keys']:.3f}, values "
            f"{alike['values']:.3f}"
        )
    rows = [{"layer": layer, **asdict(score)} for layer, score in found.items()]
    write_json(options.json, "profile", {"model": options.model}, rows)
    if options.plot:
        bars = {f"{n} {kind}": getattr(s, kind) for n, s in found.items() for kind in STORED}
        plot_bars(options.plot, bars, "norm of the gradient")
    return 0


def _load(options: argparse.Namespace) -> tuple[Any, Any]:
    """The model and its tokenizer; the texts are looked for before, which is quick.

    Raises:
        OptionError: if a file is missing, or the model cannot be loaded.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kvpass.errors import OptionError

    path, device = options.model, options.device
    for text in options.texts:
        if not Path(text).is_file():
            raise OptionError(f"Text file '{text}' does not exist.")
    if not (Path(path) / "config.json").is_file():
        raise OptionError(f"'{path}' is not a model folder: it has no config.json.")
    try:
        # Before the model is loaded: a device that torch does not know is found at once.
        target = torch.device(device)
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, options.dtype), local_files_only=True
        ).to(target)
    except (OSError, ValueError, RuntimeError, AssertionError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise OptionError(f"'{path}' cannot be loaded on {device}: {reason}.") from None
    return model.eval(), tokenizer


def _texts(paths: Sequence[str]) -> Iterator[Any]:
    """The texts of files, read one after the other.

    Raises:
        OptionError: if one is not text, or a line of a .jsonl file is no JSON object.
    """
    from kvpass.errors import OptionError

    for path in paths:
        try:
            if not path.endswith(".jsonl"):
                yield Path(path).read_text(encoding="utf-8")
                continue
            with Path(path).open(encoding="utf-8") as lines:
                yield from (_object(line) for line in lines if line.strip())
        except UnicodeDecodeError:
            raise OptionError(f"'{path}' is no text in UTF-8.") from None
        except ValueError as error:
            raise OptionError(f"'{path}' cannot be read: {error}.") from None


def _object(line: str) -> dict[str, Any]:
    found = json.loads(line)
    if not isinstance(found, dict):
        raise ValueError(f"a line is {type(found).__name__}, not an object")
    return found
