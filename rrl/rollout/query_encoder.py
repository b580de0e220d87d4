"""The query encoder of a rollout: embeds the queries of searches on the device, inside the episode loop."""

import dataclasses
import math

import jax
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

QUERIES_PER_ENCODE = 4
"""Number of queries that are embedded together if `QueryEncoder.embed` runs in batches."""


@dataclasses.dataclass(frozen=True)
class QueryEncoder:
    """The part of a text encoder that the loop runs on the device."""

    graph: nnx.GraphDef
    pad_token_id: int
    query_tokens: int
    """Width of its input."""
    dim: int
    """Width of an embedding."""

    def embed(
        self,
        state: PyTree,
        queries: Int[Array, "queries query_tokens"],
        count: Int[Array, ""],
        previous: Float[Array, "queries E"],
        *,
        in_batches: bool,
    ) -> Float[Array, "queries E"]:
        """Return the embeddings of the queries, each at its query's index. Entries without a query are arbitrary.

        Args:
          state: the encoder's parameters.
          queries: padded token ids of all data shards, one shard after the other.
          count: number of queries of the shard with the most.
          previous: result of the last call; returned if `count` is 0.
          in_batches: embed only the first `count` queries, QUERIES_PER_ENCODE at a time; for a single data shard.
            Otherwise embed all entries of `queries` together if `count` > 0.
        """
        encoder = nnx.merge(self.graph, state)

        def embed(queries: jax.Array) -> jax.Array:
            return encoder.embed(queries, queries != self.pad_token_id)

        if not in_batches:
            return jax.lax.cond(count > 0, lambda: embed(queries), lambda: previous)
        batch_size = math.gcd(len(queries), QUERIES_PER_ENCODE)

        def embed_batch(index: jax.Array, embeddings: jax.Array) -> jax.Array:
            new = embed(jax.lax.dynamic_slice_in_dim(queries, index * batch_size, batch_size))
            return jax.lax.dynamic_update_slice_in_dim(embeddings, new, index * batch_size, axis=0)

        return jax.lax.fori_loop(0, (count + batch_size - 1) // batch_size, embed_batch, previous)
