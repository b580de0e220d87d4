"""`GenerationKernels`: the interface of compiled kernels that replace XLA's code in generation.

A `KVCache` holds the kernels that read it, or None. `Decoder.extend`, `KVCache` and the sampler of the rollout ask them; which
kernels a device has is decided where the cache is created. `rrl.models.cpu.kernels` has those of CPUs.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from rrl.models.config import DecoderConfig


class GenerationKernels(Protocol):
    """Kernels for a cache with `slots_last`. Instances are hashable: they are static fields of a cache.

    `attend` and `copy_rows` always work. Call `run_layers` only if `computes_layers` is True, and `sample` only if `samples` is.
    """

    def attend(
        self,
        q: Float[Array, "P T N H"],
        k: Float[Array, "L blocks R K H slot"],
        v: Float[Array, "L blocks R K slot H"],
        layer: Int[Array, ""],
        positions: Int[Array, "P T"],
        rows: Int[Array, "P"] | None,
        slots: int,
    ) -> Float[Array, "P T N H"]:
        """Return the attention of scaled queries over one layer of the cache, as `rrl.models.attention.cache_attention`.

        The output is 0 for a position below 0 or not below `slots`.
        """

    def copy_rows(
        self,
        k: Float[Array, "L blocks R K H slot"],
        v: Float[Array, "L blocks R K slot H"],
        source: Int[Array, "P"],
        target: Int[Array, "P"],
        begin: Int[Array, "P"],
        end: Int[Array, "P"],
    ) -> tuple[Array, Array]:
        """Return the cache after blocks begin[p]..end[p]-1 of row `source[p]` were copied to row `target[p]`.

        All sources are read before any target is written. Entries whose source or target is not a row are ignored.
        """

    def computes_layers(self, config: DecoderConfig, dtype: DTypeLike) -> bool:
        """Return whether `run_layers` supports this model in this dtype, on a single device and without adapters."""

    def run_layers(
        self,
        x: Float[Array, "P T D"],
        rotary: tuple[Float[Array, "P T H/2"], Float[Array, "P T H/2"]],
        weights: Mapping[str, Any],
        k: Float[Array, "L blocks R K H slot"],
        v: Float[Array, "L blocks R K slot H"],
        positions: Int[Array, "P T"],
        rows: Int[Array, "P"] | None,
        *,
        config: DecoderConfig,
        slots: int,
        last_layer_attends: bool,
    ) -> tuple[Float[Array, "P T D"], tuple[Array, Array]]:
        """Return the output of all layers of a decoder on new tokens, and the cache with these tokens.

        Args:
            x: input of the first layer.
            rotary: cosine and sine of each token's angles.
            weights: of all layers, by their names in `rrl.models.decoder.Layer`: arrays [L, ...], or in a format of the kernels.
            k, v, positions, rows, slots: see `attend`.
            config: shape of the model.
            last_layer_attends: False: the last layer only writes its keys and values; the output is meaningless.
        """

    def samples(self, vocab_size: int) -> bool:
        """Return whether `sample` supports this vocabulary, for a model whose layers `run_layers` computes."""

    def sample(
        self,
        hidden: Float[Array, "B D"],
        table: Any,
        uniform: Float[Array, "B"],
        temperature: Float[Array, "B"],
        *,
        top_p: float,
        top_k: int,
    ) -> tuple[Int[Array, "B"], Float[Array, "B"], Float[Array, "B"]]:
        """Return tokens sampled from the logits hidden @ table, as `rrl.rollout.sampling.sample`.

        Args:
            hidden: hidden states.
            table: unembedding table: an array [D, V], or in a format of the kernels.
            uniform: a random number in [0, 1) for each token, for inverse-CDF sampling.
            temperature: 0 is greedy.
            top_p: samples from the smallest set of most likely tokens whose total probability is at least this.
            top_k: samples from this many most likely tokens; 0: all.

        Returns:
            Token ids; their log-probabilities at temperature 1 among all tokens; and those under the distribution sampled from.
        """
