"""``kvpass calibrate``: the command line of calibration. Imports torch only when it runs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_DTYPES = ("float32", "bfloat16", "float16")


def add_calibrate(commands: Any) -> None:
    """Adds ``calibrate`` to the sub-parsers of a command line."""
    description = (
        "Calibrates a recipe for a local model on texts, and saves the plan. Use it with "
        "model.compile(backend='kvpass', options={'recipe': 'FILE.safetensors'})."
    )
    command = commands.add_parser("calibrate", help="make a plan from texts",
                                  description=description)  # fmt: skip
    command.add_argument("model", metavar="MODEL", help="folder of a transformers model")
    command.add_argument("texts", nargs="+", metavar="TEXT",
                         help="text files; of .jsonl, the field text of every line")  # fmt: skip
    command.add_argument("--out", required=True, metavar="FILE", help="where the plan goes, "
                         "*.safetensors")  # fmt: skip
    command.add_argument("--recipe", default="skvq-k2v2", metavar="NAME",
                         help="default: skvq-k2v2; or e.g. skvq-k2v2,group=64")  # fmt: skip
    command.add_argument("--samples", type=int, default=64, help="pieces of text (default: 64)")
    command.add_argument("--length", type=int, default=1024, help="tokens each (default: 1024)")
    command.add_argument("--batch", type=int, default=4, help="pieces at once (default: 4)")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--dtype", default="float32", help="float32 (default), bfloat16, float16")
    command.add_argument("--device", default="cpu", help="default: cpu")
    command.set_defaults(run=run_calibrate)


def run_calibrate(options: argparse.Namespace) -> int:
    """``kvpass calibrate``."""
    from kvpass.calibration.calibrate import calibrate
    from kvpass.errors import OptionError, unknown
    from kvpass.recipes import written_recipe

    if options.dtype not in _DTYPES:
        raise OptionError(unknown("dtype", options.dtype, _DTYPES))
    if not options.out.endswith(".safetensors"):
        raise OptionError(f"--out {options.out} is not supported; allowed: a *.safetensors file.")
    if not Path(options.out).resolve().parent.is_dir():
        raise OptionError(f"--out {options.out}: its folder does not exist.")
    recipe = written_recipe(options.recipe)
    for path in options.texts:
        if not Path(path).is_file():
            raise OptionError(f"Text file '{path}' does not exist.")
    model, tokenizer = _load(options.model, options.dtype, options.device)
    plan = calibrate(
        model,
        recipe,
        _texts(options.texts),
        tokenizer=tokenizer,
        samples=options.samples,
        length=options.length,
        batch=options.batch,
        seed=options.seed,
    )
    plan.save(options.out)
    assert plan.calibration is not None
    print(
        f"{plan.recipe}: {len(plan.layers)} layers calibrated on {plan.calibration.tokens:,} "
        f"tokens, saved as {options.out}"
    )
    return 0


def _load(path: str, dtype: str, device: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kvpass.errors import OptionError

    if not (Path(path) / "config.json").is_file():
        raise OptionError(f"'{path}' is not a model folder: it has no config.json.")
    try:
        place = torch.device(device)
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), local_files_only=True
        ).to(place)
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
