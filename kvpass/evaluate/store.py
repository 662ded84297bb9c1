"""A file of measurements that an interrupted run goes on with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvpass.errors import OptionError, shown

Record = dict[str, Any]


class Store:
    """JSON lines: a header, then a record for each measurement, written as soon as it is made.

    Attributes:
        records: all of them.

    Args:
        path: of the file; None: nothing is written. A problem that is in it is dropped: its recipe
            is tried again.
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
        if self._path is None:
            return
        # As JSON reads it back: lists for tuples.
        own = json.loads(json.dumps({"kvpass_eval": 1, **header}))
        try:
            lines = self._path.read_text().splitlines(True) if self._path.exists() else []
            # A line without an end was interrupted.
            found = [json.loads(line) for line in lines if line.endswith("\n")]
            if lines:
                self._compare(own, found[0] if found else None)
            self.records = [r for r in found[1:] if "problem" not in r]
            head = {**own, "about": about}
            self._path.write_text("".join(json.dumps(r) + "\n" for r in (head, *self.records)))
        except OSError as error:
            raise OptionError(f"'{path}' cannot be used: {error.strerror}.") from None
        except json.JSONDecodeError:
            self._compare(own, None)

    def add(self, record: Record) -> None:
        """Keeps a record, and appends it to the file."""
        self.records.append(record)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def done(self, **wanted: Any) -> bool:
        """Whether there is a record with these values."""
        return any(wanted.items() <= record.items() for record in self.records)

    def _compare(self, own: Mapping[str, Any], other: Any) -> None:
        if not isinstance(other, dict) or "kvpass_eval" not in other:
            raise OptionError(f"'{self._path}' is no file of an evaluation; give another name.")
        for name, value in own.items():
            if value != (found := other.get(name)):
                raise OptionError(
                    f"'{self._path}' was measured with {name}={shown(found)}, not {shown(value)}: "
                    "give another file, or the same settings, texts and model."
                )
