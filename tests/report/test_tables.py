"""The one table."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from falcon_lab.report.tables import (
    NOTHING,
    Cell,
    Column,
    Table,
    decimals,
    interval,
    percent,
    shares,
    times,
)

RECORDS = [
    {"name": "plain", "speed": 10.0, "alpha": None, "words": "a b"},
    {"name": "tree", "speed": 123.456, "alpha": 0.5, "words": "c"},
]
COLUMNS = [
    Column("method", "name"),
    Column("tok/s", lambda record: record["speed"], decimals(1)),
    Column("α %", "alpha", percent(1)),
    Column("words", "words", left=True),
]


def test_words_are_flush_left_and_figures_flush_right_under_a_ruler() -> None:
    assert Table(COLUMNS, RECORDS).text().splitlines() == [
        "method  tok/s   α %  words",
        "──────────────────────────",
        "plain    10.0     —  a b",
        "tree    123.5  50.0  c",
    ]


def test_a_table_without_records_still_has_its_head() -> None:
    table = Table(COLUMNS, [])
    assert table.text().splitlines()[0].split() == ["method", "tok/s", "α", "%", "words"]
    assert table.markdown().splitlines()[0].startswith("| method |")
    assert "<tbody>" in table.html()


def test_rows_of_values_need_no_columns_of_their_own() -> None:
    lines = Table.of(("size", "ms"), [(1, "2.0"), (16, None)]).text().splitlines()
    assert [line.split() for line in lines[2:]] == [["1", "2.0"], ["16", NOTHING]]


def test_notes_stand_below_and_are_wrapped() -> None:
    note = "word " * 40
    lines = Table(COLUMNS, RECORDS, [note, "! short"]).text().splitlines()
    assert lines[4] == ""
    assert all(len(line) <= 100 for line in lines)
    assert " ".join(lines[5:-1]).split() == note.split()
    assert lines[-1] == "! short"


def test_a_narrow_terminal_wraps_the_widest_column_of_words() -> None:
    rows = [("falcon", "3", "a head on the target's features " * 3), ("sps", "11", "short")]
    columns = [Column("name", 0), Column("n", 1), Column("what it is", 2, left=True)]
    table = Table(columns, rows)
    lines = table.text(50).splitlines()
    assert max(map(len, lines)) <= 50
    assert "".join(" ".join(lines).split()).count("features") == 3
    assert lines[2].startswith("falcon   3  a head")
    assert lines[3].startswith(" " * len("falcon   3  "))  # goes on under itself
    assert len(table.text().splitlines()) == 4  # and is left alone where there is room


def test_markdown_has_a_rule_for_every_column_and_keeps_cells_apart() -> None:
    head, rules, line, *_ = Table(COLUMNS, [{**RECORDS[0], "name": "a|<b>"}]).markdown().split("\n")
    assert head == "| method | tok/s | α % | words |"
    assert rules == "| --- | --: | --: | --- |"
    assert line == "| a\\|&lt;b> | 10.0 | — | a b |"


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, str | None]] = []
        self.shown: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs).get("class")))

    def handle_data(self, data: str) -> None:
        self.shown.append(data)


def test_html_marks_the_record_that_stands_out() -> None:
    found = Tags(Table(COLUMNS, RECORDS, marked=lambda r: r["name"] == "tree").html())
    assert [mark for tag, mark in found.seen if tag == "tr"] == [None, None, "headline"]
    assert [tag for tag, _ in found.seen].count("td") == 8
    assert {"tok/s", "123.5", "50.0"} <= set(found.shown)


def test_nothing_that_is_shown_is_taken_for_markup() -> None:
    bad = "<script>alert(1)</script>"
    columns = [Column(bad, 0, lambda value: Cell(value, detail=bad, tag=bad))]
    html = Table(columns, [(bad,)], [bad]).html()
    assert "<script>" not in html
    assert html.count("&lt;script&gt;") == 5


def test_a_cell_keeps_its_parts_apart() -> None:
    cell = Cell("tree", "k=2", "lossy")
    assert str(cell) == "tree (lossy) k=2"
    assert [tag for tag, _ in Tags(cell.html()).seen] == ["span", "small"]


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (times({"ratio": 2.314, "low": 2.2, "high": 2.43}), "2.31× [2.20, 2.43]"),
        (times({"ratio": 2.314, "low": None, "high": None}), "2.31×"),
        (interval({"ratio": 2.314, "low": 2.2, "high": 2.43}), "2.31 [2.20, 2.43]"),
        (shares([0.8, None, 0.333]), "80 — 33"),
        (shares([]), NOTHING),
        (decimals(2, scale=1000, unit=" ms")(0.00123), "1.23 ms"),
    ],
)
def test_figures_are_written_alike_everywhere(shown: object, text: str) -> None:
    assert str(shown) == text
