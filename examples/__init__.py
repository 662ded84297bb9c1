"""Runnable examples; each has a `main`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import kvpass


@contextmanager
def one_sentence() -> Iterator[None]:
    """Ends the program with what kvpass has to say of a bad argument, and no traceback."""
    try:
        yield
    except kvpass.KvpassError as error:
        sys.exit(str(error))
