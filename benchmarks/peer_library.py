"""Runs a peer library with each of its cache implementations; the fastest one is compared."""

import argparse
import contextlib
import math
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from benchmarks.fixed_lengths import FixedLengthModel
from benchmarks.measure import NOT_MEASURED, BenchmarkRow, PeerProcess, imports, start_peer
from rrl.models.hf import save_decoder

HF, TUNIX = "HF generate", "Tunix Sampler"
CACHES = ("dynamic", "static")
"""Cache implementations of Hugging Face's generate."""
DTYPES = ("float32", "bfloat16")
"""Dtypes of Hugging Face's generate, of which the faster one is compared."""
_MODULES_AND_SCRIPTS = {HF: ("torch", "hf_generate.py"), TUNIX: ("tunix", "tunix_sampler.py")}
"""Library -> (module that it needs, script in `benchmarks/peers`)."""
_CACHES = {HF: CACHES, TUNIX: ("",)}
"""Library -> the `caches` of its PeerLibrary."""


class PeerLibrary:
    """The process of a peer library, and the cache implementations that it offers.

    `caches` is ("",) if there is no choice. Otherwise each command to the script is followed by one of them.
    """

    def __init__(self, name: str, process: PeerProcess, caches: tuple[str, ...] = ("",)) -> None:
        self.name, self.process, self.caches = name, process, caches
        self._failed: dict[str, str] = {}

    def sides(self, command: str, *numbers: int) -> dict[str, Callable[[], float]]:
        """Return one side of a comparison for each cache, by name.

        Args:
          command: command of the script, such as "sample" or "turns"; see the docstrings in `benchmarks/peers`.
          numbers: integers that follow the command, such as the history lengths of the turns.
        """
        return {
            self.side_name(cache): lambda cache=cache: self._seconds(command, cache, *numbers)  # type: ignore[misc]
            for cache in self.caches
        }

    def answer(self, command: str, cache: str, *numbers: int) -> dict[str, float]:
        """Return the answer of one run. If the peer fails with this cache, all times are infinite, and it is not tried again."""
        if cache not in self._failed:
            answer = self.process.ask(" ".join(map(str, filter(None, (command, cache, *numbers)))))
            if "seconds" in answer:
                return answer
            self._failed[cache] = answer["error"]
        return {"seconds": math.inf, "first": math.inf}

    def _seconds(self, command: str, cache: str, *numbers: int) -> float:
        return self.answer(command, cache, *numbers)["seconds"]

    def best(self, seconds: Mapping[str, float], render: Callable[[float], str]) -> tuple[float, str]:
        """Return the fewest seconds, and a text for the row.

        The text contains the rendered times with all caches, and the versions.

        Args:
          seconds: side -> seconds.
          render: formats seconds for the row.
        """
        times = {cache: seconds[self.side_name(cache)] for cache in self.caches}
        first, *others = sorted(times, key=times.__getitem__)
        details = [f"{first} cache"] if first else []
        for cache in others:
            failed = self._failed.get(cache)
            details.append(f"{cache} {f'{NOT_MEASURED}, {failed}' if failed else render(times[cache])}")
        details.append(self.process.info["versions"])
        return times[first], f"{self.name} {render(times[first])} ({'; '.join(details)})"

    def side_name(self, cache: str) -> str:
        """Return the name of the side that runs the peer with a cache."""
        return f"{self.name}, {cache} cache" if cache else self.name


def best_of(
    libraries: Iterable[PeerLibrary], seconds: Mapping[str, float], render: Callable[[float], str]
) -> tuple[float, str]:
    """Return the fewest seconds of several libraries, and a text with the results of all, the fastest first."""
    results = sorted(library.best(seconds, render) for library in libraries)
    return results[0][0], "; ".join(text for _, text in results)


def compare_first_tokens(process: PeerProcess, ours: Sequence[int]) -> BenchmarkRow:
    """Return a row that compares the first tokens of our greedy continuations with those of Hugging Face's generate.

    With random weights in bfloat16 the best logits are often equal, and texts diverge after a different choice. So only first
    tokens are compared, and the row also says how far ours lie below the best logit of the peer's model.
    """
    theirs = [row[0] for row in process.ask("greedy")["tokens"]]
    equal = statistics.mean(int(our == their) for our, their in zip(ours, theirs, strict=True))
    gap = max(process.ask(" ".join(map(str, ["below", *ours])))["below"])
    return BenchmarkRow(
        "the same, greedy: equal first tokens; largest distance below the peer's best logit, in standard deviations",
        f"{100 * equal:.0f} %; {gap:.3f}",
        HF,
        "",
        "0.1",
    )


@contextlib.contextmanager
def peers(
    model: FixedLengthModel, pythons: Mapping[str, str], batch: int, prompt: int, new: int
) -> Iterator[tuple[dict[str, PeerLibrary], dict[str, str]]]:
    """Start the peers in `pythons`, with the model's weights, each in a process of its Python.

    Yields (name -> started peer, name -> reason why it is not measured).
    """
    started: dict[str, PeerLibrary] = {}
    missing: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if any(imports(python, _MODULES_AND_SCRIPTS[name][0]) for name, python in pythons.items()):
            save_decoder(folder, model.decoder, model.tokenizer, dtype=model.decoder.dtype)
        for name, python in pythons.items():
            peer = start_peer(python, *_MODULES_AND_SCRIPTS[name], folder, str(batch), str(prompt), str(new))
            if isinstance(peer, str):
                missing[name] = peer
            else:
                started[name] = PeerLibrary(name, peer, _CACHES[name])
                stack.callback(peer.close)
        yield started, missing


@contextlib.contextmanager
def hf_by_dtype(
    model: FixedLengthModel, python: str, batch: int, prompt: int, new: int
) -> Iterator[dict[str, PeerLibrary] | str]:
    """Start Hugging Face's generate in each of DTYPES, with the model's weights, each in a process.

    Yields (dtype -> peer), or the reason why it is not measured.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if imports(python, "torch"):
            save_decoder(folder, model.decoder, model.tokenizer, dtype=model.decoder.dtype)
        started: dict[str, PeerLibrary] = {}
        for dtype in DTYPES:
            numbers = map(str, (batch, prompt, new))
            peer = start_peer(python, *_MODULES_AND_SCRIPTS[HF], folder, *numbers, dtype)
            if isinstance(peer, str):
                yield peer
                return
            stack.callback(peer.close)
            started[dtype] = PeerLibrary(f"{HF} in {dtype}", peer, CACHES)
        yield started


def pythons(args: argparse.Namespace) -> dict[str, str]:
    """Return the Python of each peer."""
    return {HF: args.hf_python, TUNIX: args.tunix_python}
