"""Result cards survive the round trip through JSON, and every difference of two settings is reported."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from rrl.data.questions import Question
from rrl.errors import UserError
from rrl.eval.provenance import installed_versions
from rrl.eval.result_card import (
    ResultCard,
    card_from_json,
    differences,
    gold_fingerprint,
    load_card,
    questions_fingerprint,
    save_card,
)

CARD = ResultCard(
    method="naive RAG",
    dataset="2wiki dev",
    questions=1000,
    questions_sha256="a" * 64,
    corpus="2wiki",
    corpus_sha256="b" * 64,
    passages=6119,
    retriever={"kind": "bm25", "k1": 0.9, "encoder": ""},
    top_k=5,
    limits={"searches": 4},
    model="models/x",
    model_sha256="c" * 64,
    normalization="squad",
    gold_sha256="1" * 64,
    compute={"dtype": "float32"},
    policy_format="float32",
    versions=installed_versions(),
    command="python launch/eval.py",
)
CLOSED = dataclasses.replace(
    CARD, method="direct", corpus="", corpus_sha256="", passages=0, retriever={}, top_k=0
)


def test_a_card_survives_the_round_trip_through_json(tmp_path: Path) -> None:
    save_card(tmp_path / "card.json", CARD)
    assert load_card(tmp_path / "card.json") == CARD
    required = dataclasses.asdict(CARD)
    optional = ("gold_sha256", "compute", "commit", "versions", "reader", "judge", "seed")
    for name in (*optional, "policy_format", "reader_format"):
        del required[name]
    older = card_from_json(required)
    assert older.compute == {} and older.policy_format == ""  # older cards lack the fields
    assert {"python", "rrl", "jax"} <= set(json.loads((tmp_path / "card.json").read_text())["versions"])


def test_equal_settings_have_no_differences() -> None:
    other = dataclasses.replace(
        CARD, method="R-Search", model="models/y", seed=3, limits={"searches": 8}, judge="z"
    )
    assert differences({"a": CARD, "b": other}) == []
    judged = dataclasses.replace(CARD, judge="y")  # two judges must be the same
    assert differences({"a": judged, "b": other, "c": CARD}) == ["judge differs: a: y; b: z"]
    short = dataclasses.replace(
        CARD, judge='{"kind": "oracle", "short_answers": true}'
    )  # this judge affects EM too
    assert differences({"a": short, "c": CARD}) == [
        "judge differs: a: kind oracle, short answers True; c: none"
    ]
    older = dataclasses.replace(CARD, gold_sha256="", compute={}, policy_format="")  # they lack these fields
    assert differences({"a": CARD, "b": older}) == []
    reads = dataclasses.replace(CARD, reader="models/z", reader_format="int8")  # a method with a reader
    assert differences({"a": CARD, "b": reads}) == []
    assert CARD.setting["corpus"] == "2wiki (6,119 passages, bbbbbbbbbbbb)"
    assert CARD.setting["retriever"] == "k1 0.9, kind bm25"
    dense = dataclasses.replace(CARD, retriever={"kind": "exact", "k1": 0.9, "encoder": "e5"})
    assert dense.setting["retriever"] == "encoder e5, kind exact"  # BM25's settings do not apply


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"corpus_sha256": "d" * 64},
            r"corpus differs: a, c: 2wiki \(6,119 passages, bbb.*; b: 2wiki \(6,119 passages, ddd",
        ),
        (
            {"retriever": {"kind": "scann", "encoder": "e5"}},
            r"retriever differs: a, c: k1 0.9, kind bm25; b: encoder e5, kind scann",
        ),
        ({"top_k": 10}, r"passages of a search differs: a, c: 5; b: 10"),
        ({"questions": 500, "questions_sha256": "e" * 64}, r"questions differs: a, c: 2wiki dev \(1,000"),
        ({"normalization": "hotpotqa"}, r"normalisation differs: a, c: squad; b: hotpotqa"),
        ({"gold_sha256": "f" * 64}, r"gold passages differs: a, c: 1{12}; b: f{12}$"),
        ({"compute": {"dtype": "bfloat16"}}, r"numerics differs: a, c: dtype float32; b: dtype bfloat16$"),
        ({"policy_format": "int8"}, r"numerics of the policy differs: a, c: float32; b: int8$"),
    ],
)
def test_differences_name_the_setting_and_the_runs(change: dict, expected: str) -> None:
    (line,) = differences({"a": CARD, "b": dataclasses.replace(CARD, **change), "c": CARD})
    assert re.match(expected, line)


def test_a_closed_book_run_differs_in_corpus_and_retriever() -> None:
    assert [line.partition(":")[0] for line in differences({"a": CARD, "b": CLOSED})] == [
        "corpus differs",
        "retriever differs",
        "passages of a search differs",
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"corpus": ""}, "must both be set"),
        ({"passages": -1}, "passages=-1 must be at least 0"),
        ({"seed": "0"}, "seed='0' must be a whole number"),
        ({"seed": True}, "seed=True must be a whole number"),
        ({"retriever": "bm25"}, "retriever='bm25' must be a mapping"),
        ({"method": ""}, "must not be empty"),
        ({"colour": 1}, "unknown: colour"),
    ],
)
def test_errors_name_the_wrong_field_of_a_card(tmp_path: Path, change: dict, words: str) -> None:
    file = tmp_path / "card.json"
    file.write_text(json.dumps(dataclasses.asdict(CARD) | change))
    with pytest.raises(UserError, match=f"result card .*card.json: .*{words}"):
        load_card(file)


def test_objects_that_are_not_cards_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="missing: method, dataset"):
        card_from_json({})
    with pytest.raises(UserError, match="not an object"):
        card_from_json([])
    with pytest.raises(UserError, match=r"result card .*none.json"):
        load_card(tmp_path / "none.json")


def test_the_fingerprint_of_questions_depends_on_texts_answers_and_choices() -> None:
    one, two = Question("a", "Who?", ("x",)), Question("b", "What?", ("y",), "kind", ("T",))
    assert questions_fingerprint([one, two]) == questions_fingerprint(
        [one, dataclasses.replace(two, kind="")]
    )
    assert questions_fingerprint([one, two]) != questions_fingerprint([two, one])
    assert questions_fingerprint([one]) != questions_fingerprint([dataclasses.replace(one, answers=("z",))])
    choosing = [dataclasses.replace(one, choices=choices) for choices in ((), ("x", "y"), ("y", "x"))]
    assert len({questions_fingerprint([each]) for each in choosing}) == 3


def test_the_gold_fingerprint_depends_on_gold_ids():
    plain = Question("q", "Who?", ("A",), gold=("T",))
    with_ids = dataclasses.replace(plain, gold_ids=("1",))
    prints = {gold_fingerprint([q]) for q in (plain, with_ids, dataclasses.replace(with_ids, gold=()))}
    assert len(prints) == 3 and "" not in prints
