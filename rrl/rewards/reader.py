"""A frozen model that answers prompts in one turn. It serves as a judge, and as R-Search's cross-family reader (Eq. 4)."""

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

SPARE_TOKENS = 2
"""Tokens of the context beyond the prompt and the answer, so that an answer that is too long ends at its own limit and not at the
end of the context."""
MIN_PROMPT_TOKENS = 1
"""Tokens that the answer must leave for the prompt."""


class ReaderReply(NamedTuple):
    """An answer, and the number of tokens of its prompt and of the answer."""

    text: str
    prompt_tokens: int
    answer_tokens: int


class Reader:
    """Answers prompts greedily in one turn. Equal prompts are answered once; a cache holds the latest `cache_size` answers."""

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
        """Make a reader.

        Args:
          decoder: the frozen model.
          tokenizer: its tokenizer.
          config: the settings of its rollout engine.
          answer_tokens: maximum number of tokens of an answer.
          cache_size: answers in the cache.
          require_complete: return "" for an answer that reaches `answer_tokens`. A judge needs this, because the complete
            reply may reach another conclusion than a truncated one.
          thinking: whether a model that can think before it answers does so. Thoughts are never part of the answer.
          mesh: the devices; None: one device.

        Raises UserError if the answer leaves the prompt no room in the context.
        """
        reserved = MIN_PROMPT_TOKENS + SPARE_TOKENS
        if config.context < answer_tokens + reserved:
            raise UserError(
                f"context={config.context} must be at least answer_tokens={answer_tokens} plus {reserved}, to leave room for "
                "the prompt"
            )
        self.engine = Engine(decoder, tokenizer, config, mesh=mesh)
        self.params = nnx.state(decoder)
        self.environment = SingleTurn(turn_tokens=answer_tokens)
        self.cache_size, self.require_complete, self.thinking = cache_size, require_complete, thinking
        self.cache: dict[bytes, ReaderReply] = {}
        """Reply by the SHA-256 digest of its prompt. Prompts are not kept: a judge's prompt contains a trajectory, so they would
        need gigabytes."""
        self.truncated = 0
        """Number of prompts that did not fit the context and were truncated."""

    def close(self) -> None:
        """Release the engine's compiled programs. Later calls raise UserError."""
        self.engine.close()

    def answers(self, prompts: Sequence[str | Prompt]) -> list[str]:
        """Return the model's answer to each prompt; a string is the user message of the chat template.

        A prompt that does not fit the context is truncated: a `Prompt` at the front of its body, a string at its own front.
        `truncated` counts such prompts, and the first occurrence logs a warning.
        """
        return [reply.text for reply in self.replies(prompts)]

    def replies(self, prompts: Sequence[str | Prompt]) -> list[ReaderReply]:
        """Return the answers as `answers` does, with their token counts. Cached replies have the counts of their first run."""
        keys = [hashlib.sha256(repr(prompt).encode()).digest() for prompt in prompts]
        new = {key: prompt for key, prompt in zip(keys, prompts, strict=True) if key not in self.cache}
        truncated_before = self.truncated
        room = self.engine.config.context - self.environment.turn_tokens - SPARE_TOKENS
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
            if self.truncated and not truncated_before:
                log.warning(
                    "%d of %d prompts exceed the model's context of %d tokens and were truncated at their front; raise the "
                    "context, or shorten the prompts",
                    self.truncated,
                    len(requests),
                    self.engine.config.context,
                )
            trajectories = self.engine.run(self.params, requests, self.environment, jax.random.key(0))
            for key, trajectory in zip(new, trajectories, strict=True):
                answer_tokens = int((trajectory.roles == POLICY).sum())
                self.cache[key] = ReaderReply(
                    self._text(trajectory), len(trajectory.roles) - answer_tokens, answer_tokens
                )
        replies = [self.cache[key] for key in keys]
        for key in list(self.cache)[: max(len(self.cache) - self.cache_size, 0)]:
            del self.cache[key]
        return replies

    def _text(self, trajectory: Trajectory) -> str:
        """Return the answer; "" if logits were not finite, or if a required complete answer was truncated."""
        if trajectory.ended == NOT_FINITE or (self.require_complete and trajectory.ended != "answer"):
            return ""
        return after_thought("".join(responses(trajectory.segments))).strip()

    def _fitted(self, prompt: str | Prompt, room: int) -> Int[np.ndarray, "T"]:
        """Return the token ids of a prompt, truncated to `room` tokens; count it in `truncated` if it is too long."""
        ids = chat_ids(self.engine.tokenizer, prompt, self.thinking)
        if len(ids) <= room:
            return ids
        self.truncated += 1
        return fitting_ids(self.engine.tokenizer, prompt, room, self.thinking)
