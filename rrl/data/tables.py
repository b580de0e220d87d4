"""Read records from CSV and TSV files, with or without a header. Read `read_table` first.

Without a header, the meaning of the columns is inferred, and UserError is raised if it is not clear.

Quoted cells may hold line breaks. Some TSV files do not quote cells at all, and a cell may begin with a quotation mark that is
never closed (MS MARCO's collection.tsv). In such a file each line with the right number of cells is a record.
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

PASSAGE_ID_FIELDS = ("id", "_id", "pid", "docid", "doc_id", "passage_id", "psg_id", "docno")
"""Field names of the id of a passage. Several names of a tuple may be present; the first one is then used, here and below, except
in `ANSWER_FIELDS`."""
QUESTION_ID_FIELDS = ("id", "_id", "question_id", "QuestionId", "query_id", "qid")
"""Field names of the id of a question."""
TEXT_FIELDS = ("text", "body", "passage", "content", "document", "paragraph_text")
"""Field names of the text of a passage. `contents` is another one: its first line is the title if the record has no title."""
QUESTION_FIELDS = ("question", "text", "query", "Question", "problem", "prompt", "input")
"""Field names of a question."""
ANSWER_FIELDS = (
    "answers",
    "golden_answers",
    "answer",
    "answer_aliases",
    "possible_answers",
    "Answer",
    "reference",
)
"""Field names of gold answers. A record may have several of them, and all are used."""
PREDICTION_NAMES = (
    "prediction",
    "predictions",
    "pred",
    "pred_ans",
    "predicted_answer",
    "output",
    "response",
    "result",
)
"""Field names of a prediction."""

CANONICAL_NAMES = {
    name.lower(): name
    for names in (
        ("title", "contents", "metadata"),
        (
            *PREDICTION_NAMES,
            *ANSWER_FIELDS,
            *QUESTION_FIELDS,
            *TEXT_FIELDS,
            *QUESTION_ID_FIELDS,
            *PASSAGE_ID_FIELDS,
        ),
    )
    for name in names
} | {"question": "question", "answer": "answer"}
"""Known column names by their lower-case form. "question" and "answer" stay lower-case, although "Question" and "Answer" are
known names too."""

HEADER_WORDS = ("text", "question")
"""A first line with one of these names is a header. Without one of these, it is a header if it has two other known names."""

MAX_NAME_LENGTH = 40
"""Maximum number of characters in a column name."""

SAMPLE_RECORDS = 100
"""Number of records from which the meaning of the columns is inferred if there is no header."""

MAX_CELL_LINES = 100_000
"""Maximum number of lines in a quoted cell."""

ALLOWED_COLUMNS = ("id", "title", "text", "-")
"""Names that a caller may give to columns; "-" is a column to ignore."""


class _Row(NamedTuple):
    """A record of a table before its columns have names."""

    line: int
    """Number of its first line, counted from 1."""
    cells: list[str]
    broken: str = ""
    """Why the record could not be read; "" if it could."""


def read_table(
    path: Path, stream: BinaryIO, columns: Sequence[str] = ()
) -> Iterator[tuple[str, dict[str, Any] | BrokenRecord]]:
    """Yield ("line 7", {column: cell}) for each record of a CSV or TSV file. Only a few records are held in memory.

    A record whose number of cells differs from that of the header is broken. If it has fewer cells, the record before it is
    broken too: the shorter line may be the rest of its text.

    Args:
      path: the file, for error messages and the log.
      stream: its decompressed bytes.
      columns: the meaning of each column (see `ALLOWED_COLUMNS`); replaces the names of the header. Without `columns` and
        without a header, the meaning is inferred from the first records.

    Raises:
      UserError: the meaning of a column is not clear, or the quotes do not show where a record ends.
    """
    _check_columns(path, columns)
    rows = _RowReader(path, stream, len(columns)).rows()
    first = list(itertools.islice(rows, SAMPLE_RECORDS))
    names, first = _column_names(path, first, columns)
    split_title = not columns and names == ["id", "text"] and _has_inline_titles(first)
    if split_title:
        logging.getLogger(__name__).info(
            "%s: each text has the form 'Title: ... Text: ...' and is split", path
        )
    previous: tuple[str, dict[str, Any] | BrokenRecord] | None = None
    for row in itertools.chain(first, rows):
        place = f"line {row.line}"
        record: dict[str, Any] | BrokenRecord
        if row.broken:
            record = BrokenRecord(row.broken)
        elif len(row.cells) != len(names):
            record = BrokenRecord(f"{len(row.cells)} columns instead of {len(names)} ({', '.join(names)})")
            if previous and len(row.cells) < len(names) and not isinstance(previous[1], BrokenRecord):
                reason = f"{place} has {record.reason} and may be the rest of this record"
                previous = previous[0], BrokenRecord(reason)
        else:
            record = {
                name: cell for name, cell in zip(names, row.cells, strict=True) if name not in ("", "-")
            }
            if split_title:
                record |= _split_inline_title(record["text"])
        if previous:
            yield previous
        previous = place, record
    if previous:
        yield previous


class _RowReader:
    """Splits lines into records. It reads ahead inside quoted cells, and three lines at the beginning to guess the delimiter."""

    def __init__(self, path: Path, stream: BinaryIO, width: int = 0) -> None:
        """`width`: the number of columns; 0: the number of cells of the first record."""
        self._path, self._width = path, width
        self._lines = enumerate(stream, 1)
        self._ahead: collections.deque[tuple[int, str, str]] = collections.deque()
        self._delimiter = self._guess_delimiter()
        self._quoted = self._delimiter == ","
        """Whether the file quotes cells. True for CSV; for TSV, True once a record shows it (see `_shows_quoting`)."""

    def rows(self) -> Iterator[_Row]:
        """Yield every record; empty lines are skipped."""
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
        """Return number, text and fault of the line `at` lines ahead, or None at the end of the file."""
        while len(self._ahead) <= at:
            number, data = next(self._lines, (0, b""))
            if not number:
                return None
            text = decode(data)
            broken = text.reason if isinstance(text, BrokenRecord) else ""
            readable = data.decode("utf-8-sig", "replace") if isinstance(text, BrokenRecord) else text
            self._ahead.append((number, readable.rstrip("\r\n"), broken))
        return self._ahead[at]

    def _guess_delimiter(self) -> str:
        """Guess the delimiter from the file name, unless the first lines contradict it: DPR's *.qa.csv use tabs."""
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
        """Return the record whose first line is `text`. If it spans more lines, they are removed from `_ahead`."""
        if '"' not in text:
            return _Row(line, text.split(self._delimiter))
        try:
            cells = _cells(text, self._delimiter)
            self._quoted = self._quoted or self._shows_quoting(text, cells)
            return _Row(line, cells)
        except csv.Error as error:
            if not _is_open(error):
                return self._unquoted_row(line, text, str(error))
        return self._multiline_row(line, text) or self._unquoted_row(
            line, text, "a quoted cell is not closed"
        )

    def _multiline_row(self, line: int, text: str) -> _Row | None:
        """Return a record whose first line `text` ends inside a quoted cell. Its further lines are removed from `_ahead`.

        Returns None if no line closes the cell, if the result has the wrong number of cells, or if each line is a whole record
        and the file is not known to quote cells.
        """
        width, lines, faults = self._width or self._count_cells(text), [text], [""]
        quotes = _count_quotes(text)
        while (ahead := self._peek(len(lines) - 1)) is not None and len(lines) < MAX_CELL_LINES:
            _, next_line, broken = ahead
            lines.append(next_line)
            faults.append(broken)
            quotes += _count_quotes(next_line)
            if quotes % 2:
                continue  # the cell is still open
            try:
                cells = _cells("\n".join(lines), self._delimiter)
            except csv.Error:
                return None
            if self._width and len(cells) != self._width:
                return None
            # Quotation marks that delimit or escape, and are not text of a cell.
            syntax_quotes = sum(map(_count_quotes, lines)) - sum(map(_count_quotes, cells))
            all_whole = all(self._count_cells(each) == width for each in lines)
            if not self._quoted and syntax_quotes <= 2 and all_whole:
                return None  # each line is a whole record, and nothing else shows that the file quotes cells
            for _ in lines[1:]:
                self._ahead.popleft()
            self._quoted = True
            return _Row(line, cells, next(filter(None, faults), ""))
        return None

    def _unquoted_row(self, line: int, text: str, error: str) -> _Row:
        """Return the line as one record, with its quotation marks. Raises UserError unless the file clearly has no quoting.

        A wrong guess could truncate a passage, or read a part of one as a record.
        """
        width, after = self._width or self._count_cells(text), self._peek(0)
        is_record = not self._quoted and self._count_cells(text) == width > 1
        if is_record and (after is None or not after[1].strip() or self._count_cells(after[1]) == width):
            return _Row(line, text.split(self._delimiter))
        raise UserError(
            f"{self._path}, line {line}: {error}, so it is not clear where this record ends. Write a quotation mark "
            'inside a quoted cell as "", and close every quoted cell.'
        )

    def _shows_quoting(self, text: str, cells: Sequence[str]) -> bool:
        """Return whether a record shows that the file quotes cells.

        It does if a quoted cell holds a delimiter or doubled quotation marks, or if several cells are quoted.
        """
        syntax_quotes = _count_quotes(text) - sum(map(_count_quotes, cells))
        return syntax_quotes > 2 or (syntax_quotes > 0 and any(self._delimiter in cell for cell in cells))

    def _count_cells(self, text: str) -> int:
        return text.count(self._delimiter) + 1


