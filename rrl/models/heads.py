"""A number for each token instead of logits: the critic of PPO, and reward models, on the body of a decoder."""

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from rrl.models.attention_backends import AttentionBackend
from rrl.models.config import DecoderConfig
from rrl.models.decoder import Decoder, Remat


class ValueModel(Decoder):
    """A decoder with one linear output, float32: Hugging Face's ...ForSequenceClassification with one label.

    The output starts at 0, so that a critic's first advantages are the rewards themselves. Arguments as for `Decoder`;
    there is no head for logits.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        attention: AttentionBackend = "xla",
        remat: Remat = "none",
    ):
        body = dataclasses.replace(config, tie_embeddings=True)
        super().__init__(
            body, rngs=rngs, dtype=dtype, param_dtype=param_dtype, attention=attention, remat=remat
        )
        self.score = nnx.Param(jnp.zeros((config.hidden, 1), param_dtype))

    def values(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
        branches: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T"]:
        """The value after each token of a packed batch; arguments as for `Decoder.__call__`."""
        hidden = self(tokens, positions=positions, segment_ids=segment_ids, branches=branches)
        return jnp.matmul(hidden, self.score[...].astype(hidden.dtype), preferred_element_type=jnp.float32)[
            ..., 0
        ]

    def sequence_reward(self, tokens: Int[Array, "B T"], lengths: Int[Array, "B"]) -> Float[Array, "B"]:
        """What a reward model says of whole sequences, padded on the right: the value after each one's last token."""
        at = jnp.arange(tokens.shape[1])
        positions = jnp.broadcast_to(at, tokens.shape)
        values = self.values(
            tokens, positions=positions, segment_ids=(at < lengths[:, None]).astype(jnp.int32)
        )
        return jnp.take_along_axis(values, lengths[:, None] - 1, axis=1)[:, 0]
