"""CSV and TSV files: records whose quoted cells may hold line breaks, and columns found by the names in the header.

`read_table` is the entry. Files of some publishers are not quoted at all (MS MARCO's collection.tsv): a line of a TSV file that
has all its columns is a record by itself, even if a cell begins with a quotation mark that nothing closes.
"""

import collections
import csv
import itertools
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from rrl.data.decoding import BrokenRecord, decode
from rrl.errors import UserError

PASSAGE_IDS = ("id", "_id", "pid", "docid", "doc_id", "passage_id", "psg_id", "docno")
QUESTION_IDS = ("id", "_id", "question_id", "QuestionId", "query_id", "qid")
TEXTS = ("text", "body", "passage", "content", "document", "paragraph_text")
"""Names of a passage's text. `contents` is one too; without a title beside it, its first line may be the title."""
QUESTIONS = ("question", "text", "query", "Question", "problem", "prompt", "input")
ANSWERS = (
    "answers",
    "golden_answers",
    "answer",
    "answer_aliases",
    "possible_answers",
    "Answer",
    "reference",
)
PREDICTIONS = (
    "prediction",
    "predictions",
    "pred",
    "pred_ans",
    "predicted_answer",
    "output",
    "response",
    "result",
)

KNOWN = {
    name.lower(): name
    for names in (
        ("title", "contents", "metadata"),
        (*PREDICTIONS, *ANSWERS, *QUESTIONS, *TEXTS, *QUESTION_IDS, *PASSAGE_IDS),
    )
    for name in names
} | {"question": "question", "answer": "answer"}
"""Column names that are understood, whatever their case."""

ALONE = ("text", "question")
"""A first line with one of these names is a header; otherwise it takes two known names."""

NAME_LENGTH = 40
"""Characters of a column's name at most."""

SAMPLE = 100
"""Records without a header from which the meaning of the columns is inferred."""

CELL_LINES = 100_000
"""Lines of one quoted cell at most."""

COLUMNS = ("id", "title", "text", "-")
"""What a caller may name columns; "-" is not read."""


class _Row(NamedTuple):
    """A record of a table before its columns have names."""

    line: int
    """Number of its first line, counted from 1."""
    cells: list[str]
    broken: str = ""
    """Why it could not be read."""


def read_table(
    path: Path, stream: BinaryIO, columns: Sequence[str] = ()
) -> Iterator[tuple[str, dict[str, Any] | BrokenRecord]]:
    """Yields ("line 7", {column: cell}) for each record of a CSV or TSV file; memory holds a few records.

    Args:
      path: the file, for messages and the log.
      stream: its bytes, decompressed.
      columns: the meaning of each column (see `COLUMNS`), in place of the header's names. Without a header and without these,
        the meaning is inferred from the first records, or asked for.

    A record with another number of cells than the header is broken. So is the one before it where the cells are fewer, since its
    text may go on there. Raises UserError for columns whose meaning is not clear, and for quotes that do not show where a record
    ends.
    """
    _check_columns(path, columns)
    rows = _Rows(path, stream, len(columns)).rows()
    first = list(itertools.islice(rows, SAMPLE))
    names, first = _names(path, first, columns)
    split_title = not columns and names == ["id", "text"] and _titles_inside(first)
    if split_title:
        logging.getLogger(__name__).info("%s: its texts, 'Title: ... Text: ...', are taken apart", path)
    before: tuple[str, dict[str, Any] | BrokenRecord] | None = None
    for row in itertools.chain(first, rows):
        place = f"line {row.line}"
        record: dict[str, Any] | BrokenRecord
        if row.broken:
            record = BrokenRecord(row.broken)
        elif len(row.cells) != len(names):
            record = BrokenRecord(f"{len(row.cells)} columns instead of {len(names)} ({', '.join(names)})")
            if before and len(row.cells) < len(names) and not isinstance(before[1], BrokenRecord):
                reason = f"{place} has {record.reason} and may be the rest of this record"
                before = before[0], BrokenRecord(reason)
        else:
            record = {
                name: cell for name, cell in zip(names, row.cells, strict=True) if name not in ("", "-")
            }
            if split_title:
                record |= _title_inside(record["text"])
        if before:
            yield before
        before = place, record
    if before:
        yield before


