"""Files that are whole or not there."""

import os
import stat

import pytest

from rrl.files import write_whole


def test_a_file_is_replaced_whole_and_others_may_read_it(tmp_path):
    write_whole(tmp_path / "a.json", "old")
    write_whole(tmp_path / "a.json", "näu\n")
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == "näu\n"
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE((tmp_path / "a.json").stat().st_mode) == 0o666 & ~mask


def test_what_cannot_be_written_leaves_the_old_file_and_nothing_beside(tmp_path):
    write_whole(tmp_path / "a.json", "old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(tmp_path / "a.json", "half \udc80")
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == "old"