def _count_quotes(text: str) -> int:
    return text.count('"')


def _cells(text: str, delimiter: str) -> list[str]:
    """Parse the cells of one record. Raises csv.Error if the text is not exactly one record."""
    if len(text) > csv.field_size_limit():
        csv.field_size_limit(len(text))  # a limit of the whole process, which is never lowered
    records = csv.reader([line + "\n" for line in text.split("\n")], delimiter=delimiter, strict=True)
    cells = next(records)
    if next(records, None) is not None:
        raise csv.Error("a line break outside of quotes")
    return cells


def _is_open(error: csv.Error) -> bool:
    """Return whether the error is that the last cell of a record is not closed."""
    return "unexpected end of data" in str(error)


def _check_columns(path: Path, columns: Sequence[str]) -> None:
    """Raise UserError if `columns` are not names of `ALLOWED_COLUMNS`, each once, with a text or a title."""
    named = [name for name in columns if name != "-"]
    if columns and (
        not set(columns) <= set(ALLOWED_COLUMNS)
        or len(set(named)) < len(named)
        or not {"text", "title"} & set(named)
    ):
        raise UserError(
            f"columns={','.join(columns)}: not the columns of {path}. Name each column, in order, such as "
            "id,text,title: each of id, title and text at most once, with text or title among them, and - for a column to ignore."
        )


