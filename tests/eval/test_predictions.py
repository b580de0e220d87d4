"""Prediction files: every format gives the same predictions, and errors name the line."""

import json
from pathlib import Path

import pytest

from rrl.errors import UserError
from rrl.eval.prediction_files import load_predictions


def written(folder: Path, *records: object) -> Path:
    file = folder / "predictions.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


@pytest.mark.parametrize(
    "text",
    [
        '{"id": "a", "prediction": "x"}\n{"id": "b", "prediction": null}\n{"id": 7, "prediction": ["y", " z "]}\n',
        '{"id": "a", "pred": "x"}\n\n{"id": "b", "pred": []}\n{"id": "7", "pred": ["y", "z"]}\n',
        '{"a": "x", "b": null, "7": ["y", "z"]}',
        '{"answer": {"a": "x",\n"b": [], "7": ["y", "z"]}, "sp": {"a": [["T", 0]]}}',
        '{"answer": {"a": "x",\n"b": [], "7": ["y", "z"]}, "sp": {}, "evidence": {"a": [["T", "r", "U"]]}}',
        '[{"id": "a", "output": {"pred": "x"}}, {"id": "b", "output": {"pred": null}},'
        ' {"id": "7", "output": {"pred": ["y", "z"]}}]',
    ],
)
def test_every_format_gives_the_same_predictions(tmp_path: Path, text: str) -> None:
    file = tmp_path / "predictions.json"
    file.write_text(text)
    assert [(p.id, p.answers) for p in load_predictions(file)] == [
        ("a", ("x",)),
        ("b", ()),
        ("7", ("y", "z")),
    ]


def test_retrieved_passages_and_costs_are_read(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        {"id": 1, "prediction": "x", "titles": ["T", "U"], "turns": 2, "tokens": 30, "seconds": 0.5},
        {
            "id": 2,
            "prediction": "x",
            "searches": [{"query": "q", "titles": ["T"], "failed": False}, {"titles": ["V"], "failed": True}],
        },
        {"id": 3, "output": {"pred": "x", "retrieval_result": [{"id": "9", "contents": '"T"\ntext'}]}},
        {"id": 4, "prediction": "x", "searches": 3, "tokens": True},
    )
    found = load_predictions(file)
    assert [p.titles for p in found] == [("T", "U"), ("T", "V"), ("T",), None]
    assert [p.ids for p in found] == [None, None, ("9",), None]
    assert [p.failed_searches for p in found] == [0, 1, 0, 0]
    assert [dict(p.counts) for p in found] == [
        {"turns": 2, "tokens": 30, "seconds": 0.5},
        {"searches": 2},
        {},
        {"searches": 3},
    ]


def test_the_fields_of_prediction_and_verdict_can_be_chosen(tmp_path: Path) -> None:
    file = written(tmp_path, {"id": 1, "prediction": "x", "mine": {"short": "y"}, "gpt": "True."})
    assert load_predictions(file, "mine.short", "gpt")[0].answers == ("y",)
    assert load_predictions(file, "mine.short", "gpt")[0].verdict is True
    for reply, verdict in (("False", False), (True, True), (0, False), ("perhaps", None), ("Correct", True)):
        assert (
            load_predictions(written(tmp_path, {"id": 1, "pred": "", "gpt": reply}), "", "gpt")[0].verdict
            is verdict
        )


@pytest.mark.parametrize(
    ("records", "words"),
    [
        (
            [{"id": "a", "pred": "x"}, {"id": "a", "pred": "y"}],
            r"line 2: id: 'a' occurs twice, first at line 1",
        ),
        (
            [{"question": "q", "pred": "x"}, {"question": "q", "pred": "y"}, {"pred": "x", "question": "q"}],
            r"line 3: the same record occurs twice, first at line 1",
        ),
        (
            [{"id": "a", "pred": "x"}, {"question": "q", "pred": "y"}],
            r"line 2: id: missing at line 2, while line 1 has 'a'",
        ),
        (
            [{"question": "q", "pred": "y"}, {"id": "a", "pred": "x"}],
            r"line 2: id: missing at line 1, while line 2 has 'a'",
        ),
        ([{"pred": "x"}, {"pred": "y"}], r"line 1: id: missing, and there is no question either"),
        (
            [{"id": "a", "answer": "x"}],
            r"line 1: prediction: missing; found the fields id, answer. Allowed: records",
        ),
        ([{"id": "a", "pred": {"x": 1}}], r"line 1: pred: got {'x': 1}, not a string"),
        ([{"id": "a", "pred": "x"}, ["b"]], r"line 2: got \['b'\], not an object"),
        ([{"id": "a", "pred": "x", "titles": "T"}], r"line 1: titles: got 'T', not a list"),
        ([{"id": [], "pred": "x"}], r"line 1: id: got \[\], not a string"),
        ([{"id": "a", "pred": "x", "tokens": float("nan")}], r"line 1: tokens: got nan, not a finite number"),
        ([], r"the file is empty"),
    ],
)
def test_errors_name_the_line_of_an_unreadable_record(tmp_path: Path, records: list, words: str) -> None:
    with pytest.raises(UserError, match=rf"predictions.jsonl(, |: ){words}"):
        load_predictions(written(tmp_path, *records))


