"""The command line's answer to mistakes."""

from __future__ import annotations

from kvpass.cli import main


def failure(capsys, *arguments: str) -> str:
    """The text of ``kvpass`` on stderr before it exits with 2: one line, and nothing on stdout."""
    code = main(arguments)
    said = capsys.readouterr()
    assert code == 2
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err.strip()
