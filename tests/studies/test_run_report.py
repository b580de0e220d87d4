"""Tests of reports and sweeps: intervals, paired tests, notes on what differs, and refused input."""

import csv
import dataclasses
import json
from pathlib import Path

import pytest

from rrl.errors import UserError
from rrl.eval.comparison import comparison_rows, paired_test
from rrl.eval.comparison_tables import as_markdown, group_table, retrieval_table
from rrl.eval.evaluation_run import load_runs
from rrl.files import SaveError
from rrl.studies.report_html import most_different_questions
from rrl.studies.run_report import write_run_report
from rrl.studies.sweep import plot_sweep, sweep, values_of
from tests.eval.runs import QUESTIONS, finished
from tests.report.test_trajectories_html import Balanced

RIGHT = {question.id: question.answers[0] for question in QUESTIONS}
HOSTILE = "</script><script>alert(1)</script>"


class Page(Balanced):
    VOID = Balanced.VOID | {"img"}


def test_the_table_has_intervals_paired_tests_and_costs(tmp_path: Path) -> None:
    runs = [finished(tmp_path / "first", {"a": "Norway"}), finished(tmp_path / "second", RIGHT)]
    text = write_run_report(runs, tmp_path / "out")
    rows = list(csv.DictReader((tmp_path / "out/report.csv").open()))
    assert [float(row["em"]) for row in rows] == [0.25, 1.0]
    assert float(rows[1]["em_difference"]) == 0.75
    assert float(rows[1]["em_p"]) == 0.25  # McNemar: three coins
    assert rows[0]["em_p"] == "" and float(rows[0]["em_low"]) <= 0.25 <= float(rows[0]["em_high"])
    assert [float(row["recall"]) for row in rows] == [0.625, 0.625]
    assert "| second | models/x | 100.0 [100.0, 100.0] |" in text and "p = 0.25" in text
    assert "- corpus: wiki (100 passages, cccccccccccc)" in text and "differs" not in text
    assert "| em by kind | one hop | two hop |" in text and "| first | 50.0 | 0.0 |" in text


def test_a_run_with_other_questions_gets_its_own_row_of_question_counts(tmp_path: Path) -> None:
    runs = load_runs([finished(tmp_path / "first", RIGHT), finished(tmp_path / "other", RIGHT)])
    assert group_table(runs, "by_kind")[3:] == [("questions", "2", "2")]
    runs[1].report["by_kind"] = {
        "one_hop": {"em": 1.0, "questions": 9},
        "comparison": {"em": 0.0, "questions": 4},
    }
    table = group_table(runs, "by_kind")
    assert table[0][1:] == ("comparison", "one hop", "two hop")
    assert table[3:] == [("questions", "–", "2", "2"), ("questions of other", "4", "9", "–")]


def test_hits_by_gold_passage_and_by_answer_have_separate_fields(tmp_path: Path) -> None:
    (run,) = load_runs([finished(tmp_path / "run", RIGHT)])
    plain = comparison_rows([run])[0]
    run.report["retrieval_by_answer"] = {"hits": 0.0, "mrr": 0.0}
    row = comparison_rows([run])[0]
    assert row["hits"] == plain["hits"] > 0 and row["mrr"] == plain["mrr"] > 0
    assert (row["hits_by_answer"], row["mrr_by_answer"]) == (0.0, 0.0)
    del run.report["retrieval"]
    assert retrieval_table(comparison_rows([dataclasses.replace(run, retrieval_metrics={})])) == [
        ("run", "hits by answer", "mrr by answer"),
        ("run", "0.0", "0.0"),
    ]


