"""Sides that take turns, the median of each, and the file that keeps the rows."""

import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

import jax

RESULTS = pathlib.Path(__file__).parent / "RESULTS.md"
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "transformers", "torch", "google-tunix", "scann", "bm25s")


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a table."""

    what: str
    ours: str
    peer: str
    ratio: str
    wanted: str

    def __str__(self) -> str:
        return f"| {self.what} | {self.ours} | {self.peer} | {self.ratio} | {self.wanted} |"


def alternate(sides: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Runs all sides in turn, `rounds` times, after one round that is not counted; the median of what each returned."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, side in sides.items():
            value = side()
            print(
                f"  {name}: {value:.3f} s{' (warm-up, with compilation)' if not turn else ''}",
                file=sys.stderr,
            )
            if turn:
                found[name].append(value)
    return {name: statistics.median(values) for name, values in found.items()}


def seconds(function: Callable[[], object]) -> float:
    """How long a call takes."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


class Peer:
    """Another library in a process and a Python of its own: a script of `benchmarks/peers` that answers each line of its
    input with a line of JSON."""

    def __init__(self, python: str, script: str, *arguments: str) -> None:
        file = pathlib.Path(__file__).parent / "peers" / script
        environment = os.environ | {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
        # Set by `prepare_host` for our callbacks; a pool so wide slows a peer.
        environment.pop("NPROC", None)
        self._process = subprocess.Popen(
            [python, str(file), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.says = self.ask("ready")

    def ask(self, line: str) -> dict:
        """Its answer; RuntimeError where it has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        while answer := self._process.stdout.readline():
            if answer.startswith("{"):
                return json.loads(answer)
        raise RuntimeError(f"{self._process.args} ended with exit code {self._process.wait()}")

    def close(self) -> None:
        """Ends it."""
        self._process.kill()


def imports(python: str, module: str) -> bool:
    """Whether a Python has a module."""
    code = f"import importlib.util as u, sys; sys.exit(not u.find_spec({module!r}))"
    return subprocess.run([python, "-c", code], check=False).returncode == 0


def machine() -> str:
    """Device and versions, as a line."""
    device = jax.devices()[0]
    cores = f"{len(os.sched_getaffinity(0))} cores" if device.platform == "cpu" else device.device_kind
    versions = []
    for name in PACKAGES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"{device.platform} ({cores}), Python {platform.python_version()}, {', '.join(versions)}"


def write(section: str, command: str, rows: list[Row], notes: list[str]) -> None:
    """Prints a table and puts it into RESULTS.md, in place of an older one of the same section on the same platform."""
    title = f"## {section}, {jax.devices()[0].platform}"
    head = "| what | ours | peer | ratio | wanted |\n|---|---|---|---|---|"
    body = "\n".join([title, "", f"`{command}` on {machine()}", "", head, *map(str, rows), ""])
    body += "".join(f"\n- {note}" for note in notes) + ("\n" if notes else "")
    print(body)
    old = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else "# Measured\n"
    found = re.search(rf"^{re.escape(title)}$.*?(?=^## |\Z)", old, re.MULTILINE | re.DOTALL)
    new = old.replace(found[0], body + "\n") if found else f"{old.rstrip()}\n\n{body}"
    RESULTS.write_text(new.rstrip() + "\n", encoding="utf-8")
