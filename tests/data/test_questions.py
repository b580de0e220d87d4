"""Tests of reading question files in published formats, and broken files."""

import dataclasses
import gzip
import json
from pathlib import Path

import pytest

from rrl.data.questions import Question, as_prompted, load_questions, save_questions
from rrl.errors import UserError
from tests.data.question_files import written
from tests.shared_data import shared


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"id": "q1", "question": "Who?", "golden_answers": ["A", "B"]}, Question("q1", "Who?", ("A", "B"))),
        ({"question": "Who?", "answer": ["A", " A ", "B"]}, Question("0", "Who?", ("A", "B"))),
        (
            {
                "_id": "q2",
                "type": "bridge",
                "question": "Who?",
                "answer": "A",
                "supporting_facts": [["T", 0], ["T", 1], ["U", 0]],
            },
            Question("q2", "Who?", ("A",), "bridge", ("T", "U")),
        ),
        (
            {
                "id": "q3",
                "question": "Who?",
                "answer": "A",
                "answer_aliases": ["a", "A"],
                "supporting_facts": ["T"],
            },
            Question("q3", "Who?", ("A", "a"), "", ("T",)),
        ),
        (
            {
                "id": "2hop__1_2",
                "question": "Who?",
                "answer": "A",
                "answer_aliases": [],
                "paragraphs": [{"title": "T", "is_supporting": True}, {"title": "U", "is_supporting": False}],
            },
            Question("2hop__1_2", "Who?", ("A",), "", ("T",), hops=2),
        ),
        (
            {
                "id": "4hop1__x",
                "question": "Who?",
                "answer": "A",
                "question_decomposition": [{}, {}, {}],
            },
            Question("4hop1__x", "Who?", ("A",), hops=3),
        ),
        (
            {
                "id": "dev_0",
                "question": "Who?",
                "golden_answers": ["A"],
                "metadata": {
                    "type": "comparison",
                    "answer": "not this",
                    "supporting_facts": {"title": ["T", "U", "T"], "sent_id": [0, 1, 2]},
                },
            },
            Question("dev_0", "Who?", ("A",), "comparison", ("T", "U")),
        ),
        (
            {
                "query": "Who?",
                "answer": "A",
                "question_type": "inference_query",
                "evidence_list": [{"title": "T", "fact": "x"}, {"title": "T"}, {"title": "U"}],
            },
            Question("0", "Who?", ("A",), "inference_query", ("T", "U")),
        ),
        (
            {"Question": "Who?", "QuestionId": "tc_1", "Answer": {"Value": "A", "Aliases": ["A", "B"]}},
            Question("tc_1", "Who?", ("A", "B")),
        ),
        (
            {"question": "Who?", "question_id": "tc_1", "answer": {"value": "A", "aliases": ["B"]}},
            Question("tc_1", "Who?", ("A", "B")),
        ),
        (
            {
                "_id": "66f",
                "domain": "Multi-Document QA",
                "question": "Which?",
                "choice_A": "red",
                "choice_B": "blue",
                "choice_C": "green",
                "choice_D": "none",
                "answer": "B",
                "context": "long",
            },
            Question("66f", "Which?", ("B",), "Multi-Document QA", choices=("red", "blue", "green", "none")),
        ),
        (
            {"id": "t", "question": "Which?", "choices": ["red", "blue"], "golden_answers": [1]},
            Question("t", "Which?", ("B",), choices=("red", "blue")),
        ),
    ],
)
def test_every_question_format_is_read(tmp_path: Path, record: dict, expected: Question) -> None:
    assert load_questions(written(tmp_path, record)) == [expected]


def test_a_lone_surrogate_is_read_as_a_question_mark_and_can_be_saved(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(r'{"question": "Who is \ud83d\ude00 or \uD83D?", "answers": ["\udc00 x"]}')
    questions = load_questions(path)
    assert [(q.text, q.answers) for q in questions] == [("Who is \U0001f600 or ??", ("? x",))]
    save_questions(path, questions)
    assert load_questions(path) == questions


def test_saved_questions_are_loaded_unchanged(tmp_path: Path) -> None:
    questions = [
        Question("a", "Ærø?", ("x", "y"), "two_hop", ("T",), 2),
        Question("b", "Is it?", ("A",), choices=("yes", "no")),
    ]
    save_questions(tmp_path / "questions.jsonl", questions)
    assert load_questions(tmp_path / "questions.jsonl") == questions


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("popqa.tsv", 'id\tprop\tquestion\tpossible_answers\n7\tx\t"Who ""he"" is?"\t"[""A"", ""B""]"\n'),
        ("bamboogle.csv", 'id,Question,Answer\n7,"Who ""he"" is?",A\n'),
        (
            "trivia.json",
            '{"Domain": "Web", "Data": [{"Question": "Who \\"he\\" is?", "QuestionId": "7", "Answer": {"Value": "A"}}]}',
        ),
        (
            "multihop.json",
            '{"task": "x", "queries": [\n{"id": 7, "question": "Who \\"he\\" is?", "answer": "A"}]}',
        ),
        ("keyed.json", '{"7": {"question": "Who \\"he\\" is?", "answer": "A"}}'),
    ],
)
def test_json_lines_lists_and_objects_are_read(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    answers = ("A", "B") if name == "popqa.tsv" else ("A",)
    assert load_questions(tmp_path / name) == [Question("7", 'Who "he" is?', answers)]


def test_real_multihop_rag_is_read_with_its_answer_file() -> None:
    questions = load_questions(
        shared("multihop_rag/queries_500.json"), truth=shared("multihop_rag/ground_truth_500.json.gz")
    )
    assert len(questions) == 500
    assert sum(not question.gold for question in questions) == 71  # questions without an answer in the corpus
    assert all(bool(question.gold) != (question.kind == "null_query") for question in questions)


def test_real_musique_questions_have_their_number_of_hops() -> None:
    questions = load_questions(shared("musique/train_100.json.gz"))
    assert {question.hops for question in questions} == {2, 3, 4}
    assert all(question.hops == int(question.id[0]) for question in questions)


def test_broken_lines_are_skipped_or_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = {"question": "Who?", "answer": "A"}
    file = written(
        tmp_path, good, {"question": "No answer?"}, {"answer": "A"}, {**good, "answer": [{}]}, good
    )
    skipped: list[str] = []
    assert [question.id for question in load_questions(file, "skip", skipped)] == ["0", "4"]
    assert [place.split(":")[0] for place in skipped] == ["line 2", "line 3", "line 4"]
    assert "skipped 3 broken records of 5 (line 2: " in caplog.text
    with pytest.raises(
        UserError,
        match=r"questions.jsonl, line 2: no gold answer.*Allowed: .*golden_answers.*--config\.data\.on_error=skip",
    ):
        load_questions(file)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", [1]),
        ("question", 3),
        ("answer", [[7]]),
        ("answers", {"answer_texts": ["A"]}),
        ("answers", "['A' 'B']"),
        ("supporting_facts", [3]),
        ("supporting_facts", [[]]),
        ("paragraphs", ["x"]),
        ("supporting_facts", 5),
        ("evidence_list", [{"fact": "x"}]),
        ("choices", [1]),
        ("hops", "two"),
        ("question_decomposition", "x"),
        ("possible_answers", "A, B"),
    ],
)
def test_errors_name_fields_of_the_wrong_type(tmp_path: Path, field: str, value: object) -> None:
    record = {"question": "Who?", "answer": "A", field: value}
    with pytest.raises(UserError, match=f"line 1: .*{field}"):
        load_questions(written(tmp_path, record))


