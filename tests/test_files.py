"""Atomic writes, appending, JSON lines, and errors of failed saves."""

import errno
import os
import re
import stat
from pathlib import Path

import pytest

from rrl.errors import UserError
from rrl.files import (
    SaveError,
    append_bytes,
    atomic_stream,
    looked_in,
    read_json_lines,
    saving,
    shipped,
    write_atomically,
)


def test_a_file_is_replaced_with_the_default_permissions(tmp_path):
    write_atomically(tmp_path / "a.json", "old")
    write_atomically(tmp_path / "a.json", "näu\n")
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == "näu\n"
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE((tmp_path / "a.json").stat().st_mode) == 0o666 & ~mask


def test_a_failed_write_leaves_the_old_file_and_no_temporary_file(tmp_path):
    write_atomically(tmp_path / "a.json", "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(tmp_path / "a.json", "half \udc80")
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == "old"


def test_the_error_of_a_full_disk_names_the_file_of_the_stream(tmp_path):
    with pytest.raises(OSError, match=r"No space left.*a\.html"), atomic_stream(tmp_path / "a.html"):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_file_with_the_same_content_is_not_rewritten(tmp_path):
    file = tmp_path / "a.json"
    write_atomically(file, "old")
    before = file.stat()
    write_atomically(file, "old")
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_json_lines_have_their_line_numbers_and_an_incomplete_last_line_is_skipped(tmp_path):
    file = tmp_path / "a.jsonl"
    whole = '{"a": "é"}\r\n\n{"b": 1}\n'.encode()
    for cut in range(len(whole) + 1):
        file.write_bytes(whole[:cut])
        # A complete line without its newline counts.
        expected = [(1, {"a": "é"})] * (cut >= 11) + [(3, {"b": 1})] * (cut >= len(whole) - 1)
        assert list(read_json_lines(file, "")) == expected


@pytest.mark.parametrize("line", [b'"\xff"', b"[1]", b"null", b"7", b"{", b"nonsense"])
def test_the_error_for_a_line_that_is_not_a_json_object_names_file_and_line(tmp_path, line):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"{}\n" + line + b"\n")
    with pytest.raises(UserError, match=rf"^{re.escape(str(file))}, line 2: .*; mend it$"):
        list(read_json_lines(file, "mend it"))


def test_the_error_for_an_unreadable_file_names_it(tmp_path):
    with pytest.raises(UserError, match=r"metrics.jsonl cannot be read \(.*\); move it away"):
        list(read_json_lines(tmp_path / "metrics.jsonl", "move it away"))
    with pytest.raises(UserError, match=r"cannot be read \(Is a directory\); move it away"):
        list(read_json_lines(tmp_path, "move it away"))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            ["disk, its inodes or the quota are full. Free space"],
        ),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), ["the quota are full. Free space"]),
        # Errors of TensorStore (in Orbax) and of the Rust tokenizers.
        (ValueError("RESOURCE_EXHAUSTED: Error writing local file"), ["are full. Free space"]),
        (Exception("No space left on device (os error 28)"), ["are full. Free space"]),
        (PermissionError(errno.EACCES, "Permission denied"), ["Permission denied", "Make it writable"]),
        (
            IsADirectoryError(errno.EISDIR, "Is a directory"),
            ["a folder is in its place. Move that folder away"],
        ),
        (FileExistsError(errno.EEXIST, "File exists"), ["a file is in its place. Move that file away"]),
    ],
)
def test_the_error_of_a_failed_save_names_path_reason_and_fix(tmp_path, error, words):
    with pytest.raises(SaveError) as found, saving(tmp_path / "policy"):
        raise error
    words = [f"{tmp_path}/policy could not be saved: ", *words, "then give the same command again"]
    assert all(word in str(found.value) for word in words), found.value
    assert "\n" not in str(found.value) and found.value.__cause__ is error


def test_the_error_of_a_failed_save_names_the_missing_folder_or_the_file_in_its_place(tmp_path):
    (tmp_path / "a").write_text("mine")
    for folder, words in (("a", "a is a file. Put the folder back"), ("b", "b is gone. Put it back")):
        with pytest.raises(SaveError, match=words), saving(tmp_path / folder / "deep" / "file"):
            (tmp_path / folder / "deep" / "file").write_text("x")


def test_other_errors_pass_through_saving_unchanged(tmp_path):
    for error in (
        TypeError("bytes"),
        UserError("wrong"),
        ValueError("shape (3,)"),
        KeyError("x"),
        KeyboardInterrupt(),
    ):
        with pytest.raises(type(error)) as found, saving(tmp_path):
            raise error
        assert found.value is error


def test_a_failed_append_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    file = tmp_path / "lines"
    with pytest.raises(FileNotFoundError):
        append_bytes(file, b"never begun\n")
    file.write_bytes(b"first\n")
    append_bytes(file, b"second\n")
    assert file.read_bytes() == b"first\nsecond\n"
    opened = type(file).open

    class Full:
        """A file whose disk has room for three more bytes."""

        def __init__(self, *args, **kwargs):
            self.stream = opened(file, *args, **kwargs)
            self.room = 3

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.stream.close()

        def write(self, data):
            if not self.room:
                raise OSError(errno.ENOSPC, "No space left on device")
            written, self.room = self.stream.write(data[: self.room]), 0
            return written

        def __getattr__(self, name):
            return getattr(self.stream, name)

    monkeypatch.setattr(type(file), "open", Full)
    with pytest.raises(OSError, match="No space left"):
        append_bytes(file, b"third\n")
    monkeypatch.undo()
    assert file.read_bytes() == b"first\nsecond\n"


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with one model, and an empty current folder."""
    (tmp_path / "checkout/assets/policy").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr("rrl.files.CHECKOUT", tmp_path / "checkout")
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "checkout"


def test_what_comes_with_rrl_is_found_from_another_folder_and_the_log_says_so_once(checkout, caplog):
    assert shipped("assets/policy") == shipped("assets/policy") == checkout / "assets/policy"
    assert len(caplog.messages) == 1
    assert "assets/policy" in caplog.text and str(checkout) in caplog.text


def test_what_is_in_the_current_folder_wins(checkout):
    Path("assets/policy").mkdir(parents=True)
    assert shipped("assets/policy") == Path("assets/policy")


@pytest.mark.parametrize("path", ["models/policy", "assets/nothing", "/assets/policy", ""])
def test_other_paths_stay_as_they_are(checkout, path):
    assert shipped(path) == Path(path)


def test_an_error_names_the_places_that_were_looked_in(checkout):
    assert looked_in("assets/x") == f"in {Path('assets/x').absolute()} or {checkout / 'assets/x'}"
    assert looked_in("models/x") == "there"
