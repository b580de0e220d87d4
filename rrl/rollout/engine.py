"""The rollout engine: one jitted loop decodes, asks the host, and prefills its answers into the live KV cache.

Rows that pause wait while the others decode; a finished row takes the next request from the queue. The host is called
through `io_callback` inside a fully manual `shard_map`, so that every data shard asks its own host. `run_reference`
drives the same jitted steps from Python: it is what the loop is tested against.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Key, PyTree
from transformers import PreTrainedTokenizerBase

from rrl.data.tokenizer import check_tokenizer, token_bytes
from rrl.errors import UserError
from rrl.models.decoder import Decoder
from rrl.parallel.mesh import make_mesh
from rrl.retrieval.retriever import Retriever
from rrl.rollout.automaton import compile_stops
from rrl.rollout.host import Host, Request, Turns
from rrl.rollout.loop import EngineConfig, Programs, QueryEncoder
from rrl.rollout.protocol import Environment
from rrl.rollout.trajectory import Trajectory


@dataclasses.dataclass(slots=True)
class RolloutStats:
    """What a run of the engine cost."""

    seconds: float = 0.0
    retrieval_seconds: float = 0.0
    policy_tokens: int = 0
    searches_failed: int = 0


class Engine:
    """Runs episodes of one decoder. Parameters are an argument of `run`, so that training needs no copy."""

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: PreTrainedTokenizerBase,
        config: EngineConfig,
        *,
        retriever: Retriever | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.retriever = retriever
        self.mesh = mesh or make_mesh(data=1, devices=jax.devices()[:1])
        check_tokenizer(tokenizer, decoder.config)
        self.bytes = token_bytes(tokenizer)
        self.bytes += [b""] * (decoder.config.vocab_size - len(self.bytes))
        encoder = retriever.encoder if retriever is not None and retriever.needs_embeddings else None
        text_encoder = retriever.text_encoder if retriever is not None and encoder is not None else None
        self.encoder_state: Any = None
        query_encoder = None
        if text_encoder is not None:
            graph, self.encoder_state = nnx.split(encoder)
            query_encoder = QueryEncoder(
                graph,
                pad_token_id=text_encoder.tokenizer.pad_token_id,
                query_tokens=text_encoder.settings.query_tokens,
                dim=text_encoder.dim,
            )
        self.programs = Programs(
            nnx.split(decoder)[0],
            decoder.config,
            config,
            self.mesh,
            eos=jnp.asarray(_eos_ids(tokenizer), jnp.int32),
            answer=self._answer,
            encoder=query_encoder,
        )
        self.stats = RolloutStats()
        self._hosts: list[Host] = []
        self._told: set[type] = set()
        self._built: dict[Any, Callable] = {}

    # -- public ------------------------------------------------------------------------------------------------------

    def encode(self, text: str) -> np.ndarray:
        """Token ids of `text`, no special tokens added."""
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=False), np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of token ids, from their bytes; special tokens are left out."""
        return b"".join(self.bytes[int(i)] for i in ids).decode(errors="replace")

    def run(
        self,
        params: PyTree,
        requests: Sequence[Request],
        environment: Environment,
        key: Key,
        *,
        retriever: Retriever | None = None,
        on_finish: Callable[[int], None] = lambda done: None,
        reference: bool = False,
    ) -> list[Trajectory]:
        """Runs every request to its end; trajectories come back in the order of `requests`.

        `params` is the decoder's state (`nnx.state(decoder)`). `retriever` stands in for the engine's own (another
        corpus behind the same encoder). `reference` runs the host-driven loop. Raises what the environment raised, and
        UserError for a prompt that does not fit the context.
        """
        self._check(requests)
        start = time.perf_counter()
        done = 0

        def finished(index: int, trajectory: Trajectory) -> None:
            nonlocal done
            done += 1
            on_finish(done)

        indexed = list(enumerate(requests))
        self._hosts = [
            Host(
                indexed[shard :: self.programs.shards],
                environment,
                self.programs.limits,
                encode=self.encode,
                decode=self.decode,
                retriever=retriever or self.retriever,
                top_k=self.config.top_k,
                on_finish=finished,
                told=self._told,
            )
            for shard in range(self.programs.shards)
        ]
        automaton = compile_stops(environment.stops, self.bytes)
        signature = (environment.turn_tokens, automaton.first_accept, reference)
        if signature not in self._built:
            build = self.programs.reference_loop if reference else self.programs.episode_loop
            self._built[signature] = build(environment.turn_tokens, automaton.first_accept)
        table = jnp.asarray(automaton.table)
        with jax.set_mesh(self.mesh):
            jax.block_until_ready(self._built[signature](params, self.encoder_state, key, table))
        for host in self._hosts:
            if host.error is not None:
                raise host.error
        results = {index: value for host in self._hosts for index, value in host.finished.items()}
        trajectories = [results[index] for index in range(len(requests))]
        self.stats = RolloutStats(
            seconds=time.perf_counter() - start,
            retrieval_seconds=max(host.retrieval_seconds for host in self._hosts),
            policy_tokens=sum(trajectory.policy_tokens for trajectory in trajectories),
            searches_failed=sum(host.searches_failed for host in self._hosts),
        )
        return trajectories

    # -- the host ----------------------------------------------------------------------------------------------------

    def _answer(self, shard: Any, *report: Any) -> np.ndarray:
        """The callback: NumPy in, NumPy out."""
        *turn, embeddings = (np.asarray(part) for part in report)
        return self._hosts[int(shard)].exchange(Turns(*turn), embeddings)

    def _check(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if len(request.prompt) + 2 > self.config.context:
                raise UserError(
                    f"the prompt of question {request.question.id!r} has {len(request.prompt)} tokens, the context "
                    f"holds {self.config.context}: raise rollout.context or shorten the prompt"
                )


def _eos_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no eos_token: set it in tokenizer_config.json")
    return [int(tokenizer.eos_token_id)]