def _column_names(path: Path, rows: list[_Row], columns: Sequence[str]) -> tuple[list[str], list[_Row]]:
    """Return the names of the columns and the rows without the header, and log the meaning of each column."""
    readable = [row for row in rows if not row.broken]
    if not readable:
        return list(columns), rows
    head = readable[0]
    if any("\r" in cell for cell in head.cells):
        raise UserError(
            f"{path}: its lines end in carriage returns alone. Save it with line feeds, or with both, at their ends."
        )
    head_cells = [cell.strip() for cell in head.cells]
    names = list(columns)
    header = _is_header(head_cells) or (bool(columns) and _is_unknown_header(readable, columns))
    if not names and header:
        names = [CANONICAL_NAMES.get(name.lower(), name) for name in head_cells]
        repeated = [name for name, count in collections.Counter(filter(None, names)).items() if count > 1]
        if repeated:
            raise UserError(
                f"{path}, line {head.line}: the column {repeated[0]!r} occurs twice in the header {', '.join(head_cells)}. "
                "Rename one."
            )
    elif not names:
        names = _infer_columns(path, readable, rows[0].broken)
    logging.getLogger(__name__).info(
        "%s: %s; %s",
        path,
        ", ".join(
            _describe_columns(
                names, head_cells if header else [f"column {at}" for at in range(1, len(names) + 1)]
            )
        ),
        "as given" if columns else "from the header" if header else "inferred, because there is no header",
    )
    return names, [row for row in rows if not (header and row is head)]


