"""A frozen model that answers prompts: R-Search's reader of another family (Eq. 4), and judges."""

import hashlib
import logging
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Int
from transformers import PreTrainedTokenizerBase

from rrl.data.questions import Question
from rrl.data.trajectory import NOT_FINITE, POLICY, Trajectory, responses
from rrl.errors import UserError
from rrl.models.decoder import Decoder
from rrl.rollout.config import EngineConfig
from rrl.rollout.engine import Engine
from rrl.rollout.episodes import Request
from rrl.rollout.protocol import SingleTurn
from rrl.text.chat import Prompt, after_thought, chat_ids, fitting_ids

log = logging.getLogger(__name__)


class ReaderReply(NamedTuple):
    """An answer, and the tokens that were read and written for it."""

    text: str
    prompt_tokens: int
    answer_tokens: int


class Reader:
    """Answers prompts greedily in one turn; equal prompts are answered once, the latest `cache_size` answers kept."""

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: PreTrainedTokenizerBase,
        config: EngineConfig,
        *,
        answer_tokens: int = 32,
        cache_size: int = 100_000,
        require_complete: bool = False,
        thinking: bool = False,
        mesh: Mesh | None = None,
    ) -> None:
        """`require_complete`: an answer that `answer_tokens` cut is none, "", as a judge's is: what half of it says is not what
        the whole would have said. `thinking`: whether a model that may think before it answers does; of a thought
        nothing is in the answer. Raises UserError where an answer leaves the prompt no room."""
        if config.context < answer_tokens + 3:
            raise UserError(
                f"context={config.context} must be at least answer_tokens={answer_tokens} and 3 more, for the prompt"
            )
        self.engine = Engine(decoder, tokenizer, config, mesh=mesh)
        self.params = nnx.state(decoder)
        self.environment = SingleTurn(turn_tokens=answer_tokens)
        self.cache_size, self.require_complete, self.thinking = cache_size, require_complete, thinking
        self.cache: dict[bytes, ReaderReply] = {}
        """Answers by the digest of their prompt: 100,000 of a judge's prompts, each with a trajectory, would be gigabytes."""
        self.truncated = 0
        """Prompts that did not fit the context."""

    def close(self) -> None:
        """Gives back the engine's compiled programs; later questions raise UserError."""
        self.engine.close()

    def answers(self, prompts: Sequence[str | Prompt]) -> list[str]:
        """The model's answer to each prompt; a text is the user's turn of its chat template.

        A prompt that does not fit the model's context is cut: its body at the front, and a text at its own front, where
        the evidence begins. The first time that this happens a warning says of how many, and `truncated` counts them.
        """
        return [said.text for said in self.replies(prompts)]

    def replies(self, prompts: Sequence[str | Prompt]) -> list[ReaderReply]:
        """The same with the tokens of each, also of an answer that was remembered."""
        keys = [hashlib.sha256(repr(prompt).encode()).digest() for prompt in prompts]
        new = {key: prompt for key, prompt in zip(keys, prompts, strict=True) if key not in self.cache}
        before, room = self.truncated, self.engine.config.context - self.environment.turn_tokens - 2
        requests = [
            Request(
                Question(str(i), prompt if isinstance(prompt, str) else prompt.user_message, ()),
                self._fitted(prompt, room),
                i,
                temperature=0.0,
            )
            for i, prompt in enumerate(new.values())
        ]
        if requests:
            if self.truncated and not before:
                log.warning(
                    "%d of %d prompts are longer than the context of %d tokens of the model that is asked, and were cut at "
                    "their front; give it a larger context, or show it less",
                    self.truncated,
                    len(requests),
                    self.engine.config.context,
                )
            found = self.engine.run(self.params, requests, self.environment, jax.random.key(0))
            for key, trajectory in zip(new, found, strict=True):
                written = int((trajectory.roles == POLICY).sum())
                self.cache[key] = ReaderReply(
                    self._text(trajectory), len(trajectory.roles) - written, written
                )
        said = [self.cache[key] for key in keys]
        for key in list(self.cache)[: max(len(self.cache) - self.cache_size, 0)]:
            del self.cache[key]
        return said

    def _text(self, trajectory: Trajectory) -> str:
        """The answer; "" if logits were not finite, or if the text broke off before an answer that must be complete had ended."""
        if trajectory.ended == NOT_FINITE or (self.require_complete and trajectory.ended != "answer"):
            return ""
        return after_thought("".join(responses(trajectory.segments))).strip()

    def _fitted(self, prompt: str | Prompt, room: int) -> Int[np.ndarray, "T"]:
        ids = chat_ids(self.engine.tokenizer, prompt, self.thinking)
        if len(ids) <= room:
            return ids
        self.truncated += 1
        return fitting_ids(self.engine.tokenizer, prompt, room, self.thinking)
