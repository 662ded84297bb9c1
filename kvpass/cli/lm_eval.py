"""``kvpass eval --lm-eval``: tasks of lm-evaluation-harness. Imports torch only when it runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from kvpass.cli.models import read_texts
from kvpass.cli.options import ListOf, together
from kvpass.cli.output import show

if TYPE_CHECKING:
    from kvpass.evaluate import Settings

# The options below, and those that are for texts alone.
HARNESS = ("lm_eval", "limit", "num_fewshot", "lm_eval_tasks", "metadata")
_TEXTS = ("tokens", "tasks", "lengths", "seeds", "no_plots")

harness_options = together(
    click.option(
        "--lm-eval",
        type=ListOf(click.STRING),
        metavar="TASK,...",
        help="Tasks of lm-evaluation-harness, instead of TEXT; needs kvpass[lm-eval].",
    ),
    click.option(
        "--limit",
        type=click.FloatRange(min=0, min_open=True),
        help="With --lm-eval: documents of a task, below 1 the share of them.",
    ),
    click.option(
        "--num-fewshot", type=click.IntRange(min=0), help="With --lm-eval: examples in a prompt."
    ),
    click.option(
        "--lm-eval-tasks", metavar="FOLDER", help="With --lm-eval: YAML files of your own tasks."
    ),
    click.option(
        "--metadata",
        metavar="JSON",
        help='With --lm-eval: for tasks that make data, e.g. {"max_seq_lengths": [4096]}.',
    ),
)


def check_use(texts: Sequence[str], harness: bool) -> None:
    """Refuses options and texts that what was asked for does not look at.

    Raises:
        UsageError: if there is one, or nothing is asked for.
    """
    if harness and texts:
        raise click.UsageError("--lm-eval takes no TEXT; calibrated recipes take --calibration")
    context = click.get_current_context()
    for name in _TEXTS if harness else HARNESS:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option, does = f"--{name.replace('_', '-')}", "is not for" if harness else "needs"
            raise click.UsageError(f"{option} {does} --lm-eval")
    if not harness and not texts:
        raise click.UsageError("Missing argument 'TEXT...', or --lm-eval")


def run_harness(
    asked: Mapping[str, Any],
    model: str,
    load: Callable[[], tuple[Any, Any]],
    recipes: Sequence[str],
    out: str,
    calibration: Sequence[str] | None,
    settings: Settings,
) -> int:
    """Runs the tasks, prints the table and writes it to the folder; returns the exit code.

    Args:
        asked: the values of the options `HARNESS`.
        model: what the tasks are told of it.
        load: makes the model and its tokenizer.

    Raises:
        OptionError: if a value is not allowed, or lm_eval is missing.
    """
    from kvpass.errors import check_installed

    # The latter is what lm_eval needs for models of transformers.
    check_installed("--lm-eval", "lm_eval", "lm_eval", "accelerate", extra="lm-eval")
    metadata = {"pretrained": model, **_metadata(asked["metadata"])}

    from kvpass.evaluate.harness import find_tasks, run_tasks
    from kvpass.evaluate.harness_report import harness_section, write_harness_report

    tasks = find_tasks(asked["lm_eval"], asked["lm_eval_tasks"], metadata)
    records = run_tasks(
        *load(),
        recipes,
        tasks,
        settings,
        limit=asked["limit"],
        num_fewshot=asked["num_fewshot"],
        calibration_texts=read_texts(calibration or ()),
        path=f"{out}/lm_eval.jsonl",
    )
    show(harness_section(records))
    print()
    print("\n".join(write_harness_report(records, out)))
    return int(any("problem" in record for record in records))


def _metadata(text: str | None) -> dict[str, Any]:
    from kvpass.errors import OptionError, shown

    try:
        found = json.loads(text or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise OptionError(f"--metadata {shown(text)} is not a JSON object.")
    return found
