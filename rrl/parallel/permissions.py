"""Checks of file permissions: no other user may write a file or folder from which compiled code is loaded."""

import grp
import os
import pwd
import stat
from pathlib import Path


def private_folder(folder: Path) -> Path:
    """Returns the resolved path of a folder that no other user can write to; creates it with mode 0700 if it is missing.

    Raises:
        PermissionError: another user could write to it (`check_private`), or creating it is not permitted.
        OSError: it cannot be created or read.
    """
    missing = [part for part in (folder, *folder.parents) if not part.exists()]
    for part in reversed(missing):
        part.mkdir(mode=0o700, exist_ok=True)
    resolved = folder.resolve(strict=True)
    check_private(resolved)
    return resolved


def check_private(path: Path) -> None:
    """Raises if another user, except root, could write or replace a file or folder.

    The path and all its parents must belong to this user or root, and only they may have write permission. Parents with the
    sticky bit, such as /tmp, may be writable for all, because other users cannot rename or remove this user's files there.
    So nobody can replace the file between this check and its use. Links are refused: pass a resolved path.

    Raises:
        PermissionError: names the path that others may write to.
        FileNotFoundError: the path does not exist.
    """
    for part in (path, *path.parents):
        state = part.lstat()
        if stat.S_ISLNK(state.st_mode):
            raise PermissionError(f"{part} is a link")
        if state.st_uid not in (0, os.geteuid()):
            raise PermissionError(f"{part} belongs to another user ({state.st_uid})")
        writers = stat.S_IWOTH | (0 if _has_no_other_member(state.st_gid) else stat.S_IWGRP)
        sticky = part != path and state.st_mode & stat.S_ISVTX
        if state.st_mode & writers and not sticky:
            mode = stat.S_IMODE(state.st_mode)
            raise PermissionError(f"{part} may be written to by other users (its mode is {mode:o})")


def _has_no_other_member(group: int) -> bool:
    """Whether the group is the user's private group, without other members.

    Many systems create such a group for each user and set umask 002.
    """
    try:
        entry, user = grp.getgrgid(group), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return (entry.gr_gid, entry.gr_name) == (user.pw_gid, user.pw_name) and {*entry.gr_mem} <= {user.pw_name}
