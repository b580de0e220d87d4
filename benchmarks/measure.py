"""Sides that take turns, the median of each, and the file that keeps the rows."""

import argparse
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
from typing import Any

import jax
import jax.numpy as jnp

from rrl.models.cpu.layers import LANES, can_attend

RESULTS = pathlib.Path(__file__).parent / "RESULTS.md"
NOT_MEASURED = "not measured"
"""What stands in the place of a device, above rows that wait for one."""
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "transformers", "torch", "google-tunix", "scann", "bm25s")


@dataclasses.dataclass(frozen=True)
class BenchmarkRow:
    """One line of a table."""

    what: str
    ours: str
    peer: str
    ratio: str
    target: str

    def __str__(self) -> str:
        return f"| {self.what} | {self.ours} | {self.peer} | {self.ratio} | {self.target} |"


def interleave(sides: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Runs all sides in turn, once more than `rounds`; what each returned, that of its first time first."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, side in sides.items():
            found[name].append(side())
            print(
                f"  {name}: {found[name][-1]:.3f} s{' (warm-up, with compilation)' if not turn else ''}",
                file=sys.stderr,
            )
    return found


def medians(found: Mapping[Any, list[float]]) -> dict[Any, float]:
    """Of what `interleave` returned, the first time left out."""
    return {name: statistics.median(values[1:]) for name, values in found.items()}


def warm_up(found: Mapping[str, list[float]]) -> str:
    """What the first times of `interleave` took, as a note below the rows."""
    rounds = len(next(iter(found.values()))) - 1
    first = ", ".join(f"{name} {values[0]:.1f} s" for name, values in found.items())
    return (
        f"Medians of {rounds} rounds, in each of which all sides took their turn; a first round, with compilation, is not "
        f"counted: {first}."
    )


def interleaved_medians(sides: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Runs all sides in turn, `rounds` times, after one round that is not counted; the median of what each returned."""
    return medians(interleave(sides, rounds))


def seconds(function: Callable[[], object]) -> float:
    """How long a call takes."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


class PeerProcess:
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
        self.info = self.ask("ready")

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
        self._process.wait()


def imports(python: str, module: str) -> bool:
    """Whether a Python has a module."""
    code = f"import importlib.util as u, sys; sys.exit(not u.find_spec({module!r}))"
    return subprocess.run([python, "-c", code], check=False).returncode == 0


def start(python: str, module: str, script: str, *arguments: str) -> PeerProcess | str:
    """The peer that needs `module`; or why there is none, in words that fit a row."""
    if not imports(python, module):
        return f"{NOT_MEASURED}: no {module}"
    peer = PeerProcess(python, script, *arguments)
    if (theirs := peer.info["device"]) != (ours := jax.default_backend()):
        peer.close()
        return f"{NOT_MEASURED}: {module} runs on {theirs} here, ours on {ours}"
    return peer


def command(module: str, parser: argparse.ArgumentParser, used: Mapping[str, object]) -> str:
    """The command line that gives these options, for who wants to give it again: a Python of one's own is PATH."""
    given = {name: value for name, value in used.items() if value != parser.get_default(name)}
    options = [f"--{name}={'PATH' if name.endswith('_python') else value}" for name, value in given.items()]
    return " ".join([f"python -m {module}", *options])


def machine() -> str:
    """Device and versions, as a line."""
    device = jax.devices()[0]
    kind = device.device_kind
    if device.platform == "cpu":
        compiler = "with" if can_attend(jnp.float32, LANES) else "without"
        kind = f"{len(os.sched_getaffinity(0))} cores, {compiler} a C++ compiler"
    versions = []
    for name in PACKAGES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"{device.platform} ({kind}), Python {platform.python_version()}, {', '.join(versions)}"


def write(
    section: str, line: str, rows: list[BenchmarkRow], notes: list[str], *, measured: bool = True
) -> None:
    """Prints a table below the command that made it and puts it into RESULTS.md, in place of an older one of the same
    section on the same device, or of one that was not measured; one that was not measured takes the place of no other."""
    device = jax.devices()[0]
    where = (
        (device.platform if device.platform == "cpu" else device.device_kind) if measured else NOT_MEASURED
    )
    head = "| what | ours | peer | ratio | wanted |\n|---|---|---|---|---|"
    body = "\n".join(
        [f"## {section}, {where}", "", f"`{line}` on {machine()}", "", head, *map(str, rows), ""]
    )
    body += "".join(f"\n- {note}" for note in notes) + ("\n" if notes else "")
    print(body)
    old = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else "# Measured\n"

    def older(device: str) -> re.Match | None:
        title = rf"^## {re.escape(section)}, {device}$"
        return re.search(rf"{title}.*?(?=^## |\Z)", old, re.MULTILINE | re.DOTALL)

    found = older(re.escape(where)) or older(NOT_MEASURED)
    if not measured and not found and older("[^,\n]*"):
        return
    new = old.replace(found[0], body + "\n") if found else f"{old.rstrip()}\n\n{body}"
    RESULTS.write_text(new.rstrip() + "\n", encoding="utf-8")
