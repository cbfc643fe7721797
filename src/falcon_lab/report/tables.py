"""One table that prints on a terminal, as Markdown and as HTML.

A study names its columns once, each with how it finds its value in a record and how it writes it;
the records are what was measured.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import zip_longest
from typing import Any

NOTHING = "—"
"""Stands where there is no value."""

NOTE_WIDTH = 100
"""Characters of a line of notes, where a table is not wider."""

SHORT = 9
"""Characters up to which a header is never broken in HTML."""

NARROWEST = 20
"""A column is never wrapped to fewer characters."""


@dataclass(frozen=True)
class Cell:
    """A cell in parts that HTML shows in different ways.

    Attributes:
        text: the value.
        detail: what follows it in small print, as an interval.
        tag: a label that must not be overlooked, as ``lossy``.
    """

    text: str
    detail: str = ""
    tag: str = ""

    def __str__(self) -> str:
        """Join the parts into one line of plain text."""
        tag = f"({self.tag})" if self.tag else ""
        return " ".join(filter(None, (self.text, tag, self.detail)))

    def html(self) -> str:
        """Return the content of a ``<td>``."""
        tag = f'<span class="tag">{escape(self.tag)}</span>' if self.tag else ""
        detail = f" <small>{escape(self.detail)}</small>" if self.detail else ""
        return f"{escape(self.text)}{tag}{detail}"


Format = Callable[[Any], str | Cell]
"""Writes a value that is not None."""


def decimals(digits: int, *, scale: float = 1, unit: str = "") -> Format:
    """Return a format with a fixed number of digits behind the point.

    Args:
        digits: their number.
        scale: factor of the value, as 1000 for milliseconds from seconds.
        unit: stands behind the number.
    """
    return lambda value: f"{scale * value:.{digits}f}{unit}"


def percent(digits: int = 0, *, unit: str = "") -> Format:
    """Return a format that writes shares in percent; the header or ``unit`` has the sign."""
    return decimals(digits, scale=100, unit=unit)


def shares(values: Sequence[float | None]) -> str:
    """Write shares as whole percents, one after the other."""
    return " ".join(NOTHING if v is None else f"{100 * v:.0f}" for v in values) or NOTHING


def interval(found: Mapping[str, Any], unit: str = "") -> Cell:
    """Write a value and its interval: ``2.31 [2.20, 2.43]``; one prompt gives no interval.

    Args:
        found: ``ratio``, ``low`` and ``high``; the last two may be None.
        unit: stands behind the value.
    """
    low, high = found["low"], found["high"]
    around = "" if low is None or high is None else f"[{low:.2f}, {high:.2f}]"
    return Cell(f"{found['ratio']:.2f}{unit}", around)


def times(found: Mapping[str, Any]) -> Cell:
    """Write a ratio and its interval: ``2.31× [2.20, 2.43]``."""
    return interval(found, "×")


def wrap(notes: Sequence[str], width: int = NOTE_WIDTH) -> str:
    """Write sentences below each other, in lines of at most so many characters."""
    return "\n".join(textwrap.fill(note, width, break_long_words=False) for note in notes)


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        header: what stands above it.
        value: finds its value in a record: a key, an index, or a function. None is shown as a dash,
            and a ``Cell`` as it is.
        format: writes the value.
        left: flush left, as words are; the first column always is.
    """

    header: str
    value: Callable[[Any], Any] | str | int
    format: Format = str
    left: bool = False

    def cell(self, record: Any) -> Cell:
        """Write this column's value of a record."""
        value = self.value(record) if callable(self.value) else record[self.value]
        if value is not None and not isinstance(value, Cell):
            value = self.format(value)
        return value if isinstance(value, Cell) else Cell(NOTHING if value is None else value)


