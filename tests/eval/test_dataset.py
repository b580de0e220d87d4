"""Questions and corpora of an evaluation: the built-in world, publishers' files, and errors that name the fault."""

import json
from pathlib import Path

import pytest

from rrl.data.questions import Question, save_questions
from rrl.errors import UserError
from rrl.eval.dataset import DatasetConfig, load_dataset, with_retriever
from rrl.runs.datasets import DataConfig, load_datasets
from rrl.runs.retriever import RetrieverConfig
from tests.shared_data import shared

OFF, BM25 = RetrieverConfig(kind="off"), RetrieverConfig(kind="bm25")


def test_the_built_in_world_has_the_held_out_questions_of_training() -> None:
    few = DataConfig(seed=1, train_worlds=1, train_per_kind=1, held_out_worlds=2, held_out_per_kind=6)
    _, held_out = load_datasets(few, BM25)
    found = load_dataset(DatasetConfig(worlds=2, per_kind=6), BM25)
    assert found.questions == held_out.questions and len(found.questions) == 30
    assert (found.name, found.corpus, len(found.passages)) == ("miniwiki test, seed 1", found.name, 400)
    assert len(found.corpus_sha256) == 64
    assert len(load_dataset(DatasetConfig(worlds=2, questions=12), OFF).questions) == 12
    closed = load_dataset(DatasetConfig(worlds=2, per_kind=1), BM25, searches=False)
    assert with_retriever(closed, BM25).retriever is None and closed.corpus == ""


def test_a_musique_file_gives_hops_and_the_passages_to_search() -> None:
    file = str(shared("musique/train_100.json.gz"))
    found = load_dataset(DatasetConfig(path=file, corpus=file, questions=30, seed=3), BM25)
    assert len(found.questions) == 30 and {question.hops for question in found.questions} <= {2, 3, 4}
    again = load_dataset(DatasetConfig(path=file, questions=30, seed=3), OFF)
    assert again.questions == found.questions
    (hits,) = with_retriever(found, BM25).retriever.search([found.questions[0].text], 5)
    assert len(hits) == 5 and found.corpus == "train_100.json.gz"


def test_the_default_split_of_a_folder_is_the_first_held_out_one(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"id": "0", "title": "T", "text": "x"}) + "\n")
    for split in ("train", "dev"):
        save_questions(tmp_path / f"{split}.jsonl", [Question("q", f"{split}?", ("x",))])
    folder = str(tmp_path)
    assert load_dataset(DatasetConfig(folder), BM25).questions[0].text == "dev?"
    assert load_dataset(DatasetConfig(folder, split="train"), BM25).questions[0].text == "train?"
    with pytest.raises(UserError, match="no file of the split 'test'; it has dev, train"):
        load_dataset(DatasetConfig(folder, split="test"), OFF)
    lines = ['{"id": 7, "question": "?"}', "", '{"id": "1", "question": "?", "answer": "x"}']
    (tmp_path / "dev.jsonl").write_text("\n".join([*lines, lines[2]]))
    with pytest.raises(UserError, match=r"dev.jsonl, line 4: the id '1' occurs twice, first at line 3"):
        load_dataset(DatasetConfig(folder, on_error="skip"), OFF)


def test_multiple_choice_mixed_with_free_answers_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "dev.jsonl"
    choice = {"id": "5", "question": "?", "answer": "A", "choices": ["x", "y"]}
    lines = [choice | {"id": "4"}, choice, {"id": "6", "question": "?", "answer": "x"}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(
        UserError, match="2 of 3 questions are multiple choice; put them into a separate file"
    ):
        load_dataset(DatasetConfig(str(file)), OFF)


@pytest.mark.parametrize(
    ("lines", "fields", "words"),
    [
        ([{"id": 1, "question": "?", "answer": " "}], {}, "line 1: no gold answer"),
        ([{"contents": "a passage"}], {}, "line 1: question or text"),
        (
            [{"id": 1, "question": "?", "answer": "x"}] * 2,
            {},
            r"dev.jsonl, line 2: the id '1' occurs twice, first at line 1",
        ),
        ([{"question": "?", "answer": "x"}], {"questions": 2}, "data.questions=2 must be at most 1"),
        (
            [{"question": "?", "answer": "x"}],
            {},
            "is a file of questions and the method searches. Give corpus=FILE",
        ),
        ([{"question": "?", "answer": "x"}], {"split": "dev"}, "split='dev' applies to a folder"),
    ],
)
def test_errors_name_the_wrong_file(tmp_path: Path, lines: list, fields: dict, words: str) -> None:
    file = tmp_path / "dev.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match=words):
        load_dataset(DatasetConfig(str(file), **fields), BM25)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"path": "/none"}, "path='/none' is not miniwiki, a question file"),
        ({"split": "train"}, "split='train' is not a split of the built-in world; choose one of dev, test"),
        ({"corpus": "x"}, "corpus='x' applies to a question file"),
        ({"questions": -1}, "questions=-1 must be at least 0"),
    ],
)
def test_inconsistent_settings_are_rejected(fields: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        DatasetConfig(**fields)


def test_a_corpus_without_the_gold_passages_logs_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "dev.jsonl"
    questions = [("a", ("T",)), ("b", ("U",)), ("c", ("U", "T")), ("d", ())]
    save_questions(file, [Question(name, "Who?", ("x",), gold=gold) for name, gold in questions])
    (tmp_path / "wiki.jsonl").write_text(json.dumps({"id": "0", "title": "T", "text": "x"}) + "\n")
    messages: list[str] = []
    load_dataset(
        DatasetConfig(path=str(file), corpus=str(tmp_path / "wiki.jsonl")), BM25, log=messages.append
    )
    (warning,) = [line for line in messages if "warning" in line]
    assert warning.startswith("warning: for 1 questions the corpus has no gold passage")


def test_a_split_without_gold_answers_is_not_the_default(tmp_path: Path) -> None:
    for split, answer in (("test", ""), ("dev", "x")):
        line = json.dumps({"id": split, "question": "?", "answer": answer})
        (tmp_path / f"{split}.jsonl").write_text(line + "\n")
    assert load_dataset(DatasetConfig(str(tmp_path)), OFF).questions[0].id == "dev"
    with pytest.raises(UserError, match=r"test\.jsonl, line 1: no gold answer"):
        load_dataset(DatasetConfig(str(tmp_path), split="test"), OFF)
    (tmp_path / "dev.jsonl").unlink()
    with pytest.raises(UserError, match="none of its question files has gold answers"):
        load_dataset(DatasetConfig(str(tmp_path)), OFF)