def test_retrieval_metrics_have_intervals_and_a_paired_test(tmp_path: Path) -> None:
    first, second = (finished(tmp_path / name, RIGHT) for name in ("first", "second"))
    file = second / "scores.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["full_recall"] for line in lines] == [1, 0, 0, 1]
    lines[1]["full_recall"] = lines[2]["full_recall"] = 1.0
    lines[3]["full_recall"] = None  # no gold passage: left out of both means and of the test
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    runs = load_runs([second, first])
    test = paired_test(*runs, "full_recall")
    assert test is not None and (test.better, test.worse, test.same) == (0, 2, 1)
    assert test.p == 0.5  # McNemar: two coins
    row = comparison_rows(runs)[1]
    assert (row["full_recall_low"], row["full_recall_high"]) == (0.0, 1.0)
    table = retrieval_table(comparison_rows(runs))
    assert table[0][-1] == "full recall against the first" and table[2][-1].endswith("p = 0.5")
    assert table[2][2] == "50.0 [0.0, 100.0]"
    test = paired_test(*reversed(runs), "full_recall")  # the same question lacks a value on the other side
    assert test is not None and (test.better, test.worse, test.same) == (2, 0, 1)


def test_tokens_are_reported_by_role(tmp_path: Path) -> None:
    text = write_run_report([finished(tmp_path / "run", RIGHT)], tmp_path / "out")
    head = "| per question | searches | turns | tokens | prompt tokens | environment tokens |"
    assert head in text and "\n| run | 1.00 | " in text


def test_different_corpora_are_noted_and_different_questions_get_no_paired_test(tmp_path: Path) -> None:
    first = finished(tmp_path / "first", RIGHT)
    other = finished(tmp_path / "other", {}, corpus_sha256="e" * 64, questions_sha256="f" * 64)
    text = write_run_report([first, other], tmp_path / "out")
    assert "| other \\* |" in text and "not directly comparable with the first row" in text
    assert (
        "- corpus differs: first: wiki (100 passages, cccccccccccc); other: wiki (100 passages, eeeeeeeeeeee)"
        in text
    )
    assert "not directly comparable with the first row" in (tmp_path / "out/report.html").read_text()
    runs = load_runs([first, other])
    assert paired_test(*runs, "em") is None and "em_p" not in comparison_rows(runs)[1]


def test_recall_is_tested_only_if_the_gold_passages_are_the_same(tmp_path: Path) -> None:
    first = finished(tmp_path / "first", RIGHT, gold_sha256="a" * 64)
    other = finished(tmp_path / "other", RIGHT, gold_sha256="b" * 64)
    older = finished(tmp_path / "older", RIGHT)
    runs = load_runs([first, other, older])
    assert paired_test(runs[0], runs[1], "recall") is None and paired_test(runs[0], runs[1], "em") is not None
    assert paired_test(runs[0], runs[2], "recall") is not None
    assert "gold passages differs: first: aaaaaaaaaaaa; other: bbbbbbbbbbbb" in as_markdown(
        runs, comparison_rows(runs)
    )


def test_failed_searches_and_missing_predictions_are_noted_for_each_run(tmp_path: Path) -> None:
    first, other = finished(tmp_path / "first", RIGHT), finished(tmp_path / "other", {})
    found = json.loads((other / "metrics.json").read_text())
    (other / "metrics.json").write_text(json.dumps(found | {"searches_failed": 1100, "missing": 2}))
    runs = load_runs([first, other])
    text, rows = as_markdown(runs, comparison_rows(runs)), comparison_rows(runs)
    assert "| other \\* |" in text and "| first |" in text
    assert "- other: 1,100 searches failed and returned no passages" in text
    assert "- other: 2 questions without a prediction count as wrong" in text
    assert [(row["searches_failed"], row["missing"], row["comparable"]) for row in rows] == [
        (0, 0, True),
        (1100, 2, False),
    ]


def test_a_search_service_with_unknown_corpus_is_noted(tmp_path: Path) -> None:
    unknown = {"corpus": "http://localhost:1", "corpus_sha256": "", "passages": 0}
    folders = [finished(tmp_path / name, RIGHT, **unknown) for name in ("first", "other")]
    runs = load_runs(folders)
    text = as_markdown(runs, comparison_rows(runs))
    assert "- corpus: http://localhost:1 (the search service does not identify its corpus)" in text
    assert "- corpus unknown for first, other: the search service does not identify its corpus, so it" in text
    assert "corpus unknown" not in as_markdown(runs[:1], comparison_rows(runs[:1]))


