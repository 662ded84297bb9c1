"""The command line, ``kvpass`` or ``python -m kvpass``. One function adds each command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from kvpass.cli.bench import add_bench
from kvpass.cli.calibrate import add_calibrate, add_profile
from kvpass.cli.kernels import add_kernels
from kvpass.cli.zoo import add_zoo

_USER_ERROR = 2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(_USER_ERROR, f"{self.prog}: {message}; see {self.prog} --help.\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; ``arguments`` None are those of ``sys.argv``.

    Returns:
        The exit code: 0, 1 if a result is wrong, or 2 after an error of the user, which stderr
        names in one sentence.
    """
    parser = _Parser(prog="kvpass", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (add_bench, add_calibrate, add_kernels, add_profile, add_zoo):
        add(commands)
    options = parser.parse_args(arguments)

    # Here, since importing this file must not import torch.
    from kvpass.errors import KvpassError

    try:
        code: int = options.run(options)
    except KvpassError as error:
        print(f"kvpass: {error}", file=sys.stderr)
        return _USER_ERROR
    return code
