"""Speculative decoding without a draft model: guesses at what rows write next, so that one step can write several tokens of each.

A search agent copies: names from its passages, and whole sentences that another sample of its question has written before it.
So the next tokens are looked up behind the last place where the last few stood, in whichever row: prompt lookup decoding (Saxena
2023), with a table of n-grams over all texts of a data shard. A step computes the logits behind each guess too, and draws from
them in turn as long as what it drew is what was guessed. What is drawn depends on the request and the position alone
(`rrl.rollout.sampling`): nothing is rejected to mend a distribution, as with a draft model (Leviathan et al. 2023), and the
tokens are, up to rounding, those of decoding one by one.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Int

from rrl.parallel.mesh import ROW_AXES
from rrl.parallel.rules import constrain
from rrl.rollout.exchange import RECENT

NGRAMS = (4, 2, 1)
"""How many last tokens are looked up: where it is not known what followed them, the next fewer."""
HASH_BITS = 16
"""An n-gram's place in the table is its hash of so many bits; a later one takes the place of an earlier."""
_FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F)
"""Odd, one for each token of an n-gram."""


class NgramDrafts(NamedTuple):
    """What followed what, in the rows of each data shard."""

    table: Int[Array, "shards places"]
    """The token behind an n-gram + 1; 0: none."""

    @staticmethod
    def create(shards: int) -> "NgramDrafts":
        """Nothing is known."""
        return NgramDrafts(
            constrain(jnp.zeros((shards, len(NGRAMS) << HASH_BITS), jnp.int32), ROW_AXES, None)
        )

    def propose(self, recent: Int[Array, "P RECENT"], count: int) -> Int[Array, "P count"]:
        """The tokens that are likely to follow; 0 where nothing is known. Where rows are split over devices, the P are too."""

        def on_one(table: Array, recent: Array) -> Array:
            guesses = []
            for _ in range(count):
                found = table[0][_places(recent)]
                longest = jnp.argmax(found > 0, axis=1)[:, None]
                known = jnp.take_along_axis(found, longest, axis=1)[:, 0]
                guesses.append(jnp.maximum(known - 1, 0))
                recent = following(recent, guesses[-1])
            return jnp.stack(guesses, axis=1)

        return self._by_shard(on_one, recent)

    def update(
        self,
        recent: Int[Array, "P T RECENT"],
        tokens: Int[Array, "P T"],
        valid: Bool[Array, "P T"],
    ) -> "NgramDrafts":
        """With what followed these, where valid; of two that followed the same, either. Of n-grams with NO_TOKEN in them nothing
        is learned. Where rows are split over devices, the P are too."""

        def on_one(table: Array, recent: Array, tokens: Array, valid: Array) -> Array:
            whole = jnp.stack([recent[..., RECENT - size] >= 0 for size in NGRAMS], axis=-1)
            places = jnp.where(whole & valid[..., None], _places(recent), table.shape[1])
            values = jnp.broadcast_to(tokens[..., None] + 1, places.shape)
            return table.at[0, places].set(values, mode="drop")

        return NgramDrafts(self._by_shard(on_one, recent, tokens, valid))

    def _by_shard(self, what: Callable[..., Array], *entries: Array) -> Array:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.size == 1:
            return what(self.table, *entries)
        spec = PartitionSpec(ROW_AXES)
        return jax.shard_map(what, in_specs=spec, out_specs=spec, check_vma=False)(self.table, *entries)


def following(recent: Int[Array, "... RECENT"], token: Int[Array, "..."]) -> Int[Array, "... RECENT"]:
    """The last tokens, once this one stands behind them."""
    return jnp.concatenate([recent[..., 1:], token[..., None]], axis=-1)


def windows(recent: Int[Array, "P RECENT"], tokens: Int[Array, "P T"]) -> Int[Array, "P T RECENT"]:
    """What stands before each of the tokens, of which `recent` stand before the first."""
    text = jnp.concatenate([recent, tokens], axis=1)
    time = tokens.shape[1]
    return jnp.stack([text[:, place : place + time] for place in range(RECENT)], axis=-1)


def _places(recent: Int[Array, "... RECENT"]) -> Int[Array, "... NGRAMS"]:
    """Where the table has what follows the last tokens, for each number of them."""
    words, places = recent.astype(jnp.uint32), []
    for number, size in enumerate(NGRAMS):
        of_ngram = sum(words[..., RECENT - 1 - i] * jnp.uint32(_FACTORS[i]) for i in range(size))
        mixed = (of_ngram ^ (of_ngram >> 15)) * jnp.uint32(_FACTORS[size - 1])
        places.append((mixed >> (32 - HASH_BITS)).astype(jnp.int32) + (number << HASH_BITS))
    return jnp.stack(places, axis=-1)
