"""Tests of reading corpus files in published formats, and of broken files."""

import gzip
import json
from pathlib import Path

import pytest

from rrl.data.passages import Passage, SeenIds, fingerprint, iter_passages, load_passages, render
from rrl.errors import UserError
from tests.shared_data import shared

PAIR = [Passage("0", "Oslo", "A city."), Passage("1", 'The "X"', "A thing.\nMore.")]

FORMS = {
    "contents.jsonl": '{"id": "0", "contents": "\\"Oslo\\"\\nA city."}\n'
    '{"id": 1, "contents": "\\"The \\"\\"X\\"\\"\\"\\nA thing.\\nMore."}\n',
    "beir.jsonl": '{"_id": "0", "title": "Oslo", "text": "A city."}\n\n'
    '{"_id": "1", "title": "The \\"X\\"", "text": "A thing.\\nMore.", "metadata": {}}\n',
    "list.json": json.dumps(
        [{"title": "Oslo", "text": "A city."}, {"title": 'The "X"', "text": "A thing.\nMore."}], indent=2
    ),
    "news.json": json.dumps(
        [
            {"title": "Oslo", "author": "x", "url": "x", "body": "A city."},
            {"title": 'The "X"', "author": "x", "url": "y", "body": "A thing.\nMore."},
        ]
    ),
    "lines_without_the_name.json": '{"title": "Oslo", "text": "A city."}\n'
    '{"title": "The \\"X\\"", "text": "A thing.\\nMore."}',
    "pool.json": json.dumps({"Oslo": ["A city."], 'The "X"': ["A thing.\nMore."]}),
    "pretty_pool.json": json.dumps({"Oslo": ["A city."], 'The "X"': ["A thing.\nMore."]}, indent=1),
}


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_every_corpus_format_gives_the_same_passages(tmp_path: Path, name: str, zipped: bool) -> None:
    file = tmp_path / (name + ".gz" if zipped else name)
    data = FORMS[name].encode()
    file.write_bytes(gzip.compress(data) if zipped else data)
    assert load_passages(file) == PAIR


def test_dpr_tsv_files_are_read(tmp_path: Path) -> None:
    file = tmp_path / "psgs_w100.tsv"
    file.write_text('id\ttext\ttitle\n1\t"Aaron is ""a prophet"", they say"\tAaron\n2\tplain\tB"C"\n')
    assert load_passages(file) == [
        Passage("1", "Aaron", 'Aaron is "a prophet", they say'),
        Passage("2", 'B"C"', "plain"),
    ]
    file.write_text("id\ttext\ttitle\n1\tonly two\n")
    with pytest.raises(UserError, match=r"psgs_w100.tsv, line 2: 2 columns instead of 3"):
        load_passages(file)


def test_sentences_of_a_passage_are_joined_by_one_space(tmp_path: Path) -> None:
    file = tmp_path / "pool.json"
    file.write_text(json.dumps({"A": ["One.", " Two.", "Three. "]}))
    assert load_passages(file)[0].text == "One. Two. Three."


POOLS = {
    "hotpotqa": [{"question": "?", "context": [["Oslo", ["A city."]], ['The "X"', ["A thing.\nMore.", ""]]]}],
    "datasets": [
        {"question": "?", "context": {"title": ["Oslo"], "sentences": [["A city."]]}},
        {"question": "?", "context": {"title": ['The "X"'], "sentences": [["A thing.\nMore."]]}},
    ],
    "musique": [
        {"question": "?", "paragraphs": [{"title": "Oslo", "paragraph_text": "A city."}]},
        {"question": "?", "paragraphs": [{"title": 'The "X"', "paragraph_text": "A thing.\nMore."}]},
    ],
}


@pytest.mark.parametrize("form", POOLS)
def test_passages_of_several_questions_are_read_once(tmp_path: Path, form: str) -> None:
    file = tmp_path / "train.json"
    file.write_text(json.dumps(POOLS[form] * 2))
    assert load_passages(file) == PAIR