class _Rows:
    """Reads records from lines, looking ahead only inside a quoted cell."""

    def __init__(self, path: Path, stream: BinaryIO, width: int = 0) -> None:
        """`width` is the number of columns; 0: that of the first record."""
        self._path, self._width = path, width
        self._lines = enumerate(stream, 1)
        self._ahead: collections.deque[tuple[int, str, str]] = collections.deque()
        self._delimiter = self._guess_delimiter()
        self._quoted = self._delimiter == ","
        """Whether quotation marks enclose cells; of tabs that is not sure before a record shows it."""

    def rows(self) -> Iterator[_Row]:
        """Every record; empty lines are passed over."""
        while self._peek(0) is not None:
            line, text, broken = self._ahead.popleft()
            if broken or not text.strip():
                if broken:
                    yield _Row(line, [], broken)
                continue
            row = self._row(line, text)
            if not row.broken:
                self._width = self._width or len(row.cells)
            yield row

    def _peek(self, at: int) -> tuple[int, str, str] | None:
        """Number, text and fault of the line `at` lines ahead."""
        while len(self._ahead) <= at:
            number, data = next(self._lines, (0, b""))
            if not number:
                return None
            text = decode(data)
            broken = text.reason if isinstance(text, BrokenRecord) else ""
            plain = data.decode("utf-8-sig", "replace") if isinstance(text, BrokenRecord) else text
            self._ahead.append((number, plain.rstrip("\r\n"), broken))
        return self._ahead[at]

    def _guess_delimiter(self) -> str:
        """By the name, unless the first lines say otherwise: DPR's *.qa.csv have tabs."""
        lines = [self._peek(at) for at in range(3)]
        texts = [line[1] for line in lines if line and line[1].strip()]
        usual = "\t" if ".tsv" in self._path.suffixes else ","
        tabs = {text.count("\t") for text in texts}
        if usual == "," and len(tabs) == 1 and tabs != {0}:
            return "\t"
        if usual == "\t" and tabs == {0} and all("," in text for text in texts):
            return ","
        return usual

    def _row(self, line: int, text: str) -> _Row:
        if '"' not in text:
            return _Row(line, text.split(self._delimiter))
        try:
            cells = _cells(text, self._delimiter)
            self._quoted = self._quoted or self._shows_quoting(text, cells)
            return _Row(line, cells)
        except csv.Error as error:
            if not _is_open(error):
                return self._unquoted(line, text, str(error))
        return self._joined(line, text) or self._unquoted(line, text, "a quoted cell is not closed")

    def _joined(self, line: int, text: str) -> _Row | None:
        """The record that begins with a line whose last cell is open, with the lines that it goes on in; None if those do not
        close it."""
        size, group, faults = self._width or self._count(text), [text], [""]
        quotes = _marks(text)
        while (ahead := self._peek(len(group) - 1)) is not None and len(group) < CELL_LINES:
            _, more, broken = ahead
            group.append(more)
            faults.append(broken)
            quotes += _marks(more)
            if quotes % 2:
                continue  # the cell is still open
            try:
                cells = _cells("\n".join(group), self._delimiter)
            except csv.Error:
                return None
            if self._width and len(cells) != self._width:
                return None
            removed = sum(map(_marks, group)) - sum(map(_marks, cells))
            if not self._quoted and removed <= 2 and all(self._count(one) == size for one in group):
                return None  # each line is a whole record, and no other quotation marks say that it is not
            for _ in group[1:]:
                self._ahead.popleft()
            self._quoted = True
            return _Row(line, cells, next(filter(None, faults), ""))
        return None

    def _unquoted(self, line: int, text: str, error: str) -> _Row:
        """The line as it stands, where the file is not quoted; UserError where that is not sure.

        A guess could cut a passage, or take a part of one for a record.
        """
        size, after = self._width or self._count(text), self._peek(0)
        whole = not self._quoted and self._count(text) == size > 1
        if whole and (after is None or not after[1].strip() or self._count(after[1]) == size):
            return _Row(line, text.split(self._delimiter))
        raise UserError(
            f"{self._path}, line {line}: {error}, so that it cannot be seen where this record ends. Write a quotation mark "
            'inside a quoted cell as "", and close every quoted cell.'
        )

    def _shows_quoting(self, text: str, cells: Sequence[str]) -> bool:
        """Whether a record has a quoted cell that a file without quoting is unlikely to have: with a tab or doubled quotation
        marks in it, or beside another."""
        removed = _marks(text) - sum(map(_marks, cells))
        return removed > 2 or (removed > 0 and any(self._delimiter in cell for cell in cells))

    def _count(self, text: str) -> int:
        return text.count(self._delimiter) + 1


