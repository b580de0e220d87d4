"""Split CSV and TSV files into records of cells. Read `RowReader` first."""

import collections
import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from rrl.data.decoding import BrokenRecord, decode
from rrl.errors import UserError

MAX_CELL_LINES = 100_000
"""Maximum number of lines in a quoted cell."""


class Row(NamedTuple):
    """A record of a table before its columns have names."""

    line: int
    """Number of its first line, counted from 1."""
    cells: list[str]
    fault: str = ""
    """Why the record could not be read; "" if it could."""


class RowReader:
    """Splits lines into records. It reads ahead inside quoted cells, and three lines at the beginning to guess the delimiter."""

    def __init__(self, path: Path, stream: BinaryIO, width: int = 0) -> None:
        """`width`: the number of columns; 0: the number of cells of the first record."""
        self._path, self._width = path, width
        self._lines = enumerate(stream, 1)
        self._ahead: collections.deque[tuple[int, str, str]] = collections.deque()
        self._delimiter = self._guess_delimiter()
        self._quoted = self._delimiter == ","
        """Whether the file quotes cells. True for CSV; for TSV, True once a record shows it (see `_shows_quoting`)."""

    def rows(self) -> Iterator[Row]:
        """Yield every record; empty lines are skipped."""
        while self._peek(0) is not None:
            line, text, fault = self._ahead.popleft()
            if fault or not text.strip():
                if fault:
                    yield Row(line, [], fault)
                continue
            row = self._row(line, text)
            if not row.fault:
                self._width = self._width or len(row.cells)
            yield row

    def _peek(self, at: int) -> tuple[int, str, str] | None:
        """Return number, text and fault of the line `at` lines ahead, or None at the end of the file."""
        while len(self._ahead) <= at:
            number, data = next(self._lines, (0, b""))
            if not number:
                return None
            text = decode(data)
            fault = text.reason if isinstance(text, BrokenRecord) else ""
            readable = data.decode("utf-8-sig", "replace") if isinstance(text, BrokenRecord) else text
            self._ahead.append((number, readable.rstrip("\r\n"), fault))
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

    def _row(self, line: int, text: str) -> Row:
        """Return the record whose first line is `text`. If it spans more lines, they are removed from `_ahead`."""
        if '"' not in text:
            return Row(line, text.split(self._delimiter))
        try:
            cells = _cells(text, self._delimiter)
            self._quoted = self._quoted or self._shows_quoting(text, cells)
            return Row(line, cells)
        except csv.Error as error:
            if not _is_open(error):
                return self._unquoted_row(line, text, str(error))
        return self._multiline_row(line, text) or self._unquoted_row(
            line, text, "a quoted cell is not closed"
        )

    def _multiline_row(self, line: int, text: str) -> Row | None:
        """Return a record whose first line `text` ends inside a quoted cell. Its further lines are removed from `_ahead`.

        Returns None if no line closes the cell, if the result has the wrong number of cells, or if each line is a whole record
        and the file is not known to quote cells.
        """
        width, lines, faults = self._width or self._count_cells(text), [text], [""]
        quotes = _count_quotes(text)
        while (ahead := self._peek(len(lines) - 1)) is not None and len(lines) < MAX_CELL_LINES:
            _, next_line, fault = ahead
            lines.append(next_line)
            faults.append(fault)
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
            return Row(line, cells, next(filter(None, faults), ""))
        return None

    def _unquoted_row(self, line: int, text: str, error: str) -> Row:
        """Return the line as one record, with its quotation marks. Raises UserError unless the file clearly has no quoting.

        A wrong guess could truncate a passage, or read a part of one as a record.
        """
        width, after = self._width or self._count_cells(text), self._peek(0)
        is_record = not self._quoted and self._count_cells(text) == width > 1
        if is_record and (after is None or not after[1].strip() or self._count_cells(after[1]) == width):
            return Row(line, text.split(self._delimiter))
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
