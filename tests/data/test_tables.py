"""Tests of CSV and TSV files: where records end, and the meaning of columns."""

import bz2
import csv
import gzip
import io
import logging
import time
from pathlib import Path

import pytest

from rrl.data.passages import Passage, load_passages
from rrl.data.questions import load_questions
from rrl.data.records import read_records
from rrl.data.table_rows import MAX_CELL_LINES
from rrl.errors import UserError


def written(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text)
    return file


def test_line_breaks_in_quoted_cells_belong_to_the_passage(tmp_path: Path) -> None:
    text = "The viaduct has nine arches.\nIt was designed by Marta Quell, an engineer.\n\nIt opened in 1913."
    file = written(
        tmp_path,
        "lines.csv",
        f'id,title,text\n1,Orla Viaduct,"{text}"\n2,Sela River,The river joins the Dorn.\n',
    )
    expected = [Passage("1", "Orla Viaduct", text), Passage("2", "Sela River", "The river joins the Dorn.")]
    assert load_passages(file) == load_passages(file, "skip") == expected
    assert [place for place, _ in read_records(file)] == ["line 2", "line 6"]


@pytest.mark.parametrize(("ending", "delimiter"), [(".csv", ","), (".tsv", "\t")])
def test_tables_written_by_the_csv_module_are_read_back(tmp_path: Path, ending: str, delimiter: str) -> None:
    cells = ["plain", 'a "quoted" word', '"', '"begins', "two\nlines", "a,b\tc", '\n"x"\n', "Ærø, 東京", '""']
    rows = [[str(at), title, f"{text} x"] for at, (title, text) in enumerate(zip(cells, reversed(cells)))]
    for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_ALL):
        for end in ("\n", "\r\n"):
            stream = io.StringIO()
            writer = csv.writer(stream, delimiter=delimiter, quoting=quoting, lineterminator=end)
            writer.writerows([["id", "title", "text"], *rows])
            file = tmp_path / f"table{ending}"
            file.write_bytes(b"\xef\xbb\xbf" + stream.getvalue().encode())
            assert [list(record.values()) for _, record in read_records(file)] == rows


def test_a_cell_longer_than_the_csv_modules_limit_is_read_whole(tmp_path: Path) -> None:
    limit = csv.field_size_limit(131_072)
    try:
        long = "A long report about canals. " * 6000
        text = f'id\ttext\ttitle\n1\t{long}\tCanal report\n2\t"{long}""x"""\tCanals\n'
        file = written(tmp_path, "corpus.tsv", text)
        first, second = load_passages(file)
        assert (first.text, second.text) == (long.strip(), f'{long}"x"')
    finally:
        csv.field_size_limit(limit)


def test_tabs_and_line_breaks_in_one_quoted_cell_of_a_tsv_file(tmp_path: Path) -> None:
    text = 'a\tb\nc\td "e"\nf'
    quoted = text.replace('"', '""')
    for body in (f'"1"\t"{quoted}"\n', f'0\t"x\ty"\n1\t"{quoted}"\n', f'1\t"{quoted}"\n'):
        passages = load_passages(written(tmp_path, "a.tsv", "id\ttext\n" + body + "2\tthe next\n"))
        assert [passage.text for passage in passages[-2:]] == [text, "the next"]


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress])
def test_tables_and_json_may_be_compressed(tmp_path: Path, pack) -> None:
    ending = {gzip.compress: ".gz", bz2.compress: ".bz2"}[pack]
    table, lines = tmp_path / f"a.csv{ending}", tmp_path / f"wiki_00{ending}"
    table.write_bytes(pack(b"docid,contents,title\n5,It joins the Dorn.,Sela River\n"))
    lines.write_bytes(
        pack(
            b'{"id": "5", "title": "Sela River", "text": ["It joins", " the Dorn."], "charoffset": [[[0, 5]]]}\n'
        )
    )
    assert load_passages(table) == load_passages(lines) == [Passage("5", "Sela River", "It joins the Dorn.")]
    table.write_bytes(table.read_bytes()[:-8])
    with pytest.raises(UserError, match=r"cannot be read"):
        load_passages(table)


