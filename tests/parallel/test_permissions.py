"""Files and folders that other users may write to are refused, and new folders are private."""

import grp
import os
import pwd
import re
import stat
from types import SimpleNamespace

import pytest

from rrl.parallel.permissions import check_private, private_folder

OTHER = 54321
"""A user and a group that do not exist here."""


@pytest.fixture
def folder(tmp_path):
    """`above/cache`, writable only by this user."""
    made = tmp_path.resolve() / "above" / "cache"
    for part in (made.parent, made):
        part.mkdir(mode=0o700)
    return made


def refused(path, part, reason):
    with pytest.raises(PermissionError, match=f"^{re.escape(str(part))} {reason}"):
        check_private(path)


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022])
def test_a_missing_folder_is_created_private(tmp_path, umask):
    before = os.umask(umask)
    try:
        made = private_folder(tmp_path / "home" / "rrl" / "kernels")
    finally:
        os.umask(before)
    for part in (made, made.parent, made.parent.parent):
        assert stat.S_IMODE(part.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o702, 0o777, 0o1777])
def test_a_world_writable_folder_is_refused(folder, mode):
    folder.chmod(mode)
    refused(folder, folder, rf"may be written to by other users \(its mode is {mode:o}\)")


def test_a_world_writable_parent_is_refused_unless_it_has_the_sticky_bit(folder):
    folder.parent.chmod(0o777)
    refused(folder, folder.parent, "may be written to")
    folder.parent.chmod(0o1777)
    check_private(folder)


def test_a_world_writable_file_is_refused(folder):
    file = folder / "library.so"
    with pytest.raises(FileNotFoundError):
        check_private(file)
    file.touch(0o755)
    check_private(file)
    file.chmod(0o757)
    refused(file, file, "may be written to")


def test_a_group_writable_folder_is_refused_unless_the_group_is_private(folder, monkeypatch):
    user = pwd.getpwuid(os.geteuid())
    folder.chmod(0o770)
    own = {"gr_gid": folder.stat().st_gid, "gr_name": user.pw_name, "gr_mem": [user.pw_name]}
    for changed, allowed in (
        ({}, True),
        ({"gr_mem": []}, True),
        ({"gr_mem": [user.pw_name, "colleague"]}, False),
        ({"gr_name": "laboratory"}, False),
        ({"gr_gid": user.pw_gid + 1}, False),
    ):
        monkeypatch.setattr(grp, "getgrgid", lambda _, group=own | changed: SimpleNamespace(**group))
        if allowed:
            check_private(folder)
        else:
            refused(folder, folder, "may be written to")

    def unknown(_):
        raise KeyError

    monkeypatch.setattr(grp, "getgrgid", unknown)
    refused(folder, folder, "may be written to")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("place", ["file", "folder", "above"])
def test_another_users_files_and_folders_are_refused(folder, place):
    file = folder / "library.so"
    file.touch(0o755)
    part = {"file": file, "folder": folder, "above": folder.parent}[place]
    os.chown(part, OTHER, -1)
    refused(file, part, rf"belongs to another user \({OTHER}\)")


def test_links_are_resolved_by_private_folder_and_refused_by_check_private(folder):
    link = folder.parent / "link"
    link.symlink_to(folder)
    assert private_folder(link) == folder
    refused(link, link, "is a link")
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match=re.escape(str(folder))):
        private_folder(link)


def test_a_folder_that_cannot_be_created_raises_os_error(folder):
    (folder / "file").touch()
    with pytest.raises(OSError, match="file"):
        private_folder(folder / "file" / "kernels")
