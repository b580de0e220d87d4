"""The scripted environment and the sizes of the tests of the engine."""

import jax
import numpy as np

from rrl.rollout.config import EngineConfig
from rrl.rollout.protocol import Append, Finish, SearchFor, Stream

KEY = jax.random.key(3)
SAMPLING = {"top_p": 0.99, "sample_top_k": 300}
CONFIG = EngineConfig(
    rows=8, context=192, wake_threshold=4, prefill_tokens=48, max_wait_steps=8, top_k=2, **SAMPLING
)
TEMPERATURES = (1.0, 0.7, 0.4, 0.1, 0.0)


class Scripted(Stream):
    """Searches after every turn, so that a random policy exercises every path of the loop."""

    def step(self, episode, text, stop):
        if episode.turn == 2:
            return Finish("done")
        return Append(prefix=" again ") if stop == "e" else SearchFor(f"{text} {episode.question.text}")

    @property
    def stops(self):
        return ("e",)


SCRIPTED = Scripted(turn_tokens=12, observation_tokens=60)


def assert_same(first, second, tolerance=1e-5):
    for one, other in zip(first, second, strict=True):
        for name in ("tokens", "roles", "turns"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        for name in ("logps", "sampled_logps"):
            np.testing.assert_allclose(getattr(one, name), getattr(other, name), rtol=0, atol=tolerance)
        for name in ("starts", "segments", "searches", "ended"):
            assert getattr(one, name) == getattr(other, name)
