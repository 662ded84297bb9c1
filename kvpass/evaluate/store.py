"""A file of measurements that an interrupted run goes on with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvpass.errors import OptionError, shown

FORMAT = 1
Record = dict[str, Any]


class Store:
    """JSON lines: a header, then a record for each measurement, written as soon as it is made.

    Attributes:
        records: all of them.

    Args:
        path: of the file; None: nothing is written. A recipe's problem in it is dropped: it is
            tried again.
        header: what has to be the same for records to be comparable.
        about: written beside the header and not compared, the machine say.

    Raises:
        OptionError: if the file is of another run, or cannot be read or written.
    """

    def __init__(
        self, path: str | None, header: Mapping[str, Any], about: Mapping[str, Any]
    ) -> None:
        self.records: list[Record] = []
        self._path = None if path is None else Path(path)
        # As JSON reads it back: lists for tuples.
        own = json.loads(json.dumps({"kvpass_eval": FORMAT, **header}))
        if self._path is None:
            return
        try:
            lines = self._path.read_text().splitlines(True) if self._path.exists() else []
            if lines:
                _compare(path, own, json.loads(lines[0]))
                # A line without an end was interrupted.
                whole = [json.loads(line) for line in lines[1:] if line.endswith("\n")]
                self.records = [r for r in whole if "problem" not in r]
            head = {**own, "about": about}
            written = "".join(json.dumps(r) + "\n" for r in (head, *self.records))
            self._path.write_text(written)
        except OSError as error:
            raise OptionError(f"'{path}' cannot be used: {error.strerror}.") from None
        except json.JSONDecodeError:
            raise _strange(path) from None

    def add(self, record: Record) -> None:
        """Keeps a record, and appends it to the file."""
        self.records.append(record)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def done(self, recipe: str, task: str, **more: Any) -> bool:
        """Whether there is a record of it."""
        wanted = {"recipe": recipe, "task": task, **more}
        return any(wanted.items() <= record.items() for record in self._plain())

    def _plain(self) -> list[Record]:
        keys = ("recipe", "task", "seed", "length")
        return [{k: record[k] for k in keys if k in record} for record in self.records]


def _compare(path: str | None, own: Mapping[str, Any], other: Any) -> None:
    if not isinstance(other, dict) or "kvpass_eval" not in other:
        raise _strange(path)
    for name, value in own.items():
        found = other.get(name)
        if isinstance(value, dict) and isinstance(found, dict):
            _compare(path, value, {"kvpass_eval": FORMAT, **found})
        elif value != found:
            raise OptionError(
                f"'{path}' was measured with {name}={shown(found)}, not {shown(value)}: give "
                "another file, or the same settings, texts and model."
            )


def _strange(path: str | None) -> OptionError:
    return OptionError(f"'{path}' is no file of an evaluation; give another name.")
