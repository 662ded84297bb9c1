"""The command line. Commands import torch only when they run, so that ``--help`` is quick."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kvpass.bench.command import add_bench


def parser() -> argparse.ArgumentParser:
    """The parser of ``kvpass``. Every command sets ``run``: arguments in, exit code out."""
    top = argparse.ArgumentParser(prog="kvpass", description="KV caches in 2 to 4 bits.")
    commands = top.add_subparsers(required=True, metavar="command")
    add_bench(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: arguments; None: those of the process.

    Returns:
        The exit code: 0, 1 if a result is wrong, 2 after a mistake of the user's, which is told
        in one sentence on stderr.
    """
    args = parser().parse_args(argv)
    from kvpass.errors import KvpassError

    try:
        code: int = args.run(args)
    except KvpassError as error:
        print(f"kvpass: {error}", file=sys.stderr)
        return 2
    return code
