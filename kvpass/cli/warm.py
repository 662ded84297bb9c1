"""``kvpass warm``: compiles ahead of the processes that serve. Imports torch only when it runs."""

from __future__ import annotations

import click

from kvpass.cli.options import loading, model_argument, recipes
from kvpass.cli.output import show


@click.command(
    short_help="compile ahead for a model, for later processes or an image",
    epilog="Example: kvpass warm Qwen/Qwen3-0.6B --recipes kivi-2bit",
)
@model_argument
@click.option("--prompt", type=click.IntRange(min=2), default=1024, help="Tokens of it.")
@recipes()
@loading
def warm(model: str, prompt: int, recipes: list[str], dtype: str, device: str) -> int:
    """Starts MODEL, a folder, a name on the Hugging Face hub, a config.json or a preset, with each
    recipe, lets it read a prompt and reply with some tokens, and does so again. Later processes
    find what that has compiled, in KVPASS_CACHE_DIR, TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR:
    copied into an image, they warm that.
    """
    from kvpass.bench.start import StartSetting, start_section, warm_starts
    from kvpass.options import ready_planner

    for name in recipes:
        ready_planner(name)
    setting = StartSetting(model, prompt, dtype, device)
    starts = list(warm_starts(setting, recipes))
    show(start_section(setting, starts))
    return int(any(start.problem for start in starts))