_ROLES = (
    ("id", (*PASSAGE_ID_FIELDS, *QUESTION_ID_FIELDS)),
    ("title", ("title",)),
    ("question", tuple(name for name in QUESTION_FIELDS if name not in TEXT_FIELDS)),
    ("text", (*TEXT_FIELDS, "contents")),
    ("answer", ANSWER_FIELDS),
    ("prediction", PREDICTION_NAMES),
)
"""(role, column names that can have it), for the log. If a table has several of the names, the first has the role."""


def _describe_columns(names: Sequence[str], shown: Sequence[str]) -> Iterator[str]:
    """Yield "name as role" for each column with a role, and the name alone for the others."""
    roles = {
        next(name for name in known if name in names): role
        for role, known in _ROLES
        if any(name in names for name in known)
    }
    for name, cell in zip(names, shown):
        yield f"{cell} as {roles[name]}" if name in roles else cell or "(no name)"


def _is_header(cells: Sequence[str]) -> bool:
    """Return whether a row holds column names. A row with a number or a long cell never does."""
    if any(len(cell) > MAX_NAME_LENGTH or cell.isdigit() for cell in cells):
        return False
    known = [CANONICAL_NAMES[cell.lower()] for cell in cells if cell.lower() in CANONICAL_NAMES]
    return len(known) > 1 or any(name in HEADER_WORDS for name in known)


def _is_unknown_header(rows: Sequence[_Row], columns: Sequence[str]) -> bool:
    """Return whether the first row is a header with unknown names: its id is not a number, but all other ids are."""
    if "id" not in columns or len(rows) < 2:
        return False
    column = columns.index("id")
    ids = [row.cells[column] for row in rows if len(row.cells) == len(columns)]
    return len(ids) > 1 and not ids[0].isdigit() and all(identity.isdigit() for identity in ids[1:])


def _infer_columns(path: Path, rows: Sequence[_Row], broken: str) -> list[str]:
    """Infer the meaning of the columns from the first records.

    The supported forms are a question with a list of answers (DPR), an id with a text, and an id with a text and a title that is
    at most half as long. Raises UserError for other forms, and if the first record may be a header with other names.

    Args:
      path: the file, for errors.
      rows: the first records.
      broken: what is wrong with the first line, if anything is.
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
        f"{path}, line {rows[0].line}: {shown} is not a header with names such as id, title and text, or question and answer, "
        f"and it is not clear what each column holds{f' (the first line, which may name them, is {broken})' if broken else ''}. "
        "Add a header with such names as the first line; if this line is a header with other names, replace it. "
        "For a corpus, you can instead give launch/build_index.py --columns=id,text,title (in the order of the file)."
    )


def _may_be_header(cells: Sequence[Sequence[str]]) -> bool:
    """Return whether all ids but the first have a digit."""
    has_digit = [any(letter.isdigit() for letter in row[0]) for row in cells]
    return len(cells) > 1 and not has_digit[0] and all(has_digit[1:])


def _is_text(cell: str) -> bool:
    """Return whether a cell is a text rather than a column name: several words, or at least 20 characters."""
    return bool(re.search(r"\S\s+\S", cell)) or len(cell) >= 20


_INLINE_TITLE = re.compile(r"Title: (.+?) Text: (.*)", re.S)
"""How a two-column corpus may write the title of a passage into its text."""


def _has_inline_titles(rows: Iterable[_Row]) -> bool:
    """Return whether every text of a two-column table has the form `_INLINE_TITLE`."""
    cells = [row.cells for row in rows if not row.broken]
    return bool(cells) and all(len(row) == 2 and _INLINE_TITLE.fullmatch(row[1]) for row in cells)


def _split_inline_title(text: str) -> dict[str, str]:
    """Return title and text of a text of the form `_INLINE_TITLE`; an empty dict for any other text."""
    match = _INLINE_TITLE.fullmatch(text)
    return {"title": match[1], "text": match[2]} if match else {}
