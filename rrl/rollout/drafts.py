"""Speculative decoding without a draft model, by prompt lookup: one decode step can write several tokens per row.

A search agent copies names from its passages, and it repeats sentences of other samples of the same question. So the draft
tokens are those that followed the last occurrence of the same n-gram in any text of the data shard (prompt lookup decoding,
Saxena 2023). A decode step also computes the logits after each draft token, and samples from them in order while the samples
equal the drafts. A sample depends only on the request and the position (`rrl.rollout.sampling`). So no rejection sampling is
needed, unlike with a draft model (Leviathan et al. 2023). The tokens are, up to rounding, those of decoding one token per step.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Int

from rrl.parallel.mesh import ROW_AXES
from rrl.parallel.rules import constrain
from rrl.rollout.exchange import RECENT_TOKENS

NGRAMS = (4, 2, 1)
"""Lengths of the n-grams that are looked up. The longest known n-gram wins."""
HASH_BITS = 16
"""Bits of an n-gram's hash, its index in the table. On a collision the later n-gram overwrites the earlier one."""
_FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F)
"""Odd hash factors, one per token of an n-gram."""


class NgramDrafts(NamedTuple):
    """The last token that followed each n-gram, per data shard. N-grams across the start of a prefill chunk are not recorded."""

    table: Int[Array, "shards entries"]
    """The next token + 1; 0: unknown."""

    @staticmethod
    def create(shards: int) -> "NgramDrafts":
        """Return empty tables."""
        return NgramDrafts(
            constrain(jnp.zeros((shards, len(NGRAMS) << HASH_BITS), jnp.int32), ROW_AXES, None)
        )

    def propose(self, recent: Int[Array, "rows recent"], count: int) -> Int[Array, "rows count"]:
        """Return `count` draft tokens per row, 0 if unknown. If slots are sharded over devices, so are the rows."""

        def on_shard(table: Array, recent: Array) -> Array:
            tokens = []
            for _ in range(count):
                next_tokens = table[0][_table_indices(recent)]  # token + 1, or 0 if unknown
                longest_known = jnp.argmax(next_tokens > 0, axis=1)[:, None]
                token = jnp.take_along_axis(next_tokens, longest_known, axis=1)[:, 0]
                tokens.append(jnp.maximum(token - 1, 0))
                recent = shift_in(recent, tokens[-1])
            return jnp.stack(tokens, axis=1)

        return self._by_shard(on_shard, recent)

    def update(
        self,
        recent: Int[Array, "rows T recent"],
        tokens: Int[Array, "rows T"],
        valid: Bool[Array, "rows T"],
    ) -> "NgramDrafts":
        """Return tables that also hold new tokens.

        If slots are sharded over devices, so are the rows. If one n-gram has several next tokens, any of them may win.

        Args:
          recent: the last tokens before each token; n-grams with NO_TOKEN are skipped.
          tokens: the next tokens.
          valid: which tokens to add; the others are padding.
        """

        def on_shard(table: Array, recent: Array, tokens: Array, valid: Array) -> Array:
            complete = jnp.stack([recent[..., RECENT_TOKENS - size] >= 0 for size in NGRAMS], axis=-1)
            indices = jnp.where(complete & valid[..., None], _table_indices(recent), table.shape[1])
            values = jnp.broadcast_to(tokens[..., None] + 1, indices.shape)
            return table.at[0, indices].set(values, mode="drop")

        return NgramDrafts(self._by_shard(on_shard, recent, tokens, valid))

    def _by_shard(self, function: Callable[..., Array], *arrays: Array) -> Array:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.size == 1:
            return function(self.table, *arrays)
        spec = PartitionSpec(ROW_AXES)
        return jax.shard_map(function, in_specs=spec, out_specs=spec, check_vma=False)(self.table, *arrays)


def shift_in(recent: Int[Array, "... recent"], token: Int[Array, "..."]) -> Int[Array, "... recent"]:
    """Return the last RECENT_TOKENS tokens after appending `token`."""
    return jnp.concatenate([recent[..., 1:], token[..., None]], axis=-1)


def preceding_tokens(
    recent: Int[Array, "rows recent"], tokens: Int[Array, "rows T"]
) -> Int[Array, "rows T recent"]:
    """Return the last RECENT_TOKENS tokens before each of `tokens`, in the text `recent` + `tokens`."""
    text = jnp.concatenate([recent, tokens], axis=1)
    time = tokens.shape[1]
    return jnp.stack([text[:, index : index + time] for index in range(RECENT_TOKENS)], axis=-1)


def _table_indices(recent: Int[Array, "... recent"]) -> Int[Array, "... ngrams"]:
    """Return the table index of the last tokens' n-gram of each length."""
    tokens, indices = recent.astype(jnp.uint32), []
    for number, size in enumerate(NGRAMS):
        product = sum(tokens[..., RECENT_TOKENS - 1 - i] * jnp.uint32(_FACTORS[i]) for i in range(size))
        mixed = (product ^ (product >> 15)) * jnp.uint32(_FACTORS[size - 1])
        indices.append((mixed >> (32 - HASH_BITS)).astype(jnp.int32) + (number << HASH_BITS))
    return jnp.stack(indices, axis=-1)
