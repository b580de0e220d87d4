"""Tests of reading question files in published formats, data folders, and broken files."""

import gzip
import json
from pathlib import Path

import pytest

from rrl.data.folder import load_folder
from rrl.data.questions import Question, load_questions, save_questions
from rrl.errors import UserError
from tests.shared_data import shared


def written(folder: Path, *records: dict) -> Path:
    file = folder / "questions.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


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


def test_answers_are_read_from_a_separate_file(tmp_path: Path) -> None:
    file, truth = tmp_path / "queries.json", tmp_path / "truth.json"
    file.write_text(
        json.dumps({"queries": [{"id": "0", "question": "Who?"}, {"id": "1", "question": "What?"}]})
    )
    truth.write_text(
        json.dumps({"1": {"answer": "B"}, "0": {"answer": "A", "evidence_list": [{"title": "T"}]}})
    )
    assert load_questions(file, truth=truth) == [
        Question("0", "Who?", ("A",), gold=("T",)),
        Question("1", "What?", ("B",)),
    ]
    truth.write_text(json.dumps({"1": {"answer": "B"}}))
    with pytest.raises(UserError, match=r"queries.json, record 1: id: '0' has no answer in .*truth.json"):
        load_questions(file, truth=truth)
    truth.write_text('[{"id": 1}, {"id": "1"}]')
    with pytest.raises(UserError, match=r"truth.json, record 2: id: '1' occurs twice"):
        load_questions(file, truth=truth)
    truth.write_text("[3]")
    with pytest.raises(UserError, match=r"truth.json, record 1: got 3, not an object"):
        load_questions(file, truth=truth)


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


def test_the_gold_answer_of_a_multiple_choice_is_one_of_its_choices(tmp_path: Path) -> None:
    record = {"question": "Which?", "choices": ["Oslo", "Rome"]}
    file = written(tmp_path, *(record | {"answer": answer} for answer in ("B", "b", "Rome", [1])))
    assert [question.answers for question in load_questions(file)] == [("B",)] * 4
    for wrong in ("C", "rom", [2]):
        with pytest.raises(
            UserError, match=r"line 1: answer: got ('2'|'C', neither a letter from A to B|'rom')"
        ):
            load_questions(written(tmp_path, record | {"answer": wrong}))


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


@pytest.mark.parametrize("name", ["2wiki", "hotpotqa", "musique"])
def test_gold_titles_of_real_folders_are_in_their_corpus(name: str) -> None:
    folder = load_folder(shared(name))
    titles = {passage.title for passage in folder.passages}
    questions = folder.questions("dev" if "dev" in folder.files else "train")
    found = [title in titles for question in questions for title in question.gold]
    assert sum(found) / len(found) > 0.98


def test_the_error_of_an_incomplete_folder_lists_its_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"0 corpus files.*no question file.*Found: no files"):
        load_folder(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "train_a.json").write_text("[]")
    (tmp_path / "train_b.json").write_text("[]")
    with pytest.raises(UserError, match=r"0 corpus files.*Found: notes.txt, train_a.json"):
        load_folder(tmp_path)
    with pytest.raises(UserError, match=r"2 files for the split 'train' \(train_a.json, train_b.json\)"):
        load_folder(tmp_path, corpus=False).first_split_with_answers(["train"])
    with pytest.raises(UserError, match="not a folder"):
        load_folder(tmp_path / "none")