def test_a_passage_is_refused_as_a_question(tmp_path: Path) -> None:
    file = written(tmp_path, {"id": "1", "title": "Oslo", "text": "Oslo is a city."})
    with pytest.raises(UserError, match=r"line 1: text: the record has a title .*a passage, not a question"):
        load_questions(file, answers_optional=True)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", '{"question": "?", "answer": "x",}\n', r"line 1: not JSON \(.*: column \d+\)"),
        ("a.jsonl", '{"question": "?", "answer"\n', r"line 1: not JSON \(.*: column \d+\)"),
        (
            "a.json",
            '{"1": {"answer": "x"}, "2": {"answer": "y"}, "1": {"answer": "z"}}',
            "'1' occurs twice",
        ),
        ("a.json", '[\n{"question": "?"\n]', r"not JSON \(.*: line 3, column 1\)"),
    ],
)
def test_invalid_json_and_duplicate_names_are_refused(
    tmp_path: Path, name: str, content: str, words: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=words):
        load_questions(tmp_path / name)


def test_the_error_of_a_damaged_archive_names_the_file(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"question": "?", "answer": "x"}\n' * 50)
    for content in (whole[:30], whole[:20] + bytes(byte ^ 255 for byte in whole[20:40]) + whole[40:]):
        (tmp_path / "a.jsonl.gz").write_bytes(content)
        with pytest.raises(UserError, match=r"a\.jsonl\.gz: cannot be read"):
            load_questions(tmp_path / "a.jsonl.gz")


@pytest.mark.parametrize(
    ("name", "count", "with_gold"),
    [
        ("2wiki/dev_1000.json.gz", 1000, True),
        ("2wiki/train_500_with_context.json.gz", 500, True),
        ("hotpotqa/train_100.json.gz", 100, True),
        ("musique/train_100.json.gz", 100, True),
        ("bamboogle/test_125.jsonl", 125, False),
        ("nq/NQ-open.dev.jsonl.gz", 3610, False),
        ("nq/sample_1000.jsonl", 1000, False),
        ("popqa/sample_1000.jsonl.gz", 1000, False),
        ("triviaqa/sample_1000.jsonl.gz", 1000, False),
    ],
)
def test_real_questions_are_read_whole(name: str, count: int, with_gold: bool) -> None:
    questions = load_questions(shared(name))
    assert len(questions) == count
    assert all(question.text and question.answers for question in questions)
    assert all(bool(question.gold) == with_gold for question in questions)
    assert len({question.id for question in questions}) == count


def test_the_squad_file_is_read_as_questions(tmp_path: Path) -> None:
    qas = [
        {
            "id": "1",
            "question": "Who?",
            "answers": [{"text": "A", "answer_start": 0}],
            "is_impossible": False,
        },
        {
            "id": "2",
            "question": "Why?",
            "answers": [],
            "plausible_answers": [{"text": "B"}],
            "is_impossible": True,
        },
    ]
    file = tmp_path / "dev-v2.0.json"
    file.write_text(json.dumps({"data": [{"title": "T", "paragraphs": [{"context": "x", "qas": qas}]}]}))
    assert load_questions(file) == [Question("1", "Who?", ("A",))]


def test_a_question_as_prompted_includes_its_choices_once() -> None:
    plain = Question("q", "Which?", ("B",), gold=("T",))
    asked = dataclasses.replace(plain, choices=("red", "blue"))
    text = "Which?\n(A) red\n(B) blue\nAnswer with the letter of the right choice."
    shown = dataclasses.replace(plain, text=text)
    assert as_prompted(asked) == as_prompted(shown) == shown
    assert as_prompted(plain) is plain
