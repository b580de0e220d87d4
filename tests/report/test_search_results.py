"""Ranked passages are shown completely and in order, as text and as a page, and their text is escaped."""

from rrl.data.passages import Passage
from rrl.report.search_results import as_text, write_page
from rrl.retrieval.retriever import Hit

HITS = [
    Hit(Passage("7", "Oslo", "A city in <b>Norway</b>. \ud800"), 1.5),
    Hit(Passage("8", "<script>alert(1)</script>", "of the north"), 0.25),
]


def test_text_has_rank_score_title_and_id() -> None:
    text = as_text(["Norway", "none"], [HITS, []])
    assert text.splitlines()[:2] == ["Norway", "  1.   1.5000  Oslo  [7]"]
    assert text.index("Oslo") < text.index("alert") and text.endswith("none\n  nothing found")
    text.encode()


def test_control_characters_of_a_passage_are_replaced() -> None:
    assert "\x1b" not in as_text(["q"], [[Hit(Passage("1", "\x1b[2J", "x\x9b"), 1)]])


def test_the_page_is_escaped_and_marks_the_words_of_the_query(tmp_path) -> None:
    write_page(tmp_path / "page.html", ["Norway & north", "none"], [HITS, []], "scann index x")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<script" not in page and "&lt;script&gt;" in page
    assert "&lt;b&gt;<mark>Norway</mark>&lt;/b&gt;" in page and "<mark>north</mark>" in page
    assert "Norway &amp; north" in page and "Nothing found." in page
    assert "A city in" in page and "<mark>of</mark>" not in page
    assert page.index("Oslo") < page.index("of the")


def test_words_are_marked_as_bm25_matches_them(tmp_path) -> None:
    hit = Hit(Passage("1", "Presidency", "The president’s office, and the city's origin."), 1)
    write_page(tmp_path / "page.html", ["the presidents of the cities and their origins"], [[hit]], "x")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    text = "The <mark>president’s</mark> office, and the <mark>city&#x27;s</mark> <mark>origin</mark>."
    assert text in page
