"""Generalised advantage estimation (GAE) over the policy tokens of packed rows."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


@functools.partial(jax.jit, static_argnames=("discount", "gae_lambda"))
def gae(
    rewards: Float[Array, "B T"],
    values: Float[Array, "B T"],
    policy: Bool[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    *,
    discount: float = 1.0,
    gae_lambda: float = 1.0,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Advantages and returns (advantage + value) of policy tokens; 0 on all other tokens.

    A_t = delta_t + discount·gae_lambda·A_t' with delta_t = r_t + discount·V_t' - V_t, where t' is the next policy token of
    the segment, and A_t' = V_t' = 0 after the last (Schulman et al. 2016, Eqs. 11 and 16; R3-RAG, Eq. 8). Environment
    tokens are not steps of the policy: their values and rewards are ignored, and they cost no discount. Segments are
    independent.

    In R3-RAG as released, each step of an episode is one segment (a new prompt) with its reward on its last token, discount =
    gae_lambda = 1, and the result is whitened over the batch. R3-RAG's Eq. 8, in which later steps count too, is this
    function with one segment per episode (`CriticConfig.across_contexts`).

    Args:
      rewards: reward of each policy token.
      values: V of the state in which token t was chosen, that is, after token t - 1.
      policy: True on the policy's tokens.
      segment_ids: segment of each token in its row: 1, 2, ...; 0 is padding.
      discount: gamma.
      gae_lambda: lambda.
    """
    # A recursion x_t = added_t + decay_t·x_(t+1) composes affine maps. Composition is associative, so that a parallel scan
    # needs only log T rounds. decay_t = 0 at the end of a segment separates the segments.
    has_next = jnp.pad(segment_ids[:, 1:] == segment_ids[:, :-1], ((0, 0), (0, 1))).astype(jnp.float32)
    values, rewards = jnp.where(policy, values, 0.0), jnp.where(policy, rewards, 0.0)
    # V of the first policy token at or after t, and V_t', that of the first one after t.
    value_from = _scan_left(values, jnp.where(policy, 0.0, has_next))
    next_value = has_next * _shift_left(value_from)
    delta = jnp.where(policy, rewards + discount * next_value - values, 0.0)
    advantage = _scan_left(delta, has_next * jnp.where(policy, discount * gae_lambda, 1.0))
    advantage = jnp.where(policy, advantage, 0.0)
    return advantage, jnp.where(policy, advantage + values, 0.0)


def values_before_tokens(values_after: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Value of the state in which each token was chosen: entry t is the value after token t - 1; 0 for a row's first token."""
    return jnp.pad(values_after[:, :-1], ((0, 0), (1, 0)))


def _shift_left(x: Float[Array, "B T"]) -> Float[Array, "B T"]:
    return jnp.pad(x[:, 1:], ((0, 0), (0, 1)))


def _scan_left(added: Float[Array, "B T"], decay: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """x_t = added_t + decay_t·x_(t+1), from the right end."""

    def join(right: tuple[Array, Array], left: tuple[Array, Array]) -> tuple[Array, Array]:
        return left[0] + left[1] * right[0], left[1] * right[1]

    return jax.lax.associative_scan(join, (added, decay), reverse=True, axis=1)[0]
