"""``kvpass serve``: many requests at once over packed pages. Imports torch only when it runs."""

from __future__ import annotations

import click

from kvpass.cli.options import POSITIVE, loading, model_argument

# What transformers' server needs, and /metrics.
_PACKAGES = ("fastapi", "openai", "prometheus_client", "pydantic", "uvicorn")


@click.command(
    short_help="serve a model to many clients at once, from a packed pool",
    epilog="Example: kvpass serve Qwen/Qwen3-0.6B --recipe kivi-2bit",
)
@model_argument
@click.option("--recipe", default="kivi-4bit", help="Also kivi-2bit,group=64, or a plan's file.")
@click.option("--host", default="localhost", help="The address to listen at.")
@click.option("--port", type=POSITIVE, default=8000, help="The port to listen at.")
@click.option("--pages", type=POSITIVE, help="Of the pool; by default what the memory holds.")
@click.option("--requests", type=POSITIVE, help="The most that are answered at once.")
@click.option("--batch-tokens", type=POSITIVE, help="The most that the model reads in a step.")
@click.option(
    "--offload",
    type=click.FloatRange(0.0),
    default=0.0,
    help="GiB of the host's memory for requests that wait for room in the pool.",
)
@loading
def serve(
    model: str,
    recipe: str,
    host: str,
    port: int,
    pages: int | None,
    requests: int | None,
    batch_tokens: int | None,
    offload: float,
    dtype: str,
    device: str,
) -> None:
    """Serves MODEL, a folder or a name on the Hugging Face hub, with an API like OpenAI's, as
    transformers serve does with continuous batching. Keys and values are kept in packed pages;
    /metrics tells what they hold.
    """
    from kvpass.cli.models import load_model
    from kvpass.errors import check_installed
    from kvpass.options import ready_planner
    from kvpass.serving.serve import check_version

    check_version()
    check_installed("kvpass serve", "transformers[serving]", *_PACKAGES, extra="serve")
    planner = ready_planner(recipe)

    from kvpass.serving.server import PackedServer

    asked = {
        "num_blocks": pages, "max_requests_per_batch": requests, "max_batch_tokens": batch_tokens,
        "cpu_offload_space": offload,
    }  # fmt: skip
    server = PackedServer(
        model, lambda: load_model(model, dtype, device), planner,
        host=host, port=port, **{name: n for name, n in asked.items() if n is not None},
    )  # fmt: skip
    click.echo(
        f"kvpass: {model} in {recipe} at http://{host}:{server.port}; {server.summary}", err=True
    )
    server.run()