@dataclass(frozen=True)
class Table:
    """Records under columns.

    Attributes:
        columns: from left to right.
        records: from top to bottom, in any form that the columns' ``value`` can read.
        notes: sentences below the table.
        marked: whether a record stands out in HTML.
    """

    columns: Sequence[Column]
    records: Sequence[Any]
    notes: Sequence[str] = ()
    marked: Callable[[Any], bool] = lambda record: False

    @classmethod
    def of(
        cls, headers: Sequence[str], rows: Sequence[Sequence[Any]], notes: Sequence[str] = ()
    ) -> Table:
        """Make a table of rows whose values are in the order of the headers."""
        return cls([Column(header, place) for place, header in enumerate(headers)], rows, notes)

    def cells(self) -> list[list[Cell]]:
        """Write every record."""
        return [[column.cell(record) for column in self.columns] for record in self.records]

    def text(self, width: int | None = None) -> str:
        """Write the table as aligned plain text.

        Args:
            width: characters of a line; the widest column of words is wrapped to fit. None never
                wraps.
        """
        headers = [column.header for column in self.columns]
        rows = [[str(cell) for cell in row] for row in self.cells()]
        limits = self._limits([headers, *rows], width)
        lines = [self._line(headers, limits)]
        lines += [self._line(cells, limits) for row in rows for cells in _wrapped(row, limits)]
        ruler = max(map(len, lines))
        lines.insert(1, "─" * ruler)
        notes = wrap(self.notes, max(ruler, NOTE_WIDTH) if width is None else width)
        return "\n".join([*lines, *(["", notes] if notes else [])])

    def markdown(self) -> str:
        """Write the table as GitHub's Markdown; the notes follow as a list."""
        rules = ["---" if self._left(place) else "--:" for place in range(len(self.columns))]
        rows = [[_markdown(str(cell)) for cell in row] for row in self.cells()]
        headers = [_markdown(column.header) for column in self.columns]
        lines = [f"| {' | '.join(row)} |" for row in (headers, rules, *rows)]
        notes = [f"- {_markdown(note)}" for note in self.notes]
        return "\n".join([*lines, *([""] if notes else []), *notes])

    def html(self) -> str:
        """Write the table as HTML; everything that is shown is escaped."""
        sides = [' class="left"' if self._left(place) else "" for place in range(len(self.columns))]
        head = "".join(
            f"<th{side}>{escape(_unbroken(column.header))}</th>"
            for side, column in zip(sides, self.columns, strict=True)
        )
        lines = []
        for record, row in zip(self.records, self.cells(), strict=True):
            cells = (f"<td{side}>{cell.html()}</td>" for side, cell in zip(sides, row, strict=True))
            mark = ' class="headline"' if self.marked(record) else ""
            lines.append(f"<tr{mark}>{''.join(cells)}</tr>")
        notes = "".join(f'\n<p class="note">{escape(note)}</p>' for note in self.notes)
        return (
            f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>\n'
            + "\n".join(lines)
            + f"\n</tbody></table></div>{notes}"
        )

    __html__ = html  # a template shows it as it is
    __str__ = text

    def _left(self, place: int) -> bool:
        return place == 0 or self.columns[place].left

    def _limits(self, rows: Sequence[Sequence[str]], width: int | None) -> list[int]:
        """Return the width of every column."""
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        over = sum(widths) + 2 * (len(widths) - 1) - (width or 0)
        if width is not None and over > 0:
            words = [place for place in range(len(widths)) if self._left(place)]
            widest = max(words, key=lambda place: widths[place])
            widths[widest] = max(NARROWEST, widths[widest] - over)
        return widths

    def _line(self, cells: Sequence[str], widths: Sequence[int]) -> str:
        placed = (
            cell.ljust(width) if self._left(place) else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(placed).rstrip()


def _wrapped(row: Sequence[str], widths: Sequence[int]) -> list[tuple[str, ...]]:
    """Return the lines of a row; most have one."""
    parts = [
        [cell] if len(cell) <= width else textwrap.wrap(cell, width)
        for cell, width in zip(row, widths, strict=True)
    ]
    return list(zip_longest(*parts, fillvalue=""))


def _unbroken(header: str) -> str:
    """Keep short headers, and units with what they follow, on one line of HTML."""
    short = len(header) <= SHORT
    return header.replace(" ", "\u00a0") if short else header.replace(" %", "\u00a0%")


def _markdown(text: str) -> str:
    """Escape what Markdown would take for the end of a cell or for HTML."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