def test_the_page_is_valid_html_escapes_text_and_shows_disagreements_first(tmp_path: Path) -> None:
    runs = [finished(tmp_path / HOSTILE[2:8], RIGHT), finished(tmp_path / "other", RIGHT | {"c": HOSTILE})]
    training = tmp_path / "training"
    training.mkdir()
    (training / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": s, "eval/em": s / 9}) + "\n" for s in range(3))
    )
    write_run_report([*runs, training], tmp_path / "out", title=HOSTILE)
    text = (tmp_path / "out/report.html").read_text()
    parser = Page()
    parser.feed(text)
    parser.close()
    assert not parser.open and text.count("<script>") == 1 and "alert(1)</script>" not in text
    assert [attrs["src"][:22] for tag, attrs in parser.tags if tag == "img"] == ["data:image/png;base64,"]
    assert (
        "default-src 'none'" in text
        and "//" not in text.replace("// ", "").replace("base64,", "").split("<body")[0]
    )
    assert [question.id for question in most_different_questions(load_runs(runs), 2)] == ["c", "a"]
    slots = [attrs for _, attrs in parser.tags if attrs.get("class") == "slot"]
    assert [slot["data-agreement"] for slot in slots] == ["some right", "all right", "all right", "all right"]
    assert text.count("<article>") == 8