def test_the_error_names_an_id_that_occurs_twice_in_one_object(tmp_path: Path) -> None:
    for document in ('{"a": "x", "b": "wrong", "b": "y"}', '{"answer": {"a": "x", "b": "1", "b": "y"}}'):
        (tmp_path / "a.json").write_text(document)
        with pytest.raises(UserError, match="'b' occurs twice in one object"):
            load_predictions(tmp_path / "a.json")
    (tmp_path / "a.json").write_text('{\n"a": "x",\n"b": "1",\n"c": "z",\n"b": "y"\n}\n')
    with pytest.raises(UserError, match=r"'b' occurs twice in one object \(line 5\)"):
        load_predictions(tmp_path / "a.json")


def test_the_error_names_a_missing_verdict_or_field(tmp_path: Path) -> None:
    file = written(tmp_path, {"id": "a", "pred": "x"})
    with pytest.raises(UserError, match="line 1: gpt: missing"):
        load_predictions(file, judge_field="gpt")
    with pytest.raises(UserError, match="line 1: mine: missing; found the fields id, pred"):
        load_predictions(file, "mine")
    file.write_text('{"id": "a", "pred": "x"}\n{broken\n')
    with pytest.raises(UserError, match="line 2: not JSON"):
        load_predictions(file)


def test_numbers_and_booleans_are_answers(tmp_path: Path) -> None:
    values = (1913, 9.5, True, False, [1, "x"], None)
    file = written(tmp_path, *({"id": at, "prediction": value} for at, value in enumerate(values)))
    assert [p.answers for p in load_predictions(file)] == [
        ("1913",),
        ("9.5",),
        ("yes", "true"),
        ("no", "false"),
        ("1", "x"),
        (),
    ]


def test_predictions_of_kilt_and_browsecomp_plus_are_read(tmp_path: Path) -> None:
    result = [
        {"type": "reasoning", "output": ["x"]},
        {"type": "tool_call", "output": "y"},
        {"type": "output_text", "output": "Explanation: z\n**Exact Answer:** Marta Quell\nConfidence: 90%"},
    ]
    kilt = {"id": "1", "input": "Who?", "output": [{"answer": "Marta Quell"}, {"answer": "another guess"}]}
    (found,) = load_predictions(written(tmp_path, {"query_id": "1", "status": "completed", "result": result}))
    (other,) = load_predictions(written(tmp_path, kilt))
    assert (found.id, found.answers) == (other.id, other.answers) == ("1", ("Marta Quell",))


def test_passages_are_read_per_search_and_empty_ones_are_counted(tmp_path: Path, caplog) -> None:
    rounds = [
        [{"id": "3", "contents": '"T"\nx'}],
        [{"id": "4", "contents": '"U"\ny'}, {"id": "5", "contents": ""}],
    ]
    flat = [{"id": "6", "contents": ""}]
    file = written(
        tmp_path,
        {"id": 1, "output": {"pred": "x", "retrieval_result": rounds}},
        {"id": 2, "output": {"pred": "x", "retrieval_result": flat}},
    )
    assert [(p.titles, p.empty_passages) for p in load_predictions(file)] == [(("T", "U"), 1), ((), 1)]
    assert "left out 2 passages with neither title nor text" in caplog.text


def test_a_table_of_predictions_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('id,prediction\n7,"Marta, or\nQuell"\n')
    (prediction,) = load_predictions(tmp_path / "a.csv")
    assert (prediction.id, prediction.answers) == ("7", ("Marta, or\nQuell",))


def test_ids_of_passages_are_read_if_all_passages_have_one(tmp_path: Path) -> None:
    found = written(
        tmp_path,
        {"id": 1, "prediction": "x", "retrieved_docids": ["d1", 2]},
        {
            "id": 2,
            "prediction": "x",
            "searches": [{"titles": ["T"], "ids": ["d1"]}, {"titles": [], "ids": []}],
        },
        {"id": 3, "prediction": "x", "searches": [{"titles": ["T"], "ids": ["d1"]}, {"titles": ["U"]}]},
        {
            "id": 4,
            "prediction": "x",
            "passages": [[{"doc_id": "d1", "text": "x"}], [{"docid": 2, "text": "y"}]],
        },
        {"id": 5, "prediction": "x", "passages": [{"doc_id": "d1", "text": "x"}, {"text": "y"}]},
    )
    read = load_predictions(found)
    assert [p.ids for p in read] == [("d1", "2"), ("d1",), None, ("d1", "2"), None]
    assert [p.titles for p in read] == [None, ("T",), ("T", "U"), ("", ""), ("", "")]