@pytest.mark.parametrize(
    ("context", "reason"),
    [
        ([["Oslo", "A city."]], "sentences of 'Oslo'"),
        ([["Oslo"]], r"not a list of \[title"),
        ({"title": ["Oslo"], "sentences": []}, "1 titles for 0 texts"),
        ([[7, ["x"]]], "title: got 7"),
        ("Oslo", "context: got 'Oslo', not a list"),
        ("['Oslo' 'x']", "context: got .* not a list in JSON or Python"),
    ],
)
def test_broken_contexts_are_refused(tmp_path: Path, context: object, reason: str) -> None:
    file = tmp_path / "train.json"
    file.write_text(json.dumps([{"question": "?", "context": context}]))
    with pytest.raises(UserError, match=rf"train.json, record 1: .*{reason}"):
        load_passages(file)


def test_a_corpus_is_read_line_by_line(tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_text('{"id": "a", "text": "x"}\nbroken\n')
    passages = iter_passages(file)
    assert next(passages).id == "a"
    with pytest.raises(UserError, match="line 2"):
        next(passages)


@pytest.mark.parametrize(
    "ids",
    [
        "0 1 2 3",
        "5 6 7",
        "1 2 02 3 02",
        "3 1 2 3",
        "1 2 4 3 4",
        "2 3 1 4 1",
        "a b 0 1 a",
        "0 1 2 1",
        "4 5 3 4 5",
    ],
)
def test_repeated_ids_are_detected_in_any_order(ids: str) -> None:
    seen, known = SeenIds(), set[str]()
    for identity in ids.split():
        assert seen.add(identity) == (identity not in known)
        known.add(identity)


BROKEN = (
    b'{"id": "a", "title": "A", "text": "x"}\n'
    b'{"id": "b", "title": "B"\n'
    b"\n"
    b'{"id": "c", "title": "C", "wikitext": "x"}\n'
    b'{"id": "a", "title": "D", "text": "y"}\n'
    b'{"id": "e", "title": "E", "text": "\xff"}\n'
    b"[1]\n"
    b'{"id": "g", "text": 5}\n'
    b'{"id": "h", "title": 7, "text": "z"}\n'
    b'{"id": "i", "title": "I", "text": "z"}\n'
)


def test_broken_lines_are_skipped_and_their_line_numbers_logged(tmp_path: Path, caplog) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_bytes(BROKEN)
    skipped: list[str] = []
    assert [passage.id for passage in load_passages(file, "skip", skipped)] == ["a", "i"]
    assert [place.split(":")[0] for place in skipped] == [f"line {n}" for n in (2, 4, 5, 6, 7, 8, 9)]
    assert "skipped 7 broken records" in caplog.text
    assert "line 2" in caplog.text


@pytest.mark.parametrize(
    ("keep", "reason"),
    [
        (1, "not JSON"),
        (3, "text or body or .* missing; found the fields id, title, wikitext"),
        (4, "occurs twice"),
        (5, "UTF-8"),
    ],
)
def test_the_error_of_a_broken_line_has_file_line_and_reason(tmp_path: Path, keep: int, reason: str) -> None:
    file = tmp_path / "corpus.jsonl"
    lines = BROKEN.splitlines(keepends=True)
    file.write_bytes(lines[0] + lines[keep])
    with pytest.raises(UserError, match=rf"corpus.jsonl, line 2: .*{reason}.*Allowed: .*contents"):
        load_passages(file)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the file is empty"),
        (b"{}\n{}", "missing"),
        (b"[\n1,\n", "not JSON"),
        (gzip.compress(b'{"text": "x"}' * 50, mtime=0)[:30], "cannot be read"),
    ],
)
def test_unusable_files_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    file = tmp_path / "corpus.json"
    file.write_bytes(data)
    with pytest.raises(UserError, match=message):
        load_passages(file)


