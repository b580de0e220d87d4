"""A frozen model that answers prompts: R-Search's reader of another family (Eq. 4), and judges."""

import hashlib
from collections.abc import Sequence

import jax
from flax import nnx
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerBase

from rrl.data.questions import Question
from rrl.errors import UserError
from rrl.models.decoder import Decoder
from rrl.rollout.engine import Engine, EngineConfig
from rrl.rollout.episodes import Request
from rrl.rollout.protocol import SingleTurn
from rrl.rollout.trajectory import POLICY
from rrl.text.chat import Prompt, fitting_ids


class Reader:
    """Answers prompts greedily in one turn; equal prompts are answered once, the latest `remember` answers kept."""

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: PreTrainedTokenizerBase,
        config: EngineConfig,
        *,
        answer_tokens: int = 32,
        remember: int = 100_000,
        whole: bool = False,
        mesh: Mesh | None = None,
    ) -> None:
        """`whole`: an answer that `answer_tokens` cut is none, "", as a judge's is: what half of it says is not what the whole
        would have said. Raises UserError where an answer leaves the prompt no room."""
        if config.context < answer_tokens + 3:
            raise UserError(
                f"context={config.context} must be at least answer_tokens={answer_tokens} and 3 more, for the prompt"
            )
        self.engine = Engine(decoder, tokenizer, config, mesh=mesh)
        self.params = nnx.state(decoder)
        self.environment = SingleTurn(turn_tokens=answer_tokens)
        self.remember, self.whole = remember, whole
        self.memory: dict[bytes, str] = {}
        """Answers by the digest of their prompt: 100,000 of a judge's prompts, each with a trajectory, would be gigabytes."""

    def answers(self, prompts: Sequence[str | Prompt]) -> list[str]:
        """The model's answer to each prompt; a text is the user's turn of its chat template.

        A prompt that does not fit the model's context is cut: its body at the front, and a text at its own front, where
        the evidence begins.
        """
        keys = [hashlib.sha256(repr(prompt).encode()).digest() for prompt in prompts]
        new = {key: prompt for key, prompt in zip(keys, prompts, strict=True) if key not in self.memory}
        room = self.engine.config.context - self.environment.turn_tokens - 2
        requests = [
            Request(
                Question(str(i), prompt if isinstance(prompt, str) else prompt.said, ()),
                fitting_ids(self.engine.tokenizer, prompt, room),
                i,
                temperature=0.0,
            )
            for i, prompt in enumerate(new.values())
        ]
        if requests:
            found = self.engine.run(self.params, requests, self.environment, jax.random.key(0))
            for key, trajectory in zip(new, found, strict=True):
                said = "".join(t for role, t in trajectory.segments if role == POLICY).strip()
                self.memory[key] = said if trajectory.ended == "answer" or not self.whole else ""
        answers = [self.memory[key] for key in keys]
        for key in list(self.memory)[: max(len(self.memory) - self.remember, 0)]:
            del self.memory[key]
        return answers
