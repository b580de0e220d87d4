"""A peer as a side of a comparison, each of its settings by itself: the fastest of them is compared."""

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping

from benchmarks.fixed_lengths import FixedLengths
from benchmarks.measure import NOT_MEASURED, PeerProcess, imports, start
from rrl.models.hf import save_decoder


class PeerLibrary:
    """A peer's process, and the settings that its script knows: none (""), or one that is named after what is asked."""

    def __init__(self, name: str, peer: PeerProcess, settings: tuple[str, ...] = ("",)) -> None:
        self.name, self.peer, self.settings = name, peer, settings
        self._failed: dict[str, str] = {}

    def sides(self, asked: str, *more: int) -> dict[str, Callable[[], float]]:
        """Sides that answer `asked` ("sample", or "turns" or "kept" and their lengths), by their names."""
        return {
            self._side(setting): lambda setting=setting: self._seconds(asked, setting, *more)  # type: ignore[misc]
            for setting in self.settings
        }

    def _seconds(self, asked: str, setting: str, *more: int) -> float:
        if setting not in self._failed:
            answer = self.peer.ask(" ".join(map(str, filter(None, (asked, setting, *more)))))
            if "seconds" in answer:
                return answer["seconds"]
            self._failed[setting] = answer["error"]
        return math.inf

    def best(self, took: Mapping[str, float], render: Callable[[float], str]) -> tuple[float, str]:
        """The fewest seconds, and words for a row: what `render` makes of them, and of other settings, and the versions."""
        times = {setting: took[self._side(setting)] for setting in self.settings}
        first, *others = sorted(times, key=times.__getitem__)
        told = [f"{first} cache"] if first else []
        for setting in others:
            failed = self._failed.get(setting)
            told.append(f"{setting} {f'{NOT_MEASURED}, {failed}' if failed else render(times[setting])}")
        told.append(self.peer.info["versions"])
        return times[first], f"{self.name} {render(times[first])} ({'; '.join(told)})"

    def _side(self, setting: str) -> str:
        return f"{self.name}, {setting} cache" if setting else self.name


HF, TUNIX = "HF generate", "Tunix Sampler"
CACHES = ("dynamic", "static")
"""Hugging Face's."""
_NEEDED = {HF: ("torch", "hf_generate.py"), TUNIX: ("tunix", "tunix_sampler.py")}
_SETTINGS = {HF: CACHES, TUNIX: ("",)}


@contextlib.contextmanager
def peers(
    model: FixedLengths, pythons: Mapping[str, str], batch: int, prompt: int, new: int
) -> Iterator[tuple[dict[str, PeerLibrary], dict[str, str]]]:
    """Those named in `pythons` over the model's weights, in processes of those Pythons; and why one of them is not there."""
    found: dict[str, PeerLibrary] = {}
    missing: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if any(imports(python, _NEEDED[name][0]) for name, python in pythons.items()):
            save_decoder(folder, model.decoder, model.tokenizer, dtype=model.decoder.dtype)
        for name, python in pythons.items():
            peer = start(python, *_NEEDED[name], folder, str(batch), str(prompt), str(new))
            if isinstance(peer, str):
                missing[name] = peer
            else:
                found[name] = PeerLibrary(name, peer, _SETTINGS[name])
                stack.callback(peer.close)
        yield found, missing
