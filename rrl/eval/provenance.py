"""The code that computes a result: its commit, and the versions of the packages."""

import importlib.metadata
import platform
import subprocess
from pathlib import Path

from rrl.files import CHECKOUT

PACKAGES = ("jax", "flax", "numpy", "transformers", "scann", "bm25s")
"""Packages on which results depend."""


def installed_versions() -> dict[str, str]:
    """Return the installed versions of Python, rrl and `PACKAGES`."""
    versions = {"python": platform.python_version()}
    for name in ("rrl", *PACKAGES):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def current_commit() -> str:
    """Return the commit of rrl that is checked out, marked "with changes" if files differ from it; "unknown" outside a clone."""
    commit = _git("rev-parse", "--short=12", "HEAD")
    # An installed package may be inside the clone of another project.
    if not commit or Path(_git("rev-parse", "--show-toplevel")) != CHECKOUT:
        return "unknown"
    return commit + (
        " with changes"
        if _git("status", "--porcelain", "--untracked-files=no", "rrl", "launch", "configs", "assets")
        else ""
    )


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(CHECKOUT), *arguments], capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
