"""The state of the rollout on the device: what decoding and prefilling read and update."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rrl.models.cache import KVCache
from rrl.rollout.drafts import NgramDrafts
from rrl.rollout.exchange import NO_TOKEN, PAUSED, RECENT_TOKENS


class DecodeState(NamedTuple):
    """State of all slots. A slot holds one episode in flight. A is the maximum number of tokens of a turn."""

    status: Int[Array, "slots"]
    """DECODING, PAUSED, BLOCKED or OFF."""
    stop: Int[Array, "slots"]
    """Why the slot paused: index of the stop string, or a STOP_* code."""
    position: Int[Array, "slots"]
    """Cache position at which `pending` will be written."""
    recent: Int[Array, "slots recent"]
    """The last RECENT_TOKENS tokens of the slot's last prefill request and of what was sampled since; NO_TOKEN in place of each
    missing one. The last of them, `pending`, is not in the cache yet."""
    stop_state: Int[Array, "slots"]
    """State of the stop automaton within this turn."""
    seed: Int[Array, "slots"]
    """Seed of the request, folded into the sampling key."""
    offset: Int[Array, "slots"]
    """Tokens of the trajectory in earlier contexts: an environment may clear the context and continue with a new prompt."""
    turn_limit: Int[Array, "slots"]
    """Maximum tokens of this turn, at most A."""
    temperature: Float[Array, "slots"]
    ids: Int[Array, "slots A"]
    """Tokens that the policy wrote in this turn."""
    logps: Float[Array, "slots A"]
    """Their log-probabilities under the full distribution."""
    sampled_logps: Float[Array, "slots A"]
    """Their log-probabilities under the distribution from which they were sampled."""
    length: Int[Array, "slots"]
    """Number of these tokens."""

    @property
    def pending(self) -> Int[Array, "slots"]:
        """The last token, whose successor is sampled next."""
        return self.recent[:, -1]

    def rows(self, slots: Int[Array, "rows"] | None) -> "DecodeState":
        """Return the state with one row per entry of `slots`. None: row i is slot i, for all slots.

        `ids`, `logps` and `sampled_logps` are not selected and still have one row per slot: no decode step reads them.
        """
        if slots is None:
            return self
        not_selected = {"ids", "logps", "sampled_logps"}
        return self._replace(
            **{name: part[slots] for name, part in self._asdict().items() if name not in not_selected}
        )

    @staticmethod
    def create(slots: int, turn_tokens: int) -> "DecodeState":
        """Return the initial state: all slots are paused and wait for their first prompt."""
        zeros = jnp.zeros(slots, jnp.int32)
        turn = (slots, turn_tokens)
        return DecodeState(
            status=jnp.full(slots, PAUSED, jnp.int32),
            stop=zeros,
            position=zeros,
            recent=jnp.full((slots, RECENT_TOKENS), NO_TOKEN, jnp.int32),
            stop_state=zeros,
            seed=zeros,
            offset=zeros,
            turn_limit=zeros,
            temperature=jnp.zeros(slots, jnp.float32),
            ids=jnp.zeros(turn, jnp.int32),
            logps=jnp.zeros(turn, jnp.float32),
            sampled_logps=jnp.zeros(turn, jnp.float32),
            length=zeros,
        )


class RolloutState(NamedTuple):
    """All arrays that decoding and prefilling update."""

    slots: DecodeState
    cache: KVCache
    """Row i belongs to slot i."""
    drafts: NgramDrafts
    """Proposes draft tokens for speculative decoding."""
