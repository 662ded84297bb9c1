"""``kvpass explain``: what kvpass does to a model. Imports torch only when it runs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from kvpass.cli.models import load_or_make_model
from kvpass.cli.options import POSITIVE, given, json_file, loading, model_argument


@click.command(
    short_help="show what is done to a model",
    epilog="Example: kvpass explain llama-3.1-8b,layers=4 --html llama.html",
)
@model_argument
@click.option("--recipe", default="kivi-4bit", help="Also kivi-2bit,group=64, or a plan's file.")
@click.option("--tokens", type=POSITIVE, default=512, help="Of the prompt, random ones.")
@click.option("--inner", type=click.Choice(["eager", "inductor"]), default="eager")
@click.option("--strict", is_flag=True, help="Exit with 2 where a graph cannot be rewritten.")
@click.option("--html", metavar="FILE", help="Write a page: map of layers, graphs, kernels.")
@click.option("--folder", metavar="FOLDER", help="Write all graphs and generated kernels.")
@json_file
@loading
def explain(
    model: str,
    recipe: str,
    tokens: int,
    inner: str,
    strict: bool,
    html: str | None,
    folder: str | None,
    json: str | None,
    dtype: str,
    device: str,
) -> None:
    """Compiles MODEL, runs a prompt and two tokens, and says what became of its graphs: rules that
    fired, refusals and their reasons, formats, providers, bytes. MODEL is a folder or a name on the
    Hugging Face hub; or, with random weights, a config.json or a preset such as llama-3.1-8b.
    """
    import kvpass
    from kvpass.options import ready_planner
    from kvpass.report import check_outputs, write_json

    for path in (html, json):
        check_outputs(path)
    options = {"recipe": ready_planner(recipe), "inner": inner, "strict": strict}
    loaded = load_or_make_model(model, dtype, device)
    cache = _run(loaded, tokens, options)
    shown = kvpass.explain(loaded)
    print(shown)
    if html is not None:
        shown.save_html(html)
    if folder is not None:
        shown.save(folder)
    write_json(json, "explain", given(), [_row(report) for report in shown.graphs])
    # Until here: a report counts the tensors of a cache that lives.
    del cache


def _run(model: Any, tokens: int, options: dict[str, Any]) -> Any:
    """A prompt and two steps; the cache."""
    import torch

    model.compile(backend="kvpass", options=options)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (1, tokens), generator=generator).to(model.device)
    cache = None
    with torch.no_grad():
        for _ in range(3):
            out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            ids, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
    return cache


def _row(report: Any) -> dict[str, Any]:
    return {
        "graph": report.index,
        "kind": report.kind,
        "recipe": report.recipe,
        "seconds": report.seconds,
        "capture_obstacle": report.capture_obstacle,
        "replay_obstacle": report.replay_obstacle,
        "warnings": report.warnings,
        "events": [asdict(event) for event in report.events],
        "choices": [asdict(choice) for choice in report.choices],
    }
