"""Helpers of all benchmarks: interleaved timing, medians, peers in other processes, and the file of
results."""

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
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from rrl.models.cpu.layers import LANES, can_attend
from rrl.models.hardware import CPU_INFO

RESULTS = pathlib.Path(__file__).parent / "RESULTS.md"
NOT_MEASURED = "not measured"
"""Text in place of a measured value, and in a section's title in place of the device, if a measurement was impossible."""
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "transformers", "torch", "google-tunix", "scann", "bm25s")


@dataclasses.dataclass(frozen=True)
class BenchmarkRow:
    """One row of a table in RESULTS.md: a comparison of this library with a peer, that is, another library or a bound."""

    what: str
    """What is measured, with its unit."""
    ours: str
    """Result of this library."""
    peer: str
    """Result of the peer, with its name and versions; or the reason why it is not measured."""
    ratio: str
    """How our result compares with the peer's; larger is better for speeds, smaller for memory."""
    target: str
    """The ratio, or the result, that we aim at; "" without a target."""

    def __str__(self) -> str:
        return f"| {self.what} | {self.ours} | {self.peer} | {self.ratio} | {self.target} |"


SectionResult = tuple[list[BenchmarkRow], list[str]]
"""(rows, notes below them)."""


def interleave(
    sides: Mapping[str, Callable[[], float]],
    rounds: int,
    select: Callable[[dict[str, list[float]]], Collection[str]] | None = None,
) -> dict[str, list[float]]:
    """Run all sides of a comparison in turn, `rounds` + 1 times.

    Args:
      sides: name -> function that runs one side once and returns the seconds.
      rounds: number of rounds after the warm-up round.
      select: gets the times after the first timed round, and returns the names of the sides that run in the other rounds. So the
        slower settings of a peer are measured only once. None: all sides run in all rounds.

    Returns:
      name -> seconds of every round. The first value is the warm-up.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        if turn == 2 and select is not None:
            chosen = select(times)
            sides = {name: side for name, side in sides.items() if name in chosen}
        for name, side in sides.items():
            times[name].append(side())
            print(
                f"  {name}: {times[name][-1]:.3f} s{' (warm-up, with compilation)' if not turn else ''}",
                file=sys.stderr,
            )
    return times


def medians(times: Mapping[Any, list[float]]) -> dict[Any, float]:
    """Return the medians of the values of `interleave`, without the warm-up."""
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def warm_up_note(times: Mapping[str, list[float]]) -> str:
    """Return a note about the warm-up times of `interleave`."""
    rounds = len(next(iter(times.values()))) - 1
    first = ", ".join(f"{name} {values[0]:.1f} s" for name, values in times.items())
    return (
        f"Medians of {rounds} rounds, with the sides interleaved. A warm-up round, which includes compilation, is not counted; "
        f"it took: {first}."
    )


def interleaved_medians(sides: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Run all sides in turn, with one warm-up round, and return the median of each side's values."""
    return medians(interleave(sides, rounds))


def elapsed(function: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


class PeerProcess:
    """A process that runs another library, with the Python interpreter where that library is installed.

    Its script, in `benchmarks/peers`, answers each line of its input with a line of JSON.
    """

    def __init__(self, python: str, script: str, *arguments: str) -> None:
        file = pathlib.Path(__file__).parent / "peers" / script
        environment = os.environ | {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
        # `prepare_host` sets NPROC, which enlarges XLA's thread pool for our host callbacks. A peer that inherited it would be
        # slower.
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
        """Send a line and return the answer. Raises RuntimeError if the process has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        while answer := self._process.stdout.readline():
            if answer.startswith("{"):
                return json.loads(answer)
        raise RuntimeError(f"{self._process.args} ended with exit code {self._process.wait()}")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def imports(python: str, module: str) -> bool:
    """Return whether a Python can import a module."""
    code = f"import importlib.util as u, sys; sys.exit(not u.find_spec({module!r}))"
    return subprocess.run([python, "-c", code], check=False).returncode == 0


def start_peer(python: str, module: str, script: str, *arguments: str) -> PeerProcess | str:
    """Start the peer that needs `module`, or return the reason why it cannot be measured, as text for a
    row."""
    if not imports(python, module):
        return f"{NOT_MEASURED}: no {module}"
    peer = PeerProcess(python, script, *arguments)
    if (theirs := peer.info["device"]) != (ours := jax.default_backend()):
        peer.close()
        return f"{NOT_MEASURED}: {module} runs on {theirs} here, ours on {ours}"
    return peer


def command(module: str, parser: argparse.ArgumentParser, used: Mapping[str, object]) -> str:
    """Return the command line of a module with the options in `used`, by name, that differ from their defaults.

    The path of a Python interpreter is replaced by PATH.
    """
    given = {name: value for name, value in used.items() if value != parser.get_default(name)}
    options = [f"--{name}={'PATH' if name.endswith('_python') else value}" for name, value in given.items()]
    return " ".join([f"python -m {module}", *options])


def processor_features() -> str:
    """Return the instruction sets of this processor that decide about the speed of matrix products; "" where they are unknown."""
    names = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "asimd", "bf16", "i8mm")
    try:
        lines = re.findall(r"^(?:flags|Features)\s*:(.*)$", CPU_INFO.read_text(), re.MULTILINE)
    except OSError:
        return ""
    return " ".join(name for name in names if lines and name in lines[0].split())


def machine() -> str:
    """Return device and versions, as one line."""
    device = jax.devices()[0]
    kind = device.device_kind
    if device.platform == "cpu":
        # On a CPU, the attention kernels are available if there is a C++ compiler, or if an earlier run has compiled them.
        compiler = "with" if can_attend(jnp.float32, LANES) else "without"
        details = [
            f"{len(os.sched_getaffinity(0))} cores",
            processor_features(),
            f"{compiler} a C++ compiler",
        ]
        kind = ", ".join(filter(None, details))
    versions = []
    for name in PACKAGES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"{device.platform} ({kind}), Python {platform.python_version()}, {', '.join(versions)}"


def write(
    section: str, command_line: str, rows: list[BenchmarkRow], notes: list[str], *, measured: bool = True
) -> None:
    """Print a table below its command and put it into RESULTS.md.

    It replaces the section of the same name and device, or else the section of the same name that is
    marked as not measured. An unmeasured section never replaces a measured one.
    """
    device = jax.devices()[0]
    device_name = (
        (device.platform if device.platform == "cpu" else device.device_kind) if measured else NOT_MEASURED
    )
    head = "| what | ours | peer | ratio | target |\n|---|---|---|---|---|"
    body = "\n".join(
        [
            f"## {section}, {device_name}",
            "",
            f"`{command_line}` on {machine()}",
            "",
            head,
            *map(str, rows),
            "",
        ]
    )
    body += "".join(f"\n- {note}" for note in notes) + ("\n" if notes else "")
    print(body)
    old = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else "# Measured\n"

    def find_section(device: str) -> re.Match | None:
        title = rf"^## {re.escape(section)}, {device}$"
        return re.search(rf"{title}.*?(?=^## |\Z)", old, re.MULTILINE | re.DOTALL)

    replaced = find_section(re.escape(device_name)) or find_section(NOT_MEASURED)
    if not measured and not replaced and find_section("[^,\n]*"):
        return
    new = old.replace(replaced[0], body + "\n") if replaced else f"{old.rstrip()}\n\n{body}"
    RESULTS.write_text(new.rstrip() + "\n", encoding="utf-8")
