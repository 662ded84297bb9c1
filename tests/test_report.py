"""Tables as text."""

from __future__ import annotations

from kvpass.report import Section, number


def test_table():
    section = Section("t", ["name", "ms", "x"], [["a", "10", "2"], ["bb", "not run: sorry"]], ["n"])
    assert str(section) == "t\nname  ms  x\na     10  2\nbb    not run: sorry\n  n"
    assert [number(x) for x in (1234.5, 12.34, 1.234, 0.1234)] == ["1234", "12.3", "1.23", "0.123"]