def test_files_of_a_folder_are_assigned_by_name(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"title": "T", "text": "x"}\n')
    (tmp_path / "questions_small.jsonl").write_text('{"question": "Who?", "answer": "A"}\n')
    (tmp_path / "dev.json").write_text('[{"question": "Who?", "answer": "B"}]')
    folder = load_folder(tmp_path)
    assert [passage.title for passage in folder.passages] == ["T"]
    assert {split: folder.questions(split)[0].answers for split in folder.files} == {
        "questions": ("A",),
        "dev": ("B",),
    }


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"qid": "s", "question": "Is it?", "answer": True}, Question("s", "Is it?", ("yes",))),
        ({"qid": "s", "question": "Is it?", "answer": False}, Question("s", "Is it?", ("no",))),
        ({"id": "n", "question": "When?", "answer": 1913}, Question("n", "When?", ("1913",))),
        (
            {"id": "n", "question": "How?", "answers": ["nine", 9, 9.5, 9.0]},
            Question("n", "How?", ("nine", "9", "9.5")),
        ),
        (
            {
                "id": "q",
                "title": "T",
                "context": "x",
                "question": "Who?",
                "answers": {"text": ["A", "B"], "answer_start": [0]},
            },
            Question("q", "Who?", ("A", "B")),
        ),
        (
            {
                "id": "k",
                "input": "Who?",
                "output": [
                    {"answer": "A"},
                    {"answer": "B"},
                    {"provenance": [{"wikipedia_id": "1", "title": "T"}]},
                ],
            },
            Question("k", "Who?", ("A", "B"), gold=("T",), gold_ids=("1",)),
        ),
        ({"_id": "l", "input": "Who?", "context": "x", "answers": ["A"]}, Question("l", "Who?", ("A",))),
        (
            {
                "question": "Who?",
                "contexts": [{"title": "T", "text": "x", "is_supporting": True}],
                "reference": ["A"],
            },
            Question("0", "Who?", ("A",), gold=("T",)),
        ),
        (
            {"_id": "h", "question": "Who?", "answer": "A", "supporting_facts": '[["T", 0], ["U", 1]]'},
            Question("h", "Who?", ("A",), gold=("T", "U")),
        ),
        ({"query_id": "7", "query": "Who?", "answer": "A", "gold_docs": [{}]}, Question("7", "Who?", ("A",))),
        ({"question": "Who?", "answers": ["A", None]}, Question("0", "Who?", ("A",))),
        ({"input": "Who?", "output": [{"answer": None}, {"answer": "A"}]}, Question("0", "Who?", ("A",))),
        ({"question": "Who?", "answers": "['A', 'B']"}, Question("0", "Who?", ("A", "B"))),
        ({"question": "Who?", "answer": "[A]"}, Question("0", "Who?", ("[A]",))),
        (
            {"question": "Is it?", "choices": ["no", "yes"], "answer": False},
            Question("0", "Is it?", ("A",), choices=("no", "yes")),
        ),
    ],
)
def test_answers_are_read_in_every_published_format(tmp_path: Path, record: dict, expected: Question) -> None:
    assert load_questions(written(tmp_path, record)) == [expected]


UNANSWERABLE = [
    {"id": "2hop__1_2", "question": "Who?", "answer": "A", "answerable": False},
    {"id": "s", "question": "Who?", "answers": {"text": [], "answer_start": []}},
    {"id": "s", "question": "Who?", "answers": [], "is_impossible": True},
    {"id": "s", "question": "Who?", "answer": "A", "answerable": "no"},
    {"id": "s", "question": "Who?", "answer": "A", "is_impossible": "1.0"},
]


@pytest.mark.parametrize("record", UNANSWERABLE)
def test_unanswerable_questions_are_excluded_and_counted(tmp_path: Path, record: dict, caplog) -> None:
    file = written(tmp_path, {"id": "a", "question": "Who?", "answer": "A", "answerable": True}, record)
    assert [question.id for question in load_questions(file)] == ["a"]
    assert "excluded 1 records of 2 (line 2: its publisher marks it as unanswerable)" in caplog.text
    assert [question.answers for question in load_questions(file, unanswerable="empty")] == [("A",), ("",)]
    assert [question.answers for question in load_questions(file, answers_optional=True)] == [("A",), ()]


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


def test_a_folder_may_hold_tables_and_unused_files_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "corpus.csv").write_text('id,title,text\n1,T,"x\ny"\n')
    (tmp_path / "dev.tsv").write_text("question\tanswer\nWho?\tB\n")
    (tmp_path / "train.json").write_text("broken")
    folder = load_folder(tmp_path)
    assert folder.passages[0].text == "x\ny"
    assert folder.questions("dev") == [Question("0", "Who?", ("B",))]
    with pytest.raises(UserError, match=r"train\.json: not JSON"):
        folder.questions("train")


def test_a_split_without_gold_answers_is_skipped_and_a_broken_split_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unanswered = {"question": "Who?", "answer": ""}
    test, dev = tmp_path / "test.json", tmp_path / "dev.json"
    test.write_text(json.dumps([unanswered, {"question": "Why?"}]))
    dev.write_text(json.dumps([unanswered | {"answer": "A"}]))
    folder = load_folder(tmp_path, corpus=False)
    assert folder.first_split_with_answers(("test", "dev")) == ("dev", [Question("0", "Who?", ("A",))])
    assert "test.json has no gold answers and is not used" in caplog.text
    assert folder.first_split_with_answers(("test", "dev"), exclude="dev") is None
    for faulty in ([unanswered, unanswered | {"answer": "A"}], [{"title": "T", "text": "x"}], []):
        test.write_text(json.dumps(faulty))
        with pytest.raises(UserError, match=r"test\.json"):
            folder.first_split_with_answers(("test", "dev"))


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


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (("True", "false"), ("yes", "no")),  # StrategyQA as a table
        (("True", "a lie"), ("True", "a lie")),
        (("True", "true"), ("True", "true")),
    ],
)
def test_booleans_of_a_table_are_yes_and_no_as_in_json(tmp_path: Path, answers, expected) -> None:
    file = tmp_path / "strategy.csv"
    rows = "".join(f"{number},Is it {number}?,{answer}\n" for number, answer in enumerate(answers))
    file.write_text("id,question,answer\n" + rows, encoding="utf-8")
    assert [question.answers for question in load_questions(file)] == [(answer,) for answer in expected]