def test_missing_files_and_unknown_modes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.jsonl: cannot be read"):
        load_passages(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="on_error"):
        load_passages(tmp_path / "none.jsonl", "ignore")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("2wiki/corpus_6119.json.gz", 6119),
        ("hotpotqa/train_100_corpus.json.gz", 994),
        ("musique/train_100_corpus.json.gz", 1890),
        ("wikipedia/passages_1000.jsonl.gz", 1000),
        # Question files: as many distinct contexts as the published corpora have passages.
        ("hotpotqa/train_100.json.gz", 994),
        ("2wiki/train_500_with_context.json.gz", 3112),
        ("musique/train_100.json.gz", 1890),
    ],
)
def test_real_corpora_are_read_whole(name: str, count: int) -> None:
    passages = load_passages(shared(name))
    assert len(passages) == count
    assert all(passage.title and passage.text for passage in passages)


def test_fingerprint_depends_on_order_and_field_boundaries() -> None:
    assert fingerprint(PAIR) == fingerprint(list(PAIR))
    assert fingerprint(PAIR) != fingerprint(PAIR[::-1])
    assert fingerprint([Passage("1", "ab", "c")]) != fingerprint([Passage("1", "a", "bc")])


def test_render_has_the_format_of_r_search() -> None:
    assert render(PAIR[:1]) == "(Title: Oslo) A city."
    assert render([PAIR[0], PAIR[0]]) == "(Title: Oslo) A city.\n(Title: Oslo) A city."
    assert render([]) == ""


def test_passages_are_read_from_long_contexts_and_from_flashrags_metadata(tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl"
    long = {"_id": "q1", "question": "Which?", "choice_A": "x", "context": " ".join(map(str, range(250)))}
    flashrag = {
        "id": "dev_0",
        "question": "Who?",
        "metadata": {"context": {"title": ["T"], "content": [["one.", "two."]]}},
    }
    file.write_text(json.dumps(long) + "\n" + json.dumps(flashrag) + "\n")
    passages = load_passages(file)
    assert [passage.title for passage in passages] == ["q1", "q1", "q1", "T"]
    assert [len(passage.text.split()) for passage in passages] == [100, 100, 50, 2]
    assert passages[3].text == "one. two."


def written(folder: Path, *records: dict) -> Path:
    file = folder / "corpus.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"id": "7", "title": "Varga", "contents": "It is\nhigh."}, Passage("7", "Varga", "It is\nhigh.")),
        (
            {"id": "7", "title": "Varga", "contents": '"Varga"\nIt is high.'},
            Passage("7", "Varga", "It is high."),
        ),
        ({"id": "7", "contents": '"Varga"\n'}, Passage("7", "Varga", "")),
        ({"id": "7", "contents": "Varga"}, Passage("7", "", "Varga")),
        ({"id": "7", "contents": '"I came"'}, Passage("7", "", '"I came"')),
        ({"_id": "7", "title": "Varga", "text": "", "metadata": {}}, Passage("7", "Varga", "")),
        ({"_id": "7", "title": "Varga"}, Passage("7", "Varga", "")),
        ({"_id": "7", "title": None, "text": "High."}, Passage("7", "", "High.")),
        ({"pid": "7", "passage": "High.", "docid": "9"}, Passage("7", "", "High.")),
        ({"docid": "7", "title": "Varga", "body": "High.", "url": "x"}, Passage("7", "Varga", "High.")),
        ({"id": "7", "title": "Varga", "text": "", "contents": "High."}, Passage("7", "Varga", "High.")),
        (
            {"id": "7", "title": " ", "text": " \n", "contents": '"Varga"\nHigh.'},
            Passage("7", "Varga", "High."),
        ),
        (
            {"id": "7", "title": "Varga", "text": [["It is.", " High."], ["Old."]]},
            Passage("7", "Varga", "It is. High. Old."),
        ),
    ],
)
def test_titles_are_read_and_may_have_no_text(tmp_path: Path, record: dict, expected: Passage) -> None:
    assert load_passages(written(tmp_path, record)) == [expected]


