"""The sentence encoder: one Flax NNX module for BERT, RoBERTa and XLM-RoBERTa (E5, BGE, MiniLM and others)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from rrl.errors import UserError
from rrl.models.config import EncoderConfig, Pooling

INITIAL_STD = 0.02
"""Standard deviation of all initial matrices, as in BERT."""


class EncoderLayer(nnx.Module):
    """Self-attention and a GELU layer, each followed by LayerNorm; holds all L layers, stacked on a leading axis."""

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike):
        c = config

        def kernel(*shape: int) -> nnx.Param:
            draw = jax.random.normal(rngs.params(), (c.layers, *shape), param_dtype)
            return nnx.Param(draw * jnp.asarray(INITIAL_STD, param_dtype))

        def constant(value: float, *shape: int) -> nnx.Param:
            return nnx.Param(jnp.full((c.layers, *shape), value, param_dtype))

        self.config = config
        for name in ("q", "k", "v"):
            setattr(self, name, kernel(c.hidden, c.heads, c.head_dim))
            setattr(self, f"{name}_bias", constant(0.0, c.heads, c.head_dim))
        self.o = kernel(c.heads, c.head_dim, c.hidden)
        self.o_bias = constant(0.0, c.hidden)
        self.attention_norm = constant(1.0, c.hidden)
        self.attention_norm_bias = constant(0.0, c.hidden)
        self.up = kernel(c.hidden, c.mlp)
        self.up_bias = constant(0.0, c.mlp)
        self.down = kernel(c.mlp, c.hidden)
        self.down_bias = constant(0.0, c.hidden)
        self.mlp_norm = constant(1.0, c.hidden)
        self.mlp_norm_bias = constant(0.0, c.hidden)

    def __call__(self, x: Float[Array, "B T D"], mask: Bool[Array, "B T"]) -> Float[Array, "B T D"]:
        """Applies one layer; tokens outside the mask are not attended to."""
        p = {
            name: value.astype(x.dtype)
            for name, value in nnx.to_pure_dict(nnx.state(self, nnx.Param)).items()
        }
        q, k, v = (jnp.einsum("BTD,DNH->BTNH", x, p[name]) + p[f"{name}_bias"] for name in ("q", "k", "v"))
        scores = jnp.einsum("BTNH,BSNH->BNTS", q, k, preferred_element_type=jnp.float32)
        scores = scores * self.config.head_dim**-0.5
        scores = jnp.where(mask[:, None, None, :], scores, jnp.finfo(jnp.float32).min)
        attended = jnp.einsum("BNTS,BSNH->BTNH", jax.nn.softmax(scores, axis=-1).astype(x.dtype), v)
        eps = self.config.layer_norm_eps
        x = x + jnp.einsum("BTNH,NHD->BTD", attended, p["o"]) + p["o_bias"]
        x = layer_norm(x, p["attention_norm"], p["attention_norm_bias"], eps)
        y = jax.nn.gelu(x @ p["up"] + p["up_bias"], approximate=False) @ p["down"] + p["down_bias"]
        return layer_norm(x + y, p["mlp_norm"], p["mlp_norm_bias"], eps)


class Encoder(nnx.Module):
    """BERT without its pooler; `embed` returns one vector per text.

    Args:
        config: shape of the model.
        rngs: its stream "params" draws the initial parameters.
        dtype: of the computation; norms, softmax and pooling are always float32.
        param_dtype: of the stored parameters.
    """

    def __init__(
        self,
        config: EncoderConfig,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
    ):
        def table(rows: int) -> nnx.Param:
            draw = jax.random.normal(rngs.params(), (rows, config.hidden), param_dtype)
            return nnx.Param(draw * jnp.asarray(INITIAL_STD, param_dtype))

        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.embedding = table(config.vocab_size)
        self.position_embedding = table(config.max_positions)
        self.type_embedding = table(config.type_vocab_size)
        self.norm = nnx.Param(jnp.ones(config.hidden, param_dtype))
        self.norm_bias = nnx.Param(jnp.zeros(config.hidden, param_dtype))
        self.layers = EncoderLayer(config, rngs=rngs, param_dtype=param_dtype)

    def __call__(self, tokens: Int[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T D"]:
        """Hidden states; those outside the mask are meaningless."""
        length = tokens.shape[1]
        if length > self.config.max_tokens:
            raise UserError(
                f"{length} tokens are more than the encoder's {self.config.max_tokens} "
                f"(max_positions={self.config.max_positions}); cut the texts"
            )
        if self.config.positions_follow_padding:
            real = tokens != self.config.pad_token_id
            position_ids = jnp.cumsum(real, axis=1) * real + self.config.pad_token_id
            positions = self.position_embedding[...][position_ids]
        else:
            positions = self.position_embedding[...][:length]
        x = self.embedding[...][tokens] + positions + self.type_embedding[...][0]
        x = layer_norm(x.astype(self.dtype), self.norm[...], self.norm_bias[...], self.config.layer_norm_eps)
        graph, stacked = nnx.split(self.layers)
        x, _ = jax.lax.scan(lambda x, state: (nnx.merge(graph, state)(x, mask), None), x, stacked)
        return x

    def embed(self, tokens: Int[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B E"]:
        """Embeddings in float32, pooled by `config.pooling`; zeros for an empty mask."""
        return pool(self(tokens, mask.astype(bool)), mask, self.config.pooling)


def pool(hidden: Float[Array, "B T D"], mask: Bool[Array, "B T"], pooling: Pooling) -> Float[Array, "B D"]:
    """Pools the hidden states inside the mask into one float32 vector per text; zeros for an empty mask."""
    mask = mask.astype(bool)
    if pooling.mode == "cls":
        mask = mask & (jnp.cumsum(mask, axis=1) == 1)
    total = jnp.sum(hidden.astype(jnp.float32) * mask[..., None], axis=1)
    pooled = total / jnp.maximum(mask.sum(axis=1, keepdims=True), 1)
    if not pooling.normalize:
        return pooled
    return pooled / jnp.maximum(jnp.linalg.norm(pooled, axis=-1, keepdims=True), 1e-12)


def layer_norm(
    x: Float[Array, "... D"], scale: Float[Array, "D"], bias: Float[Array, "D"], eps: float
) -> Float[Array, "... D"]:
    """LayerNorm over the last axis: (x - mean) / std * scale + bias, computed in float32 and returned in x's dtype."""
    x32 = x.astype(jnp.float32)
    x32 = x32 - x32.mean(axis=-1, keepdims=True)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)
