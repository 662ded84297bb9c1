"""The command line, ``kvpass`` or ``python -m kvpass``: a file for each command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from kvpass.cli import bench, calibrate, estimate, evaluate, explain, kernels, run, serve, warm, zoo

_USER_ERROR = 2
_INTERRUPTED = 130


@click.group(
    no_args_is_help=False, context_settings={"show_default": True, "max_content_width": 100}
)
@click.option("--debug", is_flag=True, help="Show where an error comes from.")
@click.pass_context
def command_line(context: click.Context, debug: bool) -> None:
    """KV caches of Hugging Face models in 2 to 4 bits."""
    context.obj["debug"] = debug


for command in (
    bench.bench,
    calibrate.calibrate,
    estimate.estimate,
    evaluate.evaluate,
    explain.explain,
    kernels.kernels,
    calibrate.profile,
    run.run,
    serve.serve,
    warm.warm,
    zoo.zoo,
):
    command_line.add_command(command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; ``arguments`` None are those of ``sys.argv``.

    Returns:
        The exit code: 0, 1 if a result is wrong, 2 after an error of the user, which stderr names
        in one sentence, or 130 if it was interrupted.
    """
    shared = {"debug": False}
    try:
        code = command_line.main(arguments, prog_name="kvpass", obj=shared, standalone_mode=False)
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else "kvpass"
        message = " ".join(error.format_message().split()).rstrip(".")
        print(f"{path}: {message}; see {path} --help.", file=sys.stderr)
        return _USER_ERROR
    except click.Abort:
        return _INTERRUPTED
    except Exception as error:
        # Here, since importing this file must not import torch.
        from kvpass.errors import KvpassError

        if shared["debug"] or not isinstance(error, KvpassError):
            raise
        print(f"kvpass: {error}", file=sys.stderr)
        return _USER_ERROR
    return code or 0
