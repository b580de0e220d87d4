"""Folders from which compiled code may be loaded: only this user and root can have put it there."""

import grp
import os
import pwd
import stat
from pathlib import Path


def private_folder(folder: Path) -> Path:
    """The path of a folder, links followed, that no other user may write to; made with mode 0700 if it is missing.

    Raises:
        PermissionError: `refuse_shared` refuses it, or it may not be made.
        OSError: it can't be made or read.
    """
    missing = [part for part in (folder, *folder.parents) if not part.exists()]
    for part in reversed(missing):
        part.mkdir(mode=0o700, exist_ok=True)
    found = folder.resolve(strict=True)
    refuse_shared(found)
    return found


def refuse_shared(path: Path) -> None:
    """Refuses a file or folder that another user than root might write to or replace by one of their own.

    It and all folders above it must belong to this user or root, who alone may write there. Above it, a folder with the sticky
    bit, such as /tmp, may be open to all: what belongs to this user can't be renamed or removed there. So nothing that passes can
    be exchanged before it is loaded, unless `path` has links, which are refused: give it `resolve`d.

    Raises:
        PermissionError: names what others may write to.
        FileNotFoundError: there is no such path.
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
    """Whether it is the group that many systems make for each user alone, with a umask that lets it write (002)."""
    try:
        named, user = grp.getgrgid(group), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return (named.gr_gid, named.gr_name) == (user.pw_gid, user.pw_name) and {*named.gr_mem} <= {user.pw_name}