def test_a_file_that_is_not_quoted_is_read_line_by_line(tmp_path: Path) -> None:
    """MS MARCO's collection.tsv has no header and no quoting."""
    text = '0\t"Hello, he said and left.\n1\tThe "Orla" viaduct.\n2\t"Sela" is a river.\n3\t"and 12"\n4\tThe last one.\n'
    passages = load_passages(written(tmp_path, "collection.tsv", text))
    assert [passage.text for passage in passages] == [
        '"Hello, he said and left.',
        'The "Orla" viaduct.',
        '"Sela" is a river.',
        "and 12",
        "The last one.",
    ]
    assert [passage.id for passage in passages] == list("01234")


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("a.csv", 'id,text\n1,"never closed\n2,a b\n', 2),
        ("a.csv", 'id,text\n1,a b\n2,"He said "hi", and left"\n3,c d\n', 3),
        ("a.tsv", 'id\ttext\n1\t"He said "hi"\nand left"\n2\ta b\n', 2),
        ("a.tsv", 'id\ttext\n1\ta b\n2\t"never closed\nat all\n', 3),
        ("a.tsv", 'id\ttitle\ttext\n1\t"open\n2\tT\ta b\n3\tT\t5"\n', 2),
        ("a.csv", 'id,title,text\n1,"open\n2,T,a b\n3,T,5"\n4,T,c d\n', 2),
    ],
)
def test_ambiguous_quotes_are_refused_even_if_broken_records_are_skipped(
    tmp_path: Path, name: str, text: str, line: int
) -> None:
    for on_error in ("refuse", "skip"):
        with pytest.raises(UserError, match=rf"{name}, line {line}: .* where this record ends"):
            load_passages(written(tmp_path, name, text), on_error)  # type: ignore[arg-type]


def test_a_passage_that_may_continue_on_a_broken_line_is_skipped_with_it(tmp_path: Path) -> None:
    file = written(tmp_path, "a.tsv", "id\ttext\n1\tfirst\n2\tThe second\nends here.\n3\tthird\n")
    skipped: list[str] = []
    assert [passage.id for passage in load_passages(file, "skip", skipped)] == ["1", "3"]
    assert [place.split(":")[0] for place in skipped] == ["line 3", "line 4"]
    with pytest.raises(UserError, match=r"a.tsv, line 3: line 4 has 1 columns instead of 2"):
        load_passages(file)


def test_invalid_utf8_breaks_only_its_own_record(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes(b'id,text\n1,a b\n2,"one\n\xff two"\n3,c\xff d\n4,e f\n')
    skipped: list[str] = []
    assert [passage.id for passage in load_passages(file, "skip", skipped)] == ["1", "4"]
    assert [place[:16] for place in skipped] == ["line 3: not UTF-", "line 5: not UTF-"]


def test_a_cell_of_many_quoted_lines_is_read_in_one_pass(tmp_path: Path) -> None:
    text = '<a href="x">\n' * 20_000
    quoted = text.replace('"', '""')
    file = written(tmp_path, "a.csv", f'id,text\n1,"{quoted}end"\n2,a b\n')
    began = time.process_time()
    assert [passage.text for passage in load_passages(file)] == [text + "end", "a b"]
    assert time.process_time() - began < 2


def test_a_large_table_is_read_record_by_record(tmp_path: Path) -> None:
    file = written(tmp_path, "a.csv", "id,text\n" + "1,a b\n" * 500 + '2,"no end\n' + "x\n" * 10)
    records = read_records(file)
    assert [next(records)[1] for _ in range(400)] == [{"id": "1", "text": "a b"}] * 400
    assert MAX_CELL_LINES >= 10_000


ORDERS = {
    "dpr.tsv": "id\ttext\ttitle\n7\tIt joins the Dorn.\tSela River\n",
    "spelled.csv": "DocID,Title,Passage\n7,Sela River,It joins the Dorn.\n",
    "flashrag.csv": 'id,contents\n7,"""Sela River""\nIt joins the Dorn."\n',
    "beir.csv": "_id,title,text,metadata\n7,Sela River,It joins the Dorn.,{}\n",
    "msmarco.tsv": "pid\tbody\ttitle\n7\tIt joins the Dorn.\tSela River\n",
    "no_header_1.tsv": "7\tSela River\tIt joins the Dorn after many kilometres.\n",
    "no_header_2.tsv": "7\tIt joins the Dorn after many kilometres.\tSela River\n",
    "inside.tsv": "7\tTitle: Sela River Text: It joins the Dorn.\n",
    "tabs.csv": "id\ttitle\ttext\n7\tSela River\tIt joins the Dorn.\n",
    "commas.tsv": "id,title,text\n7,Sela River,It joins the Dorn.\n",
}


@pytest.mark.parametrize("name", ORDERS)
def test_columns_are_identified_by_name_or_by_an_unambiguous_order(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        (passage,) = load_passages(written(tmp_path, name, ORDERS[name]))
    assert (passage.id, passage.title) == ("7", "Sela River")
    assert passage.text.startswith("It joins the Dorn")
    assert caplog.text.count(" as id, ") == 1 and " as text" in caplog.text
    assert ("from the header" in caplog.text) != ("inferred, because there is no header" in caplog.text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "nr\tname\tdescription\n1\tSela\tIt joins the Dorn.\n",
            "'nr', 'name', 'description' is not a header",
        ),
        (
            "1\tIt is a river.\tIt has a long title\n",
            "not clear what each column holds.*--columns=id,text,title",
        ),
        ("1\tSela\tIt joins the Dorn.\n2\tIt joins the Dorn.\tSela\n", "not clear"),
        ("1\tSela\tx\ty\n", "not clear"),
        ("who sang it\tZoe\n", "'who sang it', 'Zoe' is not a header"),
        ("id\ttext\ttext\n1\ta\tb\n", "the column 'text' occurs twice in the header id, text, text"),
        ("id\tname\tlink\n1\tSela\tx\n", "'id', 'name', 'link' is not a header"),
        (
            "passage_number\tthe passage text\n1\tIt joins the Dorn.\n2\tIt has nine arches.\n",
            "'passage_number', 'the passage text' is not a header.*, replace it",
        ),
        (
            "key\tname\tall of the description\nd1\tSela\tIt joins the Dorn.\nd2\tOrla\tIt has nine arches.\n",
            "'key', 'name', 'all of the description' is not a header",
        ),
    ],
)
def test_ambiguous_columns_are_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UserError, match=rf"a.tsv, line 1: .*{words}"):
        load_passages(written(tmp_path, "a.tsv", text))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            "id,title,text\n1,Sela,It joins the Dorn.\n".encode("utf-16"),
            "the first line.* is UTF-16, not UTF-8",
        ),
        ("id,t\xeftel,text\n1,Sela,x\n".encode("latin-1"), "the first line.* is not UTF-8"),
        (b"id,title,text\r1,Sela,It joins the Dorn.\r", "carriage returns alone. Save it with line feeds"),
    ],
)
def test_a_header_that_cannot_be_read_is_named(tmp_path: Path, data: bytes, words: str) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes(data)
    with pytest.raises(UserError, match=rf"a.csv.*{words}"):
        load_passages(file)


