"""Rollouts whose lengths are told beforehand: a model with random weights that never ends a sequence of itself."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from transformers import PreTrainedTokenizerBase

from benchmarks.measure import seconds
from rrl.data.questions import Question
from rrl.models.decoder import Decoder
from rrl.rollout.config import EngineConfig
from rrl.rollout.engine import Engine
from rrl.rollout.episodes import Request

KEY = jax.random.key(0)


@dataclasses.dataclass(frozen=True)
class FixedLengths:
    """A decoder of some shape, and what runs it."""

    decoder: Decoder
    tokenizer: PreTrainedTokenizerBase

    def engine(self, config: EngineConfig, retriever: Any = None) -> Engine:
        """An engine whose rows end by their limits alone."""
        made = Engine(self.decoder, self.tokenizer, config, retriever=retriever)
        made.programs.eos = np.full(1, -1, np.int32)
        return made

    def requests(
        self, count: int, length: int, *, samples: int = 1, temperature: float = 1.0
    ) -> list[Request]:
        """Prompts of random tokens, `samples` of each: the numbers that benchmarks/peers draw. A prompt's question has its
        number as id."""
        draws = np.random.default_rng(0).integers(1, self.decoder.config.vocab_size, (count, length))
        return [
            Request(
                Question(str(number), "", ()),
                prompt.astype(np.int32),
                number * samples + sample,
                number,
                temperature,
            )
            for number, prompt in enumerate(draws)
            for sample in range(samples)
        ]

    def timed(
        self, made: Engine, asked: Sequence[Request], environment: Any, tokens: int | None = None
    ) -> Callable[[], float]:
        """Seconds of a run, which must write `tokens` in all."""
        params = nnx.state(self.decoder)

        def run() -> float:
            took = seconds(lambda: made.run(params, asked, environment, KEY))
            assert tokens is None or made.stats.policy_tokens == tokens, made.stats
            return took

        return run
