"""Brings the bits of a request's chunks to the prefill: ``with kvpass.cocktail.use(bits): ...``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from kvpass.cocktail.bits import ChunkBits
from kvpass.errors import OptionError, shown


class Request:
    """The bits in use, and which prompt has taken them."""

    def __init__(self, bits: ChunkBits) -> None:
        self.bits = bits
        self._taken: tuple[int, int] | None = None

    def applies(self, past: int, new: int) -> bool:
        """Whether the bits are those of ``new`` tokens behind ``past`` others: they are of every
        first prompt, and of the first one behind other tokens, whose layers may be in several
        graphs. Later ones (parts of a long answer that was looked up, say) are none of theirs."""
        return past == 0 or self._taken in (None, (past, new))

    def take(self, past: int, new: int) -> None:
        """They have been used for these tokens."""
        self._taken = (past, new)


_current: ContextVar[Request | None] = ContextVar("kvpass_chunk_bits", default=None)


@contextmanager
def use(bits: ChunkBits) -> Iterator[None]:
    """The next prompt's chunks are stored in these ``bits``; of this thread alone.

    A prompt is what a model is called with when its cache is empty, or more than 16 tokens later.
    ``generate`` with beams gives the model each sequence once per beam; so must ``bits``.

    Raises:
        OptionError: if ``bits`` is no `ChunkBits`. If it does not fit the prompt, the model's call
            raises one, before anything is changed.
    """
    if not isinstance(bits, ChunkBits):
        raise OptionError(
            f"bits={shown(bits)} is not supported; allowed: a kvpass.cocktail.ChunkBits."
        )
    token = _current.set(Request(bits))
    try:
        yield
    finally:
        _current.reset(token)


def current() -> Request | None:
    """What `use` has set."""
    return _current.get()
