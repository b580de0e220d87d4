"""Read records from CSV and TSV files, with or without a header. Read `read_table` first.

Without a header, the meaning of the columns is inferred, and UserError is raised if it is not clear.

Quoted cells may hold line breaks. Some TSV files do not quote cells at all, and a cell may begin with a quotation mark that is
never closed (MS MARCO's collection.tsv). In such a file each line with the right number of cells is a record.
"""

import collections
import itertools
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from rrl.data.decoding import BrokenRecord
from rrl.data.field_names import (
    ANSWER_FIELDS,
    CANONICAL_NAMES,
    PASSAGE_ID_FIELDS,
    PREDICTION_NAMES,
    QUESTION_FIELDS,
    QUESTION_ID_FIELDS,
    TEXT_FIELDS,
)
from rrl.data.table_rows import Row, RowReader
from rrl.errors import UserError

HEADER_WORDS = ("text", "question")
"""A first line with one of these names is a header. Without one of these, it is a header if it has two other known names."""

MAX_NAME_LENGTH = 40
"""Maximum number of characters in a column name."""

SAMPLE_RECORDS = 100
"""Number of records from which the meaning of the columns is inferred if there is no header."""

ALLOWED_COLUMNS = ("id", "title", "text", "-")
"""Names that a caller may give to columns; "-" is a column to ignore."""


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
    rows = RowReader(path, stream, len(columns)).rows()
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
        if row.fault:
            record = BrokenRecord(row.fault)
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


def _column_names(path: Path, rows: list[Row], columns: Sequence[str]) -> tuple[list[str], list[Row]]:
    """Return the names of the columns and the rows without the header, and log the meaning of each column."""
    readable = [row for row in rows if not row.fault]
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
        names = _infer_columns(path, readable, rows[0].fault)
    labels = head_cells if header else [f"column {at}" for at in range(1, len(names) + 1)]
    source = (
        "as given" if columns else "from the header" if header else "inferred, because there is no header"
    )
    logging.getLogger(__name__).info("%s: %s; %s", path, ", ".join(_describe_columns(names, labels)), source)
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


def _describe_columns(names: Sequence[str], labels: Sequence[str]) -> Iterator[str]:
    """Yield "label as role" for each column with a role, and the label alone for the others."""
    roles = {
        next(name for name in known if name in names): role
        for role, known in _ROLES
        if any(name in names for name in known)
    }
    for name, label in zip(names, labels):
        yield f"{label} as {roles[name]}" if name in roles else label or "(no name)"


def _is_header(cells: Sequence[str]) -> bool:
    """Return whether a row holds column names. A row with a number or a long cell never does."""
    if any(len(cell) > MAX_NAME_LENGTH or cell.isdigit() for cell in cells):
        return False
    known = [CANONICAL_NAMES[cell.lower()] for cell in cells if cell.lower() in CANONICAL_NAMES]
    return len(known) > 1 or any(name in HEADER_WORDS for name in known)


def _is_unknown_header(rows: Sequence[Row], columns: Sequence[str]) -> bool:
    """Return whether the first row is a header with unknown names: its id is not a number, but all other ids are."""
    if "id" not in columns or len(rows) < 2:
        return False
    column = columns.index("id")
    ids = [row.cells[column] for row in rows if len(row.cells) == len(columns)]
    return len(ids) > 1 and not ids[0].isdigit() and all(identity.isdigit() for identity in ids[1:])


def _infer_columns(path: Path, rows: Sequence[Row], fault: str) -> list[str]:
    """Infer the meaning of the columns from the first records.

    The supported forms are a question with a list of answers (DPR), an id with a text, and an id with a text and a title that is
    at most half as long. Raises UserError for other forms, and if the first record may be a header with other names.

    Args:
      path: the file, for errors.
      rows: the first records.
      fault: what is wrong with the first line, if anything is.
    """
    cells = [row.cells for row in rows]
    size = len(cells[0])
    if all(len(row) == size for row in cells):
        if size == 2 and all(re.fullmatch(r"\[.*\]", row[1].strip(), re.S) for row in cells):
            return ["question", "answers"]
        has_ids = all(re.fullmatch(r"\S{1,64}", row[0]) for row in cells) and not _may_be_header(cells)
        if size in (2, 3) and has_ids:
            if size == 2 and all(_is_text(row[1]) for row in cells):
                return ["id", "text"]
            for title, text in ((1, 2), (2, 1)) if size == 3 else ():
                if all(_is_text(row[text]) and len(row[text]) >= 2 * len(row[title]) for row in cells):
                    return ["id", "title", "text"] if title == 1 else ["id", "text", "title"]
    shown = ", ".join(repr(cell if len(cell) <= 30 else cell[:27] + "...") for cell in cells[0][:8])
    raise UserError(
        f"{path}, line {rows[0].line}: {shown} is not a header with names such as id, title and text, or question and answer, "
        f"and it is not clear what each column holds{f' (the first line, which may name them, is {fault})' if fault else ''}. "
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


def _has_inline_titles(rows: Iterable[Row]) -> bool:
    """Return whether every text of a two-column table has the form `_INLINE_TITLE`."""
    cells = [row.cells for row in rows if not row.fault]
    return bool(cells) and all(len(row) == 2 and _INLINE_TITLE.fullmatch(row[1]) for row in cells)


def _split_inline_title(text: str) -> dict[str, str]:
    """Return title and text of a text of the form `_INLINE_TITLE`; an empty dict for any other text."""
    match = _INLINE_TITLE.fullmatch(text)
    return {"title": match[1], "text": match[2]} if match else {}
