"""Runs a peer library in each of its settings; the fastest setting is compared."""

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping

from benchmarks.fixed_lengths import FixedLengths
from benchmarks.measure import NOT_MEASURED, PeerProcess, imports, start
from rrl.models.hf import save_decoder


class PeerLibrary:
    """The process of a peer library, and the settings that its script supports.

    `settings` is ("",) if there is no choice. Otherwise a setting is the second word of each command.
    """

    def __init__(self, name: str, peer: PeerProcess, settings: tuple[str, ...] = ("",)) -> None:
        self.name, self.peer, self.settings = name, peer, settings
        self._failed: dict[str, str] = {}

    def sides(self, command: str, *more: int) -> dict[str, Callable[[], float]]:
        """Return one side of a comparison per setting, by name.

        Args:
          command: command of the script: "sample", or "turns" or "kept".
          more: numbers that follow the command, such as lengths.
        """
        return {
            self._side(setting): lambda setting=setting: self._seconds(command, setting, *more)  # type: ignore[misc]
            for setting in self.settings
        }

    def _seconds(self, command: str, setting: str, *more: int) -> float:
        if setting not in self._failed:
            answer = self.peer.ask(" ".join(map(str, filter(None, (command, setting, *more)))))
            if "seconds" in answer:
                return answer["seconds"]
            self._failed[setting] = answer["error"]
        return math.inf

    def best(self, seconds: Mapping[str, float], render: Callable[[float], str]) -> tuple[float, str]:
        """Return the fewest seconds, and a text for the row.

        The text holds the rendered times of all settings and the versions.

        Args:
          seconds: side -> seconds.
          render: formats seconds for the row.
        """
        times = {setting: seconds[self._side(setting)] for setting in self.settings}
        first, *others = sorted(times, key=times.__getitem__)
        details = [f"{first} cache"] if first else []
        for setting in others:
            failed = self._failed.get(setting)
            details.append(f"{setting} {f'{NOT_MEASURED}, {failed}' if failed else render(times[setting])}")
        details.append(self.peer.info["versions"])
        return times[first], f"{self.name} {render(times[first])} ({'; '.join(details)})"

    def _side(self, setting: str) -> str:
        return f"{self.name}, {setting} cache" if setting else self.name


HF, TUNIX = "HF generate", "Tunix Sampler"
CACHES = ("dynamic", "static")
"""Cache implementations of Hugging Face's generate."""
_NEEDED = {HF: ("torch", "hf_generate.py"), TUNIX: ("tunix", "tunix_sampler.py")}
_SETTINGS = {HF: CACHES, TUNIX: ("",)}


@contextlib.contextmanager
def peers(
    model: FixedLengths, pythons: Mapping[str, str], batch: int, prompt: int, new: int
) -> Iterator[tuple[dict[str, PeerLibrary], dict[str, str]]]:
    """Start the peers in `pythons`, with the model's weights, each in a process of its Python.

    Yields (name -> started peer, name -> reason why it is not measured).
    """
    started: dict[str, PeerLibrary] = {}
    missing: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if any(imports(python, _NEEDED[name][0]) for name, python in pythons.items()):
            save_decoder(folder, model.decoder, model.tokenizer, dtype=model.decoder.dtype)
        for name, python in pythons.items():
            peer = start(python, *_NEEDED[name], folder, str(batch), str(prompt), str(new))
            if isinstance(peer, str):
                missing[name] = peer
            else:
                started[name] = PeerLibrary(name, peer, _SETTINGS[name])
                stack.callback(peer.close)
        yield started, missing
