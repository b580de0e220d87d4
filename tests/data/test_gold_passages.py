"""Tests of the ids and titles of gold passages in question files."""

from pathlib import Path

import pytest

from rrl.data.questions import load_questions, save_questions
from rrl.errors import UserError
from tests.data.question_files import written


@pytest.mark.parametrize(
    ("fields", "ids", "titles"),
    [
        ({"gold_ids": ["d1", "d2", "d1"]}, ("d1", "d2"), ()),
        ({"gold_doc_ids": [1, 2], "supporting_facts": ["T"]}, ("1", "2"), ("T",)),
        ({"gold_doc_ids": '["d1", "d2"]'}, ("d1", "d2"), ()),
        ({"gold_doc_ids": "d1"}, ("d1",), ()),
        ({"gold_pids": [7]}, ("7",), ()),
        ({"positive_ids": ["d1"]}, ("d1",), ()),
        ({"relevant_doc_ids": ["d1"]}, ("d1",), ()),
        ({"gold_passages": [{"id": "d1", "title": "T", "text": "x"}]}, ("d1",), ("T",)),
        ({"relevant_docids": ["d1"], "metadata": {"type": "x"}}, ("d1",), ()),
        ({"metadata": {"gold_doc_ids": ["d1"]}}, ("d1",), ()),
        ({"answer_pids": [3]}, ("3",), ()),
        ({"gold_docs": [{"docid": "7", "text": "x"}]}, ("7",), ()),
        ({"gold_docs": [{"docid": "7"}], "evidence_docs": [{"docid": "8"}, {"docid": "7"}]}, ("8", "7"), ()),
        ({"positive_passages": [{"docid": "p#0", "title": "T", "text": "x"}]}, ("p#0",), ("T",)),
        ({"positive_ctxs": [{"title": "T", "text": "x", "psg_id": "5"}]}, ("5",), ("T",)),
        ({"positive_ctxs": [{"title": "T", "text": "x", "passage_id": ""}]}, (), ("T",)),
        ({"positive_passages": ["a text", "another"]}, (), ()),
        (
            {"paragraphs": [{"idx": 0, "title": "T", "is_supporting": True}, {"idx": 1, "title": "U"}]},
            (),
            ("T",),
        ),
        ({"paragraphs": [{"pid": "9", "title": "T", "is_supporting": True}]}, ("9",), ("T",)),
    ],
)
def test_ids_of_gold_passages_are_read_from_every_published_field(
    tmp_path: Path, fields: dict, ids: tuple[str, ...], titles: tuple[str, ...]
) -> None:
    (found,) = load_questions(written(tmp_path, {"id": "q", "question": "Who?", "answer": "A", **fields}))
    assert (found.gold_ids, found.gold) == (ids, titles)
    save_questions(tmp_path / "again.jsonl", [found])
    assert load_questions(tmp_path / "again.jsonl") == [found]


@pytest.mark.parametrize("wrong", [[True], [{"x": 1}], [""], {"d": 1}])
def test_the_error_of_an_invalid_gold_id_names_it(tmp_path: Path, wrong: object) -> None:
    file = written(tmp_path, {"question": "Who?", "answer": "A", "gold_doc_ids": wrong})
    with pytest.raises(UserError, match="line 1: gold_doc_ids: got"):
        load_questions(file)
