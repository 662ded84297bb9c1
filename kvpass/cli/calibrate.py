"""``kvpass calibrate`` and ``kvpass profile``: the command line of calibration.

Imports torch only when it runs.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from kvpass.cli.models import check_texts, load_model, read_texts
from kvpass.cli.options import loading, model_argument, outputs, together

_inputs = together(
    model_argument,
    click.argument("texts", metavar="TEXT...", nargs=-1, required=True),
    click.option("--samples", type=int, default=64, help="Pieces of text."),
    click.option("--length", type=int, default=1024, help="Tokens of each."),
    loading,
)


@click.command(
    short_help="make a plan from texts",
    epilog="Example: kvpass calibrate MODEL book.txt --recipe skvq-k2v2 --out plan.safetensors",
)
@_inputs
@click.option("--out", required=True, metavar="FILE", help="Where the plan goes, *.safetensors.")
@click.option("--recipe", default="skvq-k2v2", help="Also with fields: skvq-k2v2,group=64.")
@click.option("--batch", type=int, default=4, help="Pieces at once.")
@click.option("--seed", type=int, default=0)
def calibrate(
    model: str, texts: tuple[str, ...], dtype: str, device: str, out: str, recipe: str, **sizes: Any
) -> None:
    """Calibrates a recipe for MODEL on text files (of .jsonl the field text of every line), and
    saves the plan. Use it with model.compile(backend='kvpass', options={'recipe':
    'FILE.safetensors'}).
    """
    from kvpass.calibration.calibrate import calibrate as make_plan
    from kvpass.errors import OptionError
    from kvpass.recipes import written_recipe

    if not out.endswith(".safetensors"):
        raise OptionError(f"--out {out} is not supported; allowed: a *.safetensors file.")
    if not Path(out).resolve().parent.is_dir():
        raise OptionError(f"--out {out}: its folder does not exist.")
    wanted = written_recipe(recipe)
    check_texts(texts)
    loaded, tokenizer = load_model(model, dtype, device)
    plan = make_plan(loaded, wanted, read_texts(texts), tokenizer=tokenizer, **sizes)
    plan.save(out)
    assert plan.calibration is not None
    print(
        f"{plan.recipe}: {len(plan.layers)} layers calibrated on {plan.calibration.tokens:,} "
        f"tokens, saved as {out}"
    )


@click.command(
    short_help="the importance of layers",
    epilog="Example: kvpass profile MODEL book.txt --sets 4 --plot layers.svg",
)
@_inputs
@click.option(
    "--sets", type=int, default=0, help="Also say whether so many sets of texts rank layers alike."
)
@outputs()
def profile(
    model: str,
    texts: tuple[str, ...],
    samples: int,
    length: int,
    dtype: str,
    device: str,
    sets: int,
    json: str | None,
    plot: str | None,
) -> None:
    """Prints how much the loss of MODEL depends on the weights that make keys and values, layer by
    layer (KVmix): the more, the more bits they deserve.
    """
    from kvpass.calibration.importance import means, rank_correlations
    from kvpass.calibration.samples import STORED
    from kvpass.calibration.scores import by_layer, importance_of_texts
    from kvpass.report import check_outputs, plot_bars, write_json

    check_outputs(json, plot)
    check_texts(texts)
    loaded, tokenizer = load_model(model, dtype, device)
    norms = importance_of_texts(loaded, read_texts(texts), tokenizer, samples, length, True)
    found = by_layer(means(norms))
    alike = rank_correlations(norms, sets) if sets else None
    width = max(len(layer) for layer in found)
    print(f"{'layer':{width}}{'keys':>12}{'values':>12}")
    for layer, score in found.items():
        print(f"{layer:{width}}{score.keys:>12.4g}{score.values:>12.4g}")
    if alike is not None:
        print(
            f"rank correlation of {sets} sets of texts: keys {alike['keys']:.3f}, values "
            f"{alike['values']:.3f}"
        )
    rows: list[dict[str, Any]] = [{"layer": n, **asdict(score)} for n, score in found.items()]
    write_json(json, "profile", {"model": model}, rows)
    if plot:
        bars = {f"{n} {kind}": getattr(s, kind) for n, s in found.items() for kind in STORED}
        plot_bars(plot, bars, "norm of the gradient")
