"""``kvpass serve``: many requests at once over packed pages. Imports torch only when it runs."""

from __future__ import annotations

import logging
from importlib.util import find_spec

import click

from kvpass.cli.options import POSITIVE, loading, model_argument

# What transformers' server needs: its extra ``serving``.
_PACKAGES = ("fastapi", "openai", "pydantic", "uvicorn")


@click.command(
    short_help="serve a model to many users at once, from a packed pool",
    epilog="Example: kvpass serve Qwen/Qwen3-0.6B --recipe kivi-2bit",
)
@model_argument
@click.option("--recipe", default="kivi-4bit", help="Also kivi-2bit,group=64, or a plan's file.")
@click.option("--host", default="localhost", help="The address to listen at.")
@click.option("--port", type=POSITIVE, default=8000, help="The port to listen at.")
@loading
def serve(model: str, recipe: str, host: str, port: int, dtype: str, device: str) -> None:
    """Serves MODEL, a folder or a name on the Hugging Face hub, as transformers serve does with
    continuous batching, by an API like OpenAI's. Its keys and values are kept in packed pages.
    """
    from kvpass.errors import OptionError
    from kvpass.options import ready_planner
    from kvpass.serving.serve import check_version, serve_packed

    check_version()
    if not all(map(find_spec, _PACKAGES)):
        raise OptionError(
            "kvpass serve needs the server of transformers, which is not installed: pip install "
            "'transformers[serving]'."
        )
    planner = ready_planner(recipe)

    from transformers.cli.serve import Serve

    class PackedServe(Serve):
        """transformers' server, whose model serves packed pages before it takes a request."""

        def start_server(self) -> None:
            """Runs the server, which ends with an interrupt."""
            (loaded,) = self._model_manager.loaded_models.values()
            serve_packed(loaded.model, planner)
            click.echo(f"kvpass: {model} at http://{host}:{port}, keys and values in {recipe}")
            self.server.run()

    # What the pool holds is known with the first request.
    pool = logging.getLogger("kvpass.serving")
    pool.setLevel(logging.INFO)
    pool.addHandler(handler := logging.StreamHandler())
    handler.setFormatter(logging.Formatter("kvpass: %(message)s"))
    PackedServe(
        model, continuous_batching=True, device=device, dtype=dtype, host=host, port=port,
        non_blocking=True,
    )  # fmt: skip