def test_a_folder_without_a_finished_run_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    run = finished(tmp_path / "run", RIGHT)
    unfinished = finished(tmp_path / "unfinished", RIGHT)
    (unfinished / "metrics.json").unlink()
    damaged = finished(tmp_path / "damaged", RIGHT)
    (damaged / "metrics.json").write_text("{")
    bare = finished(tmp_path / "bare", RIGHT)
    (bare / "metrics.json").write_text('{"metrics": {}}')
    cases = [
        ([bare], "bare: its metrics.json has no result card"),
        ([], "no run: give the folder"),
        ([run, run], "is given twice"),
        ([run, unfinished], r"unfinished: not finished \(4 questions are answered\)"),
        ([run, damaged], "damaged: its metrics.json or scores.jsonl is damaged"),
        ([run, tmp_path / "none"], "none: not an evaluation"),
    ]
    for folders, words in cases:
        with pytest.raises(UserError, match=words):
            write_run_report(folders, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_missing_or_reordered_answers_and_scores_are_refused_by_name(tmp_path: Path) -> None:
    run, cut, short, turned = (finished(tmp_path / name, RIGHT) for name in ("run", "cut", "short", "turned"))
    for folder, name in ((cut, "results.jsonl"), (short, "scores.jsonl")):
        lines = (folder / name).read_text().splitlines(keepends=True)
        (folder / name).write_text("".join(lines[:-1]))
    lines = (turned / "scores.jsonl").read_text().splitlines(keepends=True)
    (turned / "scores.jsonl").write_text("".join(reversed(lines)))
    for folder, words in (
        (cut, "run .*cut: results.jsonl has no answer to the question 'a'"),
        (short, "run .*short: scores.jsonl has 3 lines for 4 questions"),
        (turned, "the scores.jsonl of the runs run and turned are in different orders"),
    ):
        with pytest.raises(UserError, match=words):
            write_run_report([run, folder], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_scored_predictions_appear_in_the_table_without_trajectories(tmp_path: Path) -> None:
    run, scored = (finished(tmp_path / name, RIGHT) for name in ("run", "scored"))
    (scored / "questions.jsonl").unlink()
    (scored / "results.jsonl").unlink()
    assert "| scored | models/x | 100.0" in write_run_report([run, scored], tmp_path / "out")
    assert "Nothing to show side by side" in (tmp_path / "out/report.html").read_text()


def test_the_training_curves_of_an_evaluated_policy_are_drawn(tmp_path: Path) -> None:
    (tmp_path / "training").mkdir()
    (tmp_path / "training/metrics.jsonl").write_text('{"step": 1, "eval/em": 0.5}\n')
    run = finished(tmp_path / "run", RIGHT, model=str(tmp_path / "training/policy"))
    write_run_report([run], tmp_path / "out")
    assert "data:image/png" in (tmp_path / "out/report.html").read_text()


def test_a_sweep_evaluates_each_value_and_plots_the_results(tmp_path: Path) -> None:
    asked = []

    def evaluate(name: str, value: str, folder: Path) -> None:
        asked.append((name, value))
        if not folder.exists():
            finished(folder, dict(list(RIGHT.items())[: int(value)]), top_k=int(value))

    text = sweep("rollout.top_k", ["1", "2", "4"], evaluate, tmp_path / "out")
    assert asked == [("rollout.top_k", value) for value in ("1", "2", "4")]
    assert "passages of a search differs: 1: 1; 2: 2; 4: 4" in text
    rows = list(csv.DictReader((tmp_path / "out/sweep.csv").open()))
    assert [(row["rollout.top_k"], float(row["em"])) for row in rows] == [("1", 0.25), ("2", 0.5), ("4", 1.0)]
    assert (tmp_path / "out/sweep.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="two of them would share one folder"):
        sweep("policy", ["a/b", "a_b"], evaluate, tmp_path / "out")


@pytest.mark.parametrize("name", ["sweep.md", "sweep.csv", "sweep.png"])
def test_a_folder_at_the_path_of_a_sweep_file_is_a_save_error(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(SaveError, match=rf"{name} could not be saved: a folder is in its place"):
        sweep("rollout.top_k", ["1"], lambda name, value, folder: finished(folder, RIGHT), tmp_path)


def test_a_folder_at_the_path_of_the_report_page_is_a_save_error(tmp_path: Path) -> None:
    (tmp_path / "out/report.html").mkdir(parents=True)
    with pytest.raises(SaveError, match=r"report\.html could not be saved: a folder is in its place"):
        write_run_report([finished(tmp_path / "run", RIGHT)], tmp_path / "out")


def test_the_sweep_plot_has_each_metric_and_each_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = load_runs([finished(tmp_path / name, RIGHT) for name in ("naive", "react")])
    drawn = []
    monkeypatch.setattr("rrl.studies.sweep.save_figure", lambda figure, _: drawn.append(figure))
    plot_sweep("method", ["naive", "react"], runs, comparison_rows(runs), tmp_path / "x.png")
    axes = [axis for axis in drawn[0].axes if axis.axison]
    titles = [axis.get_title(loc="left") for axis in axes]
    assert titles[0] == "percent" and "recall of gold passages" in titles
    assert "tokens written per right answer" in titles
    assert [text.get_text() for text in axes[0].get_legend().get_texts()] == ["em", "f1", "cem"]
    assert [tick.get_text() for tick in axes[0].get_xticklabels()] == ["naive", "react"]


@pytest.mark.parametrize(
    ("text", "values"),
    [("1,2,5", ["1", "2", "5"]), ("1-3,8", ["1", "2", "3", "8"]), ("scann, bm25", ["scann", "bm25"])],
)
def test_values_are_a_list_or_a_range(text: str, values: list[str]) -> None:
    assert values_of(text) == values


@pytest.mark.parametrize("text", ["", "1,1", "1-3,2"])
def test_empty_or_duplicate_values_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=f"values='{text}' must list"):
        values_of(text)


def test_a_loaded_run_returns_its_questions_and_trajectories(tmp_path: Path) -> None:
    (run,) = load_runs([finished(tmp_path / "run", RIGHT)])
    assert run.questions() == QUESTIONS
    found = run.trajectories(["b"])
    assert list(found) == ["b"] and found["b"].metrics["em"] == 1.0
    assert dataclasses.asdict(run.card)["method"] == "run"
