"""Tests of the score command: tables and files for good input; for wrong input one line, exit code 2, and
no files."""

import dataclasses
import json
import pathlib
import subprocess

import pytest

from rrl.data.questions import load_questions
from rrl.eval.result_card import questions_fingerprint, save_card
from tests.eval.test_result_card import CARD
from tests.launching import launch

GOLD = [{"id": name, "question": f"{name}?", "answer": name.upper()} for name in ("a", "b", "c")]


def score(*flags: str) -> subprocess.CompletedProcess:
    return launch("score", *flags)


def written(file: pathlib.Path, *records: object) -> str:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


@pytest.fixture
def data(tmp_path: pathlib.Path) -> str:
    return written(tmp_path / "dev.jsonl", *GOLD)


def test_runs_with_different_cards_are_compared_with_a_note(tmp_path: pathlib.Path, data: str) -> None:
    files = []
    for name, passages in (("small", 10), ("large", 20)):
        folder = tmp_path / name
        folder.mkdir()
        files.append(written(folder / "results.jsonl", *({"id": n, "prediction": n} for n in "abc")))
        rule = "hotpotqa" if name == "small" else "squad"  # both are scored with the same rule here
        card = dataclasses.replace(
            CARD, passages=passages, corpus_sha256=str(passages) * 32, normalization=rule
        )
        save_card(folder / "card.json", card)
    found = score(f"--predictions={files[0]}", f"--data={data}", f"--against={files[1]}")
    assert found.returncode == 0, found.stderr
    assert f"not directly comparable: corpus differs: {files[0]}: 2wiki (10 passages" in found.stdout
    assert "normalisation differs" not in found.stdout


def test_predictions_are_scored_and_compared(tmp_path: pathlib.Path, data: str) -> None:
    ours = written(tmp_path / "ours.jsonl", *({"id": n, "prediction": n} for n in "cb"))
    theirs = written(tmp_path / "theirs.jsonl", *({"question": f"{n}?", "pred": "x"} for n in "abc"))
    out = tmp_path / "out"
    found = score(
        f"--predictions={ours}",
        f"--data={data}",
        "--missing=wrong",
        f"--against={theirs}",
        f"--out={out}",
        "--normalization=tiresrag-r1",
    )
    assert found.returncode == 0, found.stderr
    assert "3 questions, percent" in found.stdout
    assert f"em against {theirs}: +66.7" in found.stdout
    assert "1 questions without a prediction count as wrong" in found.stdout
    written_down = json.loads((out / "metrics.json").read_text())
    assert written_down["normalization"] == "tiresrag-r1"
    assert written_down["metrics"]["em"]["mean"] == pytest.approx(2 / 3)
    assert len((out / "scores.jsonl").read_text().splitlines()) == 3


def test_a_matching_card_is_stored_with_the_metrics(tmp_path: pathlib.Path, data: str) -> None:
    ours = written(tmp_path / "ours.jsonl", *({"id": n, "prediction": n} for n in "abc"))
    card = tmp_path / "card.json"
    save_card(card, CARD)
    flags = (f"--predictions={ours}", f"--data={data}", f"--card={card}", f"--out={tmp_path / 'out'}")
    refused = score(*flags, "--normalization=triviaqa")
    assert refused.returncode == 2 and "states squad; give that, or another card" in refused.stderr
    assert not (tmp_path / "out").exists()
    other = score(*flags)
    assert (
        other.returncode == 2
        and "are not the 1000 of the card" in other.stderr
        and not (tmp_path / "out").exists()
    )
    save_card(
        card,
        dataclasses.replace(CARD, questions=3, questions_sha256=questions_fingerprint(load_questions(data))),
    )
    assert score(*flags).returncode == 0
    assert json.loads((tmp_path / "out/metrics.json").read_text())["card"]["corpus"] == "2wiki"


def test_gold_answers_in_the_predictions_file_need_no_data(tmp_path: pathlib.Path) -> None:
    file = written(tmp_path / "all.jsonl", *({**gold, "pred": gold["answer"]} for gold in GOLD))
    found = score(f"--predictions={file}")
    assert found.returncode == 0 and "em   100.0" in found.stdout


@pytest.mark.parametrize(
    ("predictions", "flags", "words"),
    [
        ([{"id": "a", "pred": "A"}], [], "no prediction for 2 of the 3 questions"),
        (
            [{"id": "a", "pred": "A"}, {"id": "a", "pred": "B"}],
            [],
            "bad.jsonl, line 2: id: 'a' occurs twice",
        ),
        ([{"id": "a", "pred": "A"}, {"pred": "B"}], [], "bad.jsonl, line 2: id: missing"),
        ([{"id": "z", "pred": "A"}], [], "bad.jsonl, line 1: id 'z' is not among"),
        ([{"id": "a", "pred": "A"}], ["--normalization=squat"], "normalization='squat' is unknown"),
        ([{"id": "a", "pred": "A"}], ["--data=EMPTY"], "empty.jsonl, line 2: no gold answer"),
        ([{"id": "a", "pred": "A"}], ["--data=WRONG"], "wrong.jsonl, line 1: question or text"),
        ([{"id": "a", "pred": "A"}], ["--data="], "bad.jsonl, line 1: question or text"),
        ([{"id": "a", "pred": "A"}], ["--data=", "--truth=x"], "--truth holds the answers of --data"),
    ],
)
def test_wrong_input_is_refused_by_name_and_nothing_is_written(
    tmp_path: pathlib.Path, data: str, predictions: list, flags: list[str], words: str
) -> None:
    bad = written(tmp_path / "bad.jsonl", *predictions)
    empty = written(tmp_path / "empty.jsonl", GOLD[0], {**GOLD[1], "answer": " "})
    wrong = written(tmp_path / "wrong.jsonl", {"contents": "a passage"})
    named = [flag.replace("EMPTY", empty).replace("WRONG", wrong) for flag in flags]
    found = score(f"--predictions={bad}", f"--data={data}", f"--out={tmp_path / 'out'}", *named)
    assert found.returncode == 2, found.stdout
    assert found.stderr.startswith("error: ") and found.stderr.count("\n") == 1
    assert words in found.stderr
    assert not (tmp_path / "out").exists()