def _marks(text: str) -> int:
    return text.count('"')


def _cells(text: str, delimiter: str) -> list[str]:
    """The cells of one record; csv.Error if it is none."""
    if len(text) > csv.field_size_limit():
        csv.field_size_limit(len(text))  # of the whole process; it is never lowered
    records = csv.reader([line + "\n" for line in text.split("\n")], delimiter=delimiter, strict=True)
    cells = next(records)
    if next(records, None) is not None:
        raise csv.Error("a line break outside of quotes")
    return cells


def _is_open(error: csv.Error) -> bool:
    return "unexpected end of data" in str(error)


def _check_columns(path: Path, columns: Sequence[str]) -> None:
    named = [name for name in columns if name != "-"]
    if columns and (
        not set(columns) <= set(COLUMNS) or len(set(named)) < len(named) or not {"text", "title"} & set(named)
    ):
        raise UserError(
            f"columns={','.join(columns)}: not the columns of {path}. Give what each column is, in order, such as "
            "id,text,title: each of id, title, text once at most, text or title among them, and - for a column to pass over."
        )


def _names(path: Path, rows: list[_Row], columns: Sequence[str]) -> tuple[list[str], list[_Row]]:
    """The names of the columns, and the rows without the header; both are logged."""
    good = [row for row in rows if not row.broken]
    if not good:
        return list(columns), rows
    head = good[0]
    if any("\r" in cell for cell in head.cells):
        raise UserError(
            f"{path}: its lines end in carriage returns alone. Save it with line feeds, or with both, at their ends."
        )
    given = [cell.strip() for cell in head.cells]
    names = list(columns)
    header = _is_header(given) or (bool(columns) and _differs(good, columns))
    if not names and header:
        names = [KNOWN.get(name.lower(), name) for name in given]
        twice = [name for name, count in collections.Counter(filter(None, names)).items() if count > 1]
        if twice:
            raise UserError(
                f"{path}, line {head.line}: the column {twice[0]!r} is there twice in the header {', '.join(given)}. Rename one."
            )
    elif not names:
        names = _inferred(path, good, rows[0].broken)
    logging.getLogger(__name__).info(
        "%s: %s; %s",
        path,
        ", ".join(_taken(names, given if header else [f"column {at}" for at in range(1, len(names) + 1)])),
        "as given" if columns else "by the header" if header else "inferred, since there is no header",
    )
    return names, [row for row in rows if not (header and row is head)]


_ROLES = (
    ("id", (*PASSAGE_IDS, *QUESTION_IDS)),
    ("title", ("title",)),
    ("question", tuple(name for name in QUESTIONS if name not in TEXTS)),
    ("text", (*TEXTS, "contents")),
    ("answer", ANSWERS),
    ("prediction", PREDICTIONS),
)
"""What a column may be taken for, and its names, the first of which that is there is taken."""


