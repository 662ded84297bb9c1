"""Brings the bits of a request's chunks to the prefill: ``with kvpass.cocktail.use(bits): ...``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from kvpass.cocktail.bits import ChunkBits
from kvpass.errors import check


@dataclass
class Request:
    """The bits in use, and the prompt that has used them: tokens before it, and its own."""

    bits: ChunkBits
    used: tuple[int, int] | None = None


_current: ContextVar[Request | None] = ContextVar("kvpass_chunk_bits", default=None)


@contextmanager
def use(bits: ChunkBits) -> Iterator[None]:
    """Stores the next prompt's chunks in these ``bits``; in this thread alone.

    A prompt is what a model is called with when its cache is empty, or more than 16 tokens later.
    ``generate`` with beams gives the model each sequence once per beam; so must ``bits``.

    Raises:
        OptionError: if ``bits`` is no `ChunkBits`. If it does not fit the prompt, the model's call
            raises one, before anything is changed.
    """
    check("bits", bits, isinstance(bits, ChunkBits), "a kvpass.cocktail.ChunkBits")
    token = _current.set(Request(bits))
    try:
        yield
    finally:
        _current.reset(token)


def request_for(past: int, new: int) -> Request | None:
    """What `use` has set, if it is for ``new`` tokens behind ``past`` others: for every first
    prompt, and for the first one behind other tokens, whose layers may be in several graphs; not
    for later ones (parts of a long answer that was looked up, say)."""
    request = _current.get()
    if request is None or (past and request.used not in (None, (past, new))):
        return None
    return request
