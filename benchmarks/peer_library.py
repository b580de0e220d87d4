"""Runs a peer library with each of its cache implementations; the fastest one is compared."""

import argparse
import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping

from benchmarks.fixed_lengths import FixedLengthModel
from benchmarks.measure import NOT_MEASURED, PeerProcess, imports, start_peer
from rrl.models.hf import save_decoder

HF, TUNIX = "HF generate", "Tunix Sampler"
CACHES = ("dynamic", "static")
"""Cache implementations of Hugging Face's generate."""
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
            self._side(cache): lambda cache=cache: self._seconds(command, cache, *numbers)  # type: ignore[misc]
            for cache in self.caches
        }

    def _seconds(self, command: str, cache: str, *numbers: int) -> float:
        """Return the seconds of one run, or infinity if the peer fails with this cache. It does not try again."""
        if cache not in self._failed:
            answer = self.process.ask(" ".join(map(str, filter(None, (command, cache, *numbers)))))
            if "seconds" in answer:
                return answer["seconds"]
            self._failed[cache] = answer["error"]
        return math.inf

    def best(self, seconds: Mapping[str, float], render: Callable[[float], str]) -> tuple[float, str]:
        """Return the fewest seconds, and a text for the row.

        The text contains the rendered times with all caches, and the versions.

        Args:
          seconds: side -> seconds.
          render: formats seconds for the row.
        """
        times = {cache: seconds[self._side(cache)] for cache in self.caches}
        first, *others = sorted(times, key=times.__getitem__)
        details = [f"{first} cache"] if first else []
        for cache in others:
            failed = self._failed.get(cache)
            details.append(f"{cache} {f'{NOT_MEASURED}, {failed}' if failed else render(times[cache])}")
        details.append(self.process.info["versions"])
        return times[first], f"{self.name} {render(times[first])} ({'; '.join(details)})"

    def _side(self, cache: str) -> str:
        return f"{self.name}, {cache} cache" if cache else self.name


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


def pythons(args: argparse.Namespace) -> dict[str, str]:
    """Return the Python of each peer."""
    return {HF: args.hf_python, TUNIX: args.tunix_python}