def test_questions_with_lists_of_answers_need_no_digits(tmp_path: Path) -> None:
    text = "who designed it\t['Marta Quell']\nwhat opened in 1913\t['the viaduct']\n"
    assert len(load_questions(written(tmp_path, "nq.qa.csv", text))) == 2


def test_given_columns_override_the_header_which_is_not_a_passage(tmp_path: Path) -> None:
    expected = [Passage("1", "Sela", "It joins the Dorn."), Passage("2", "Orla", "It has nine arches.")]
    body = "1\tx\tIt joins the Dorn.\tSela\n2\ty\tIt has nine arches.\tOrla\n"
    for header in ("", "id\tlink\ttext\ttitle\n", "nr\tlink\twords\tname\n"):
        file = written(tmp_path, "a.tsv", header + body)
        assert list(_named(file, "id,-,text,title")) == expected
    for columns in ("id,name", "id,id,text", "id"):
        with pytest.raises(UserError, match=rf"columns={columns}: not the columns of .*a.tsv"):
            list(_named(file, columns))
    with pytest.raises(UserError, match="is not a table"):
        list(_named(written(tmp_path, "a.jsonl", '{"text": "x"}'), "id,text"))


def _named(file: Path, columns: str):
    from rrl.data.passages import iter_passages

    return iter_passages(file, columns=columns.split(","))


def test_published_question_tables_are_read(tmp_path: Path) -> None:
    dpr = "who designed it\t['Marta Quell', \"M. O'Quell\"]\nwhen was it opened\t['1913']\n"
    simpleqa = "metadata,problem,answer\n\"{'topic': 'Art', 'urls': ['x']}\",Who designed it?,Marta Quell\n"
    frames = "\tPrompt\tAnswer\twiki_links\n0\tWho designed it?\tMarta Quell\t['x']\n"
    answers = {
        name: [question.answers for question in load_questions(written(tmp_path, name, text))]
        for name, text in (("nq-test.qa.csv", dpr), ("simple_qa.csv", simpleqa), ("frames.tsv", frames))
    }
    assert answers == {
        "nq-test.qa.csv": [("Marta Quell", "M. O'Quell"), ("1913",)],
        "simple_qa.csv": [("Marta Quell",)],
        "frames.tsv": [("Marta Quell",)],
    }


def test_a_passage_whose_title_is_a_column_name_is_not_a_header(tmp_path: Path) -> None:
    text = "1\tQuestion\tA question is an utterance that asks for information.\n2\tText\tA text is what can be read by anyone.\n"
    assert [passage.title for passage in load_passages(written(tmp_path, "a.tsv", text))] == [
        "Question",
        "Text",
    ]


def test_an_empty_table_is_refused(tmp_path: Path) -> None:
    for text in ("", "id\ttext\n"):
        with pytest.raises(UserError, match="the file is empty"):
            load_passages(written(tmp_path, "a.tsv", text))
