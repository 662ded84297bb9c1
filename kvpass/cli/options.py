"""Options that several commands have. Imports no torch."""

from __future__ import annotations

import argparse
from typing import Any

DTYPES = ("float16", "bfloat16", "float32")
# The compute capabilities that kernels can be compiled for.
TARGETS = {"sm_80": 80, "sm_90": 90}
# What the parsers put beside the options.
_OWN = ("benchmark", "run")


def positive(text: str) -> int:
    """The type of an option that is a number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not supported; allowed: a positive number")
    return int(text)


def given(args: argparse.Namespace) -> dict[str, Any]:
    """All options of a command, for a JSON file."""
    return {name: value for name, value in vars(args).items() if name not in _OWN}
