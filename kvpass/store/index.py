"""The index of a folder of saved caches: which of them begin as a text does."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvpass.errors import OptionError
from kvpass.store.identity import Identity

# The name of the file, with another number for other tables.
INDEX = "index-1.sqlite"
# Tokens that have a hash, which stands for all tokens before them too.
GROUP = 64
# Seconds that a process waits while another one writes.
_PATIENCE = 60
_TABLES = """
CREATE TABLE IF NOT EXISTS caches (
    name TEXT PRIMARY KEY, tokens BLOB, croppable INTEGER, bytes INTEGER, plain INTEGER,
    used REAL, seconds REAL);
CREATE TABLE IF NOT EXISTS groups (hash BLOB, name TEXT, number INTEGER);
CREATE INDEX IF NOT EXISTS by_hash ON groups (hash);
CREATE INDEX IF NOT EXISTS by_name ON groups (name);
"""


@dataclass(frozen=True)
class Entry:
    """A saved cache of one sequence.

    Attributes:
        name: of its file.
        tokens: int32 ``[T]``.
        croppable: whether its first tokens are of use without the others.
        seconds: that a token took to compute, 0 if that is not known.
    """

    name: str
    tokens: Tensor
    croppable: bool
    seconds: float = 0.0

    def common(self, tokens: Tensor) -> int:
        """How many first tokens it has in common with ``tokens``, if these are of use."""
        shorter = min(self.tokens.numel(), tokens.numel())
        differ = (self.tokens[:shorter] != tokens[:shorter]).nonzero()
        same = int(differ[0]) if len(differ) else shorter
        return same if self.croppable or same == self.tokens.numel() else 0


def name_of(identity: Identity, tokens: Tensor) -> str:
    """The name of the file of a cache of ``tokens``, int32 ``[T]``."""
    return hashlib.sha256(_seed(identity) + tokens.numpy().tobytes()).hexdigest()


def _seed(identity: Identity) -> bytes:
    return hashlib.sha256(json.dumps(asdict(identity)).encode()).digest()


def _hashes(identity: Identity, tokens: Tensor) -> list[bytes]:
    """The hash of each whole group, of it and of all before it."""
    found, last = [], _seed(identity)
    for group in tokens[: tokens.numel() // GROUP * GROUP].view(-1, GROUP):
        last = hashlib.sha256(last + group.numpy().tobytes()).digest()
        found.append(last)
    return found


class Index:
    """A database of SQLite, which processes share; it can be made anew from the files.

    Raises:
        OptionError: from any method, if it cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def make(self) -> None:
        """Makes the tables; anew, and empty, if the file is damaged."""
        try:
            self.sizes()
        except OptionError as error:
            if isinstance(error.__cause__, sqlite3.OperationalError):
                raise
            self._path.unlink()
            self.sizes()

    def best(self, identity: Identity, tokens: Tensor) -> tuple[Entry, int] | None:
        """The entry that has most of the first ``tokens``, int32 ``[T]``, for use, and how many; of
        several the one that is cropped least."""
        hashes = _hashes(identity, tokens)
        marks = ",".join("?" * len(hashes))
        with self._open() as database:
            rows = database.execute(
                f"SELECT name, MAX(number) AS last FROM groups WHERE hash IN ({marks}) "
                "GROUP BY name ORDER BY last DESC, (SELECT LENGTH(tokens) FROM caches WHERE "
                "caches.name = groups.name)",
                hashes,
            ).fetchall()
            best: tuple[Entry, int] | None = None
            for name, last in rows:
                if best is not None and best[1] >= (last + 1) * GROUP:
                    break
                entry = _entry(database, name)
                if (common := entry.common(tokens)) and (best is None or common > best[1]):
                    best = entry, common
        return best

    def add(self, entry: Entry, identity: Identity, size: int, plain: int) -> None:
        """Adds an entry, or replaces it; its file has ``size`` bytes, and would have ``plain`` ones
        without compression."""
        blob = entry.tokens.numpy().tobytes()
        row = (entry.name, blob, entry.croppable, size, plain, time.time(), entry.seconds)
        groups = [(h, entry.name, i) for i, h in enumerate(_hashes(identity, entry.tokens), 1)]
        with self._open() as database:
            database.execute("DELETE FROM groups WHERE name = ?", (entry.name,))
            database.execute("INSERT OR REPLACE INTO caches VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            database.executemany("INSERT INTO groups VALUES (?, ?, ?)", groups)

    def remove(self, names: Sequence[str]) -> None:
        """Removes entries, if they are there."""
        with self._open() as database:
            for table in ("caches", "groups"):
                database.executemany(f"DELETE FROM {table} WHERE name = ?", [(n,) for n in names])

    def touch(self, name: str) -> None:
        """Marks an entry as the last used."""
        with self._open() as database:
            database.execute("UPDATE caches SET used = ? WHERE name = ?", (time.time(), name))

    def totals(self) -> tuple[int, int, int]:
        """How many entries there are, the bytes of their files, and those without compression."""
        query = "SELECT COUNT(*), COALESCE(SUM(bytes), 0), COALESCE(SUM(plain), 0) FROM caches"
        with self._open() as database:
            files, size, plain = database.execute(query).fetchone()
        return files, size, plain

    def sizes(self) -> list[tuple[str, int]]:
        """Names and bytes of all entries, those used longest ago first."""
        with self._open() as database:
            return database.execute("SELECT name, bytes FROM caches ORDER BY used").fetchall()

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """A transaction: all of what is done within is done, or nothing."""
        try:
            with closing(sqlite3.connect(self._path, timeout=_PATIENCE)) as database:
                # After a power failure it may have to be made anew.
                database.execute("PRAGMA synchronous = OFF")
                database.executescript(_TABLES)
                with database:
                    yield database
        except sqlite3.Error as error:
            raise OptionError(f"The index '{self._path}' cannot be used: {error}.") from error


def _entry(database: sqlite3.Connection, name: str) -> Entry:
    query = "SELECT tokens, croppable, seconds FROM caches WHERE name = ?"
    blob, croppable, seconds = database.execute(query, (name,)).fetchone()
    tokens = torch.frombuffer(bytearray(blob), dtype=torch.int32)
    return Entry(name, tokens, bool(croppable), seconds)