def test_documents_with_neither_title_nor_text_are_excluded_and_counted(tmp_path: Path, caplog) -> None:
    empty = ({"id": "a", "title": "", "text": " "}, {"id": "b", "contents": ""}, {"id": "c", "title": None})
    file = written(tmp_path, *empty, {"id": "d", "text": "x"})
    excluded: list[str] = []
    assert [passage.id for passage in iter_passages(file, excluded=excluded)] == ["d"]
    assert excluded == [f"line {line}: neither a title nor a text" for line in (1, 2, 3)]
    assert "excluded 3 records of 4 (line 1: neither" in caplog.text
    with pytest.raises(UserError, match="none of its 3 records can be used"):
        load_passages(written(tmp_path, *empty))


TEXT_POOLS = [
    {
        "question": "?",
        "answers": ["x"],
        "ctxs": [{"id": "wiki:1", "title": "Oslo", "text": "A city.", "score": "7.2"}],
    },
    {
        "question": "?",
        "reference": ["x"],
        "contexts": [{"title": "Oslo", "text": "A city.", "is_supporting": True}],
    },
    {
        "question": "?",
        "positive_ctxs": [{"title": "Oslo", "text": "A city."}],
        "negative_ctxs": [],
        "answers": [],
    },
    {
        "input": "?",
        "context": "Passage 1:\nOslo\nA city.\n\nPassage 2:\nOslo\nA city.",
        "answers": ["x"],
        "_id": "ab",
    },
    {"question": "?", "title": "Oslo", "context": "A city.", "answers": {"text": ["x"], "answer_start": [0]}},
    {"question": "?", "context": '[["Oslo", ["A city."]]]'},
    {"question": "?", "context": "[['Oslo', ['A city.']]]"},
    {"question": "?", "context": [["Oslo", ["A city."]], ["", [""]]]},
]


@pytest.mark.parametrize("record", TEXT_POOLS)
def test_passages_of_reader_datasets_and_long_contexts_are_read(tmp_path: Path, record: dict) -> None:
    assert load_passages(written(tmp_path, record)) == [PAIR[0]]


def test_the_squad_file_is_read_as_a_corpus_of_its_paragraphs(tmp_path: Path) -> None:
    file = tmp_path / "dev-v2.0.json"
    questions = [{"id": "1", "question": "?", "answers": []}, {"id": "2", "question": "?", "answers": []}]
    article = {"title": "Oslo", "paragraphs": [{"context": "A city.", "qas": questions}]}
    file.write_text(json.dumps({"version": "v2.0", "data": [article]}))
    assert load_passages(file) == [PAIR[0]]


def test_a_question_passage_with_an_unknown_text_field_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path, {"question": "?", "ctxs": [{"title": "Oslo", "words": "A city."}]})
    with pytest.raises(UserError, match="ctxs: a passage without a text; found the fields title, words"):
        load_passages(file)


def test_kilt_documents_have_their_title_and_id(tmp_path: Path) -> None:
    record = {"_id": "290", "wikipedia_id": "290", "wikipedia_title": "A", "text": ["A is", "a letter."]}
    (tmp_path / "kilt.jsonl").write_text(json.dumps(record) + "\n")
    assert load_passages(tmp_path / "kilt.jsonl") == [Passage("290", "A", "A is a letter.")]


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (
            '["Marta Quell designed it.", " It has nine arches."]',
            "Marta Quell designed it. It has nine arches.",
        ),
        ("['It joins the Dorn.']", "It joins the Dorn."),
        ("[1] It joins the Dorn.", "[1] It joins the Dorn."),
        ("[1, 2]", "[1, 2]"),
    ],
)
def test_a_list_of_sentences_as_text_is_read_as_sentences(tmp_path: Path, cell: str, text: str) -> None:
    file = tmp_path / "corpus.tsv"
    file.write_text(f"id\ttitle\ttext\n1\tOrla Viaduct\t{cell}\n", encoding="utf-8")
    assert load_passages(file) == [Passage("1", "Orla Viaduct", text)]
