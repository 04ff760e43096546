"""Studies' tables as notebooks show them: every cell, and nothing but text in it."""

from codistill.studies import catalogue
from codistill.studies.analysis import StudyTables, build_tables
from codistill.studies.statistics import Summary
from codistill.studies.tables import Table
from support.markup import Markup

EVIL = '<script>alert("1")</script>'


def test_every_cell_is_shown() -> None:
    table = Table("Errors", ("row", "n", "a"), (("DML", 3, Summary(3, 27.25, 1.5)), ("DCM", 0, None)), ("A note.",))
    html = table._repr_html_()
    assert Markup.of(html).texts == ["Errors", "row", "n", "a", "DML", "3", "27.25(1.50)", "DCM", "0", "A note."]
    assert html.count("<th ") == 3
    assert html.count("<td ") == 6
    assert html.count("text-align: right") == 6  # the headings and cells of both columns of numbers


def test_names_are_text_whatever_they_look_like() -> None:
    html = Table(EVIL, (EVIL, "b"), ((EVIL, 1.0), ('" onload="x', 2.0)), (EVIL,))._repr_html_()
    shown = Markup.of(html)
    assert "script" not in shown.tags
    assert shown.texts.count(EVIL) == 4
    assert set(shown.tags) == {"table", "caption", "thead", "tbody", "tr", "th", "td", "ul", "li"}


def test_a_table_without_notes_has_no_list() -> None:
    assert "ul" not in Markup.of(Table("Empty", ("row",), ())._repr_html_()).tags


def test_a_report_shows_its_errors_and_its_differences() -> None:
    made = build_tables(catalogue.get("demo"), {}, [41, 42])
    shown = Markup.of(made._repr_html_())
    assert shown.tags.count("caption") == 2
    assert shown.texts[0] == made.errors.title
    without = StudyTables(made.study, made.errors, Table("none", ("difference",), ()), ())
    assert Markup.of(without._repr_html_()).tags.count("caption") == 1
