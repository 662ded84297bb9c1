"""``kvpass eval``: what recipes do to a model. Imports torch only when it runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from kvpass.cli.lm_eval import HARNESS, check_use, harness_options, run_harness
from kvpass.cli.models import check_texts, load_model, read_texts
from kvpass.cli.options import POSITIVE, ListOf, loading, model_argument, named, recipes
from kvpass.cli.output import show


@click.command(
    "eval",
    short_help="judge what recipes do to a model",
    epilog="Example: kvpass eval MODEL held_out.txt --recipes kivi-4bit,kivi-2bit --out judged",
)
@model_argument
@click.argument("texts", metavar="[TEXT...]", nargs=-1)
@recipes()
@click.option("--out", required=True, metavar="FOLDER", help="Tables, plots, all measurements.")
@click.option(
    "--calibration",
    type=ListOf(click.STRING),
    metavar="TEXT,...",
    help="Text files for calibrated recipes; by default each fourth of the texts, not scored.",
)
@click.option("--prompt", type=POSITIVE, default=256, help="Tokens read before scored ones.")
@click.option("--length", type=POSITIVE, help="Tokens of a piece; by default what MODEL supports.")
@click.option("--tokens", type=POSITIVE, default=32768, help="Scored ones, if texts have as many.")
@click.option("--batch", type=POSITIVE, default=24, help="The most pieces at once.")
@click.option("--tasks", type=ListOf(click.STRING), help="All if not given; none: an empty text.")
@click.option("--lengths", type=ListOf(POSITIVE), help="Tokens of the documents of tasks.")
@click.option("--seeds", type=POSITIVE, default=3, help="Drawings of each task.")
@click.option("--samples", type=POSITIVE, default=16, help="Pieces that calibrated recipes see.")
@click.option("--inner", type=click.Choice(["inductor", "eager"]), default="inductor")
@click.option("--no-plots", is_flag=True, help="Draw nothing; plots need kvpass[plot].")
@harness_options
@loading
def evaluate(
    model: str,
    texts: tuple[str, ...],
    recipes: list[str],
    out: str,
    calibration: list[str] | None,
    no_plots: bool,
    dtype: str,
    device: str,
    tasks: list[str] | None,
    lengths: list[int] | None,
    **settings: Any,
) -> int:
    """Judges recipes on MODEL, a folder or a name on the Hugging Face hub, token by token through
    the cache: divergence from the plain model by depth, perplexity, agreement, and generated tasks
    (needles, RULER's, exact copies); with --lm-eval, tasks of lm-evaluation-harness instead.
    Standard errors say which recipes tie. Called again, it goes on where it stopped. --recipes all
    takes every recipe. Exits with 1 if a recipe failed.
    """
    from kvpass.errors import OptionError
    from kvpass.evaluate import Settings, sections, write_report
    from kvpass.evaluate import evaluate as judge
    from kvpass.report import check_outputs

    asked = {name: settings.pop(name) for name in HARNESS}
    harness = asked["lm_eval"] is not None
    check_use(texts, harness)
    check_outputs(None, None if no_plots or harness else str(Path(out).absolute()))
    check_texts([*texts, *(calibration or [])])
    if tasks is not None:
        settings["tasks"] = tuple(filter(None, tasks))
    chosen = Settings(**settings, lengths=None if lengths is None else tuple(lengths))
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"'{out}' cannot be a folder: {error.strerror}.") from None
    if harness:
        loads = partial(load_model, model, dtype, device)
        return run_harness(asked, model, loads, named(recipes), out, calibration, chosen)
    found = judge(
        *load_model(model, dtype, device),
        named(recipes),
        read_texts(texts),
        chosen,
        calibration_texts=read_texts(calibration) if calibration else None,
        path=f"{out}/measurements.jsonl",
    )
    for section in sections(found):
        show(section)
        print()
    print("\n".join(write_report(found, out, plots=not no_plots)))
    return int(any("problem" in record for record in found.records))
