"""Generalised advantage estimation over the policy's own tokens of packed rows."""

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
    """Advantages and returns (advantage + value) of policy tokens; 0 elsewhere.

    With t' the policy's next token in the segment (V = 0 after its last):
    A_t = delta_t + discount·gae_lambda·A_t', delta_t = r_t + discount·V_t' - V_t (Schulman et al. 2016, Eqs. 11 and 16; R3-RAG,
    Eq. 8). Environment tokens are no steps of the policy: their values and rewards are not read, and no discount is paid
    for their length. Segments are independent.

    R3-RAG's default form needs nothing else: each step of an episode is a segment of its own (a fresh prompt), its reward
    stands on its last token, discount = gae_lambda = 1, and the result is whitened over the batch. Its Eq. 8, where later
    steps count too, is this function on segments that are whole episodes (`CriticConfig.across_contexts`).

    Args:
      rewards: of each policy token.
      values: V of the state in which token t was chosen, that is, after token t - 1.
      policy: True on the policy's tokens.
      segment_ids: which trajectory of its row a token belongs to; 0 is padding.
      discount: gamma.
      gae_lambda: lambda.
    """
    # What stands right of a token matters only within its segment; what stands there, seen from t, is carried leftwards
    # by the linear recurrence x_t = a_t + b_t·x_(t+1), which associates: logarithmic depth instead of T steps.
    follows = jnp.pad(segment_ids[:, 1:] == segment_ids[:, :-1], ((0, 0), (0, 1))).astype(jnp.float32)
    values, rewards = jnp.where(policy, values, 0.0), jnp.where(policy, rewards, 0.0)
    first_value = _carry_left(values, jnp.where(policy, 0.0, follows))
    following = follows * _left(first_value)
    delta = jnp.where(policy, rewards + discount * following - values, 0.0)
    advantage = _carry_left(delta, follows * jnp.where(policy, discount * gae_lambda, 1.0))
    advantage = jnp.where(policy, advantage, 0.0)
    return advantage, jnp.where(policy, advantage + values, 0.0)


def before_token(values: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """From values after each token to values of the state in which each token was chosen; 0 for the first of a row."""
    return jnp.pad(values[:, :-1], ((0, 0), (1, 0)))


def _left(x: Float[Array, "B T"]) -> Float[Array, "B T"]:
    return jnp.pad(x[:, 1:], ((0, 0), (0, 1)))


def _carry_left(added: Float[Array, "B T"], kept: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """x_t = added_t + kept_t·x_(t+1), from the right end."""

    def join(right: tuple[Array, Array], left: tuple[Array, Array]) -> tuple[Array, Array]:
        return left[0] + left[1] * right[0], left[1] * right[1]

    return jax.lax.associative_scan(join, (added, kept), reverse=True, axis=1)[0]