def _taken(names: Sequence[str], shown: Sequence[str]) -> Iterator[str]:
    """For each column, what it is taken for."""
    roles = {
        next(name for name in known if name in names): role
        for role, known in _ROLES
        if any(name in names for name in known)
    }
    for name, cell in zip(names, shown):
        yield f"{cell} as {roles[name]}" if name in roles else cell or "(no name)"


def _is_header(cells: Sequence[str]) -> bool:
    """Whether a row is the names of columns; numbers and sentences are none, whatever word stands beside them."""
    if any(len(cell) > NAME_LENGTH or cell.isdigit() for cell in cells):
        return False
    known = [KNOWN[cell.lower()] for cell in cells if cell.lower() in KNOWN]
    return len(known) > 1 or any(name in ALONE for name in known)


def _differs(rows: Sequence[_Row], columns: Sequence[str]) -> bool:
    """Whether the first row has a word where all others have a number as their id: a header in words of its own."""
    if "id" not in columns or len(rows) < 2:
        return False
    at = columns.index("id")
    ids = [row.cells[at] for row in rows if len(row.cells) == len(columns)]
    return len(ids) > 1 and not ids[0].isdigit() and all(identity.isdigit() for identity in ids[1:])


def _inferred(path: Path, rows: Sequence[_Row], broken: str) -> list[str]:
    """The meaning of the columns where the first records leave no doubt: DPR's questions with lists of answers, or an id beside
    a text, or beside a text and a title of at most half its length. UserError otherwise, and where the first record may be a
    header of other names. `broken` is what is wrong with the first line, if anything is.
    """
    cells = [row.cells for row in rows]
    size = len(cells[0])
    if all(len(row) == size for row in cells):
        if size == 2 and all(re.fullmatch(r"\[.*\]", row[1].strip(), re.S) for row in cells):
            return ["question", "answers"]
        ids = all(re.fullmatch(r"\S{1,64}", row[0]) for row in cells) and not _may_be_header(cells)
        if size in (2, 3) and ids:
            if size == 2 and all(_is_text(row[1]) for row in cells):
                return ["id", "text"]
            for title, text in ((1, 2), (2, 1)) if size == 3 else ():
                if all(_is_text(row[text]) and len(row[text]) >= 2 * len(row[title]) for row in cells):
                    return ["id", "title", "text"] if title == 1 else ["id", "text", "title"]
    shown = ", ".join(repr(cell if len(cell) <= 30 else cell[:27] + "...") for cell in cells[0][:8])
    raise UserError(
        f"{path}, line {rows[0].line}: {shown} is no header with names such as id, title and text, or question and answer, and "
        f"it is not clear what each column holds{f' (the first line, which may say it, is {broken})' if broken else ''}. "
        "Put a line of such names above it, or in its place if it has other names; of a corpus, "
        "launch/build_index.py --columns=id,text,title (in the order of the file) says it too."
    )


def _may_be_header(cells: Sequence[Sequence[str]]) -> bool:
    """Whether the first record has no digit in its id, where all others have one."""
    has_digit = [any(letter.isdigit() for letter in row[0]) for row in cells]
    return len(cells) > 1 and not has_digit[0] and all(has_digit[1:])


def _is_text(cell: str) -> bool:
    """Whether it is more than a word; the name of a column is none."""
    return bool(re.search(r"\S\s+\S", cell)) or len(cell) >= 20


_TITLE_INSIDE = re.compile(r"Title: (.+?) Text: (.*)", re.S)
"""How a two-column corpus may write a passage with its title."""


def _titles_inside(rows: Iterable[_Row]) -> bool:
    cells = [row.cells for row in rows if not row.broken]
    return bool(cells) and all(len(row) == 2 and _TITLE_INSIDE.fullmatch(row[1]) for row in cells)


def _title_inside(text: str) -> dict[str, str]:
    found = _TITLE_INSIDE.fullmatch(text)
    return {"title": found[1], "text": found[2]} if found else {}
