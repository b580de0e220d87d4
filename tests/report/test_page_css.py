"""Every page fits the window of a laptop and of a phone, with any content."""

import dataclasses
import json
from pathlib import Path

import pytest

from rrl.data.passages import Passage
from rrl.data.questions import Question
from rrl.recipes.r2ag import R2AG
from rrl.report.article import HELD_OUT, UNUSED
from rrl.report.search_results import write_page
from rrl.report.trajectories_html import write_html
from rrl.report.trees_html import write_trees
from rrl.retrieval.retriever import Hit
from rrl.studies.run_report import write_run_report
from tests.eval.fakes import malformed, spouse, winter
from tests.eval.runs import finished
from tests.report.browser import BROWSER, sticking_out, title_of

LONG = "Donaudampfschifffahrtsgesellschaft" * 5
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="no Chromium here")]


def report(folder: Path) -> Path:
    runs = [folder / name for name in ("first", "second_" + LONG[:120], "third")]
    for run in runs:
        finished(run, {"a": "Norway"}, model="models/" + LONG)
    (folder / "run").mkdir()
    (folder / "run" / "metrics.jsonl").write_text('{"step": 1, "eval/em": 0.5}\n')
    write_run_report([*runs, folder / "run"], folder / "report", title="Runs of " + LONG)
    return folder / "report" / "report.html"


def long_question() -> Question:
    return Question(LONG, f"Who owned {LONG}?", (LONG,), "kind_" + LONG[:60], ("Oslo", LONG))


def trajectories(folder: Path) -> Path:
    odd = dataclasses.replace(spouse(), question=long_question(), answer=LONG, metrics={LONG[:50]: 0.5})
    done = [winter(), odd, malformed()]
    write_html(done, folder / "page.html", "Run " + LONG, sources=[HELD_OUT, UNUSED, UNUSED])
    return folder / "page.html"


def trees(folder: Path) -> Path:
    done = [dataclasses.replace(winter(), question=long_question(), answer=LONG)]
    write_trees(done, R2AG(), folder / "page.html", "Trees of " + LONG)
    return folder / "page.html"


def found(folder: Path) -> Path:
    hit = Hit(Passage(LONG, LONG, f"Text https://example.org/{LONG}"), 1.5)
    write_page(folder / "page.html", ["Who owned " + LONG], [[hit]], "bm25 index /data/" + LONG)
    return folder / "page.html"


@pytest.mark.parametrize("written", [report, trajectories, trees, found])
def test_a_page_fits_1300_and_400_pixels(written, tmp_path):
    page = written(tmp_path).read_text(encoding="utf-8")
    assert sticking_out(page, (1300, 400), tmp_path / "browser") == [[0, []], [0, []]]


HEIGHTS = """<script>onload = () => document.title = JSON.stringify(
  [...document.querySelectorAll("nav a")].map(link => [link.offsetHeight, link.querySelector("small").offsetHeight]));</script>"""


def test_a_question_of_many_words_does_not_fill_the_list(tmp_path):
    long = dataclasses.replace(winter(), question=Question("q", "Read this list. " * 500, ("yes",)))
    write_html([winter(), long], tmp_path / "page.html", "Run")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    (_, (height, small)) = json.loads(title_of(page + HEIGHTS, tmp_path / "browser"))
    assert height < 150 and small > 0
