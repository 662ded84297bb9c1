"""What commands print. Imports no torch."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text


def show(section: object) -> None:
    """Prints a table of `kvpass.bench.report.Section`: plain where the output is no terminal."""
    title, header, *rows = str(section).split("\n")
    text = Text(title, style="bold")
    text.append(f"\n{header}", style="not bold cyan")
    for row in rows:
        # Notes are indented.
        style = "red" if "WRONG" in row else "dim" if row.startswith("  ") else ""
        text.append(f"\n{row}", style=f"not bold {style}")
    # A table is read by its columns: the terminal may cut or wrap it, nobody else.
    Console(soft_wrap=True, highlight=False).print(text)
