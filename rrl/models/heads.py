"""`ValueModel`: a decoder with a scalar output per token, for PPO's critic and for reward models."""

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from rrl.models.attention_backends import AttentionBackend
from rrl.models.config import DecoderConfig
from rrl.models.decoder import Decoder, Remat


class ValueModel(Decoder):
    """A decoder with one linear float32 output per token: Hugging Face's ...ForSequenceClassification with one label.

    The output's weights start at 0, so that a new critic predicts the value 0 for every token. The model has no logits.

    Args: see `Decoder`.
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
        body = dataclasses.replace(config, tie_embeddings=True)  # so that no matrix for logits is made
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
        """A reward model's score of whole sequences: the value after each sequence's last token.

        Args:
            tokens: sequences, padded on the right.
            lengths: number of tokens of each sequence.
        """
        columns = jnp.arange(tokens.shape[1])
        positions = jnp.broadcast_to(columns, tokens.shape)
        values = self.values(
            tokens, positions=positions, segment_ids=(columns < lengths[:, None]).astype(jnp.int32)
        )
        return jnp.take_along_axis(values, lengths[:, None] - 1, axis=1)[:, 0]
