"""What a command says: lines and tables for people, or one JSON object for programs.

Owns standard output and standard error of the command line. With ``json`` the one object is alone on
standard output and everything for people goes to standard error; else people have standard output.
On a terminal tables are drawn by rich; in a pipe they are plain text, aligned. Does not own what is
said.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import msgspec

Row = Sequence[str]


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """A table of texts. Columns whose name starts with ``>`` are aligned to the right."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[Row]
    note: str = ""


class Screen:
    """Where one command prints."""

    def __init__(self, *, json: bool) -> None:
        self.json = json
        self._people = sys.stderr if json else sys.stdout

    def line(self, text: str = "") -> None:
        """A line for people."""
        print(text, file=self._people, flush=True)

    def table(self, table: Table) -> None:
        """A table for people."""
        if self._people.isatty():
            self._draw(table)
            return
        for text in plain(table):
            self.line(text)
        self.line()

    def result(self, data: dict[str, Any]) -> None:
        """The object for programs; nothing unless ``json`` was asked for."""
        if self.json:
            text = msgspec.json.encode(data).decode()
            print(text, file=sys.stdout, flush=True)

    def _draw(self, table: Table) -> None:
        from rich import box
        from rich.console import Console
        from rich.table import Table as Drawn
        from rich.text import Text

        drawn = Drawn(
            title=table.title,
            title_justify="left",
            box=box.SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
        )
        for name in table.columns:
            right = name.startswith(">")
            drawn.add_column(name.lstrip(">"), justify="right" if right else "left", no_wrap=right)
        for row in table.rows:
            drawn.add_row(*(Text(cell) for cell in row))
        console = Console(file=self._people)
        console.print(drawn)
        if table.note:
            console.print(Text(table.note, style="dim"))
        console.print()


def plain(table: Table) -> list[str]:
    """The lines of a table as plain text."""
    names = tuple(name.lstrip(">") for name in table.columns)
    widths = [max(map(len, column)) for column in zip(names, *table.rows, strict=True)]
    right = [name.startswith(">") for name in table.columns]
    lines = [table.title] if table.title else []
    lines += ["  " + _aligned(row, widths, right) for row in (names, *table.rows)]
    return lines + [f"  {line}" for line in table.note.splitlines()]


def _aligned(row: Row, widths: list[int], right: list[bool]) -> str:
    cells = (
        cell.rjust(width) if at_right else cell.ljust(width)
        for cell, width, at_right in zip(row, widths, right, strict=True)
    )
    return "  ".join(cells).rstrip()
