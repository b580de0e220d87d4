"""The identity and the result card of an evaluation hold the number formats of its models' matrix products."""

import json
from pathlib import Path

import pytest

from rrl.errors import UserError
from rrl.eval import evaluate
from rrl.eval.dataset import Dataset
from rrl.eval.evaluation_run import load_run
from rrl.eval.judging import verdicts_file
from rrl.eval.result_card import differences
from rrl.eval.run_identity import identity_of, make_result_card
from rrl.eval.settings import EvaluationSettings
from rrl.eval.timing import append_timing, read_timing
from rrl.models.cpu.packed import supports_format
from rrl.runs.launcher import load_config
from tests.eval.runs import QUESTIONS

DATA = Dataset("four", QUESTIONS, corpus_sha256="c" * 64)
R2AG = "configs/eval.py:method=r2ag,reader=assets/miniwiki-reader"
JUDGED = "configs/eval.py:method=direct,judge=assets/miniwiki-judge"


def settings(arguments: str, *fields: str) -> EvaluationSettings:
    return EvaluationSettings.parse(load_config(arguments, fields))


def test_the_readers_number_format_is_part_of_the_identity_unless_it_is_auto() -> None:
    before, after = (identity_of(settings(R2AG, *f), DATA) for f in ((), ("reader_rollout.weights=int8",)))
    assert "reader_weights" not in before  # folders of older versions continue
    assert after == before | {"reader_weights": "int8"}
    alone, ignored = (
        identity_of(settings("configs/eval.py:method=direct", *f), DATA)
        for f in ((), ("reader_rollout.weights=int8",))
    )
    assert alone == ignored  # there is no reader


def test_verdicts_of_a_judge_in_another_number_format_are_not_reused(tmp_path: Path) -> None:
    identities = [
        settings(JUDGED, f"judge_rollout.weights={name}").judge.identity() for name in ("auto", "int8")
    ]
    auto, int8 = (verdicts_file(tmp_path, identity, {"a": "x"}) for identity in identities)
    assert auto != int8


@pytest.mark.parametrize(
    ("formats", "expected"),
    [
        ([("bfloat16", "int8")] * 2, ("bfloat16", "int8")),
        ([("bfloat16", ""), ("float32", "")], ("bfloat16, float32", "")),  # continued on another processor
        ([("", ""), ("float32", "int8")], ("", "")),  # begun by an older version
    ],
)
def test_the_card_has_the_number_formats_with_which_the_questions_were_answered(
    tmp_path: Path, formats: list[tuple[str, str]], expected: tuple[str, str]
) -> None:
    for policy, reader in formats:
        append_timing(tmp_path, 2, commit="c", policy_format=policy, reader_format=reader, answer=1.0)
    append_timing(tmp_path, 4, "verdicts", judge=1.0)
    card = make_result_card(settings(R2AG), DATA, workdir=tmp_path)
    assert (card.policy_format, card.reader_format) == expected


@pytest.mark.slow
def test_a_run_in_int8_differs_in_numerics_and_its_folder_refuses_other_formats(tmp_path: Path) -> None:
    if not supports_format("int8"):
        pytest.skip("this processor does not multiply int8")
    fields = ("rollout.rows=8", "data.worlds=1")
    formats = {"auto": (), "int8": ("rollout.weights=int8", "reader_rollout.weights=int8")}
    for name, more in formats.items():
        evaluate.run(load_config(f"{R2AG},questions=3", (*fields, *more)), tmp_path / name)
    cards = {name: load_run(tmp_path / name).card for name in formats}
    assert differences(cards) == [
        "numerics of the policy differs: auto: float32; int8: int8",
        "numerics of the reader differs: auto: float32; int8: int8",
    ]
    assert {line["reader_format"] for line in read_timing(tmp_path / "int8") if "commit" in line} == {"int8"}
    written = json.loads((tmp_path / "int8/config.json").read_text())
    assert (written["rollout"]["weights"], written["reader_weights"]) == ("int8", "int8")
    with pytest.raises(UserError, match=r"reader_weights: '\(absent\)' there, 'int8' now"):
        evaluate.run(
            load_config(f"{R2AG},questions=3", (*fields, "reader_rollout.weights=int8")), tmp_path / "auto"
        )
