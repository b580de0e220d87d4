"""The decoder: one Flax NNX module for Qwen2, Qwen3, Llama and Gemma 3. Read `Decoder` first.

Training (`Decoder.__call__`) takes a packed batch. Generation (`extend`, `prefill`) reads and writes a KVCache. Both share
one `Layer` and loop over the layers, stacked on a leading axis L, so that compile time does not grow with L. With
kernels (`rrl.models.kernels`), generation computes all layers in one call instead.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PyTree

from rrl.errors import UserError
from rrl.models.attention import Window
from rrl.models.attention_backends import AttentionBackend, packed_attention
from rrl.models.cache import KVCache
from rrl.models.config import DecoderConfig
from rrl.models.families import Activation
from rrl.models.kernels import GenerationKernels
from rrl.models.products import matmul_2d, mean_square, sum_products
from rrl.models.rope import rotate, rotation, rotation_by_layer
from rrl.parallel.mesh import ROW_AXES
from rrl.parallel.rules import constrain

Remat = Literal["none", "dots", "full"]
LORA_A, LORA_B = "_lora_a", "_lora_b"
"""Suffixes of the parameter names of a kernel's LoRA adapters (see rrl.models.lora)."""
MAX_UNROLLED_LAYERS = 8
"""Largest number of layers for which `Decoder.__call__` unrolls the scan over layers (`Decoder._unroll_layers`)."""
MAX_DECODE_TOKENS = 8
"""Maximum number of tokens per row in a decode step. Up to this number, devices exchange activations; with more tokens, as in
prefill, they gather the weights."""
ACTIVATIONS: dict[Activation, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
}
TABLE = "table"
"""Name of the unembedding table in `Decoder.kernel_weights`."""
Hidden = Float[Array, "B T D"]
Attend = Callable[
    [Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]], Float[Array, "B T N H"]
]


class Layer(nnx.Module):
    """Attention and gated MLP with their norms. `Decoder.layers` holds all L layers, stacked on a leading axis."""

    def __init__(self, config: DecoderConfig, layer_count: int, *, rngs: nnx.Rngs, param_dtype: DTypeLike):
        c, residual_scale = config, (2 * config.layers) ** -0.5

        def kernel(*shape: int, fan_in: int, scale: float = 1.0) -> nnx.Param:
            draw = jax.random.normal(rngs.params(), (layer_count, *shape), param_dtype)
            return nnx.Param(draw * jnp.asarray(scale * fan_in**-0.5, param_dtype))

        def constant(value: float, *shape: int) -> nnx.Param:
            return nnx.Param(jnp.full((layer_count, *shape), value, param_dtype))

        def norm(width: int) -> nnx.Param:
            return constant(initial_norm(c), width)

        self.config = config
        self.lora_scale = 1.0
        self.attention_norm = norm(c.hidden)
        self.q = kernel(c.hidden, c.heads, c.head_dim, fan_in=c.hidden)
        self.k = kernel(c.hidden, c.kv_heads, c.head_dim, fan_in=c.hidden)
        self.v = kernel(c.hidden, c.kv_heads, c.head_dim, fan_in=c.hidden)
        if c.qkv_bias:
            self.q_bias = constant(0.0, c.heads, c.head_dim)
            self.k_bias = constant(0.0, c.kv_heads, c.head_dim)
            self.v_bias = constant(0.0, c.kv_heads, c.head_dim)
        if c.qk_norm:
            self.q_norm = norm(c.head_dim)
            self.k_norm = norm(c.head_dim)
        self.o = kernel(c.heads, c.head_dim, c.hidden, fan_in=c.heads * c.head_dim, scale=residual_scale)
        self.mlp_norm = norm(c.hidden)
        self.gate = kernel(c.hidden, c.mlp, fan_in=c.hidden)
        self.up = kernel(c.hidden, c.mlp, fan_in=c.hidden)
        self.down = kernel(c.mlp, c.hidden, fan_in=c.mlp, scale=residual_scale)
        if c.family.post_norms:
            self.post_attention_norm = norm(c.hidden)
            self.post_mlp_norm = norm(c.hidden)

    def __call__(self, x: Hidden, rotary: tuple[Array, Array], attend: Attend) -> Hidden:
        """Applies one layer. `attend` gets scaled q and k after RoPE, and v, and decides which keys and values to attend to."""
        c = self.config

        def project(y: Hidden, name: str) -> Float[Array, "B T N H"]:
            out = linear(self, name, y)
            if c.qkv_bias:
                out += getattr(self, f"{name}_bias")[...].astype(y.dtype)
            if c.qk_norm and name != "v":
                out = normalize(self, f"{name}_norm", out)
            return out

        def add(x: Hidden, out: Hidden, norm: str) -> Hidden:
            return x + (normalize(self, norm, out) if c.family.post_norms else out)

        y = normalize(self, "attention_norm", x)
        q, k, v = rotate(project(y, "q"), *rotary), rotate(project(y, "k"), *rotary), project(y, "v")
        scale = (c.query_pre_attn_scalar or c.head_dim) ** -0.5
        attended = attend(q * jnp.asarray(scale, q.dtype), k, v)
        x = add(x, linear(self, "o", attended, inner=2), "post_attention_norm")
        y = normalize(self, "mlp_norm", x)
        gated = ACTIVATIONS[c.family.activation](linear(self, "gate", y)) * linear(self, "up", y)
        return add(x, linear(self, "down", gated), "post_mlp_norm")


def initial_norm(config: DecoderConfig) -> float:
    """The initial weights of a norm, with which it multiplies by 1."""
    return 0.0 if config.family.norms_add_one else 1.0


def normalize(module: "Layer | Decoder", name: str, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """RMSNorm with the weights `name` of a module."""
    weights = getattr(module, name)[...]
    if module.config.family.norms_add_one:
        weights = 1.0 + weights.astype(jnp.float32)
    return rms_norm(x, weights, module.config.rms_eps)


def linear(
    module: nnx.Module, name: str, x: Float[Array, "B T ..."], *, inner: int = 1
) -> Float[Array, "B T ..."]:
    """Multiplies x with the kernel `name` of a module and adds the output of its LoRA adapters, if it has any."""

    def times(x: Array, name: str, inner: int) -> Array:
        return matmul(x, getattr(module, name)[...].astype(x.dtype), inner=inner)

    out = times(x, name, inner)
    if hasattr(module, name + LORA_A):
        out += module.lora_scale * times(times(x, name + LORA_A, inner), name + LORA_B, 1)
    return out


def matmul(
    x: Float[Array, "B T ..."], kernel: Float[Array, "..."], *, inner: int = 1
) -> Float[Array, "B T ..."]:
    """Contracts the last `inner` axes of x with the first `inner` axes of the kernel.

    The row and time axes are merged for the product. With two axes, XLA on CPU would copy transposed activations for each
    kernel's gradient, which nearly doubles the time of the backward pass.
    """
    lead, out = x.shape[:2], kernel.shape[inner:]
    width = math.prod(kernel.shape[:inner])
    flat = matmul_2d(x.reshape(lead[0] * lead[1], width), kernel.reshape(width, math.prod(out)))
    return flat.reshape(*lead, *out)


class Decoder(nnx.Module):
    """A causal language model: maps tokens to final hidden states; `unembed` maps these to logits.

    Args:
        config: shape of the model.
        rngs: its stream "params" draws the initial parameters.
        dtype: of the computation; norms, softmax, RoPE and logits are always float32.
        param_dtype: of the stored parameters.
        attention: kernel for packed batches (`rrl.models.attention_backends`). Generation reads its cache in XLA or in
            the cache's kernels (`rrl.models.kernels`).
        remat: what each layer stores for the backward pass: "none" stores everything except attention weights, "dots" the
            products with weight matrices, "full" only the layer's input. The rest is recomputed.
    """

    transposed_embedding: Float[Array, "D V"] | None = None
    """A transposed copy of tied embeddings, so that `unembed` needs no transpose. Where that is faster, generation sets it before
    its loop over tokens (`rrl.rollout.backend.Backend.prepare`). It must be set again after each update of the weights."""
    kernel_weights: dict[str, Any] | None = None
    """Copies of weights in a format of the cache's kernels, which use them instead of the parameters: those of `layers` by name,
    and the unembedding TABLE. Set like `transposed_embedding`."""

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
        for field, value, allowed in (("remat", remat, Remat), ("attention", attention, AttentionBackend)):
            if value not in get_args(allowed):
                raise UserError(f"{field}={value!r} is unknown; choose one of {', '.join(get_args(allowed))}")
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.attention: AttentionBackend = attention
        self.remat = remat
        self.lora_scale = 1.0
        embedding = jax.random.normal(rngs.params(), (config.vocab_size, config.hidden), param_dtype)
        self.embedding = nnx.Param(embedding * jnp.asarray(0.02, param_dtype))
        self.layers = Layer(config, config.layers, rngs=rngs, param_dtype=param_dtype)
        self.norm = nnx.Param(jnp.full(config.hidden, initial_norm(config), param_dtype))
        if not config.tie_embeddings:
            head = jax.random.normal(rngs.params(), (config.hidden, config.vocab_size), param_dtype)
            self.head = nnx.Param(head * jnp.asarray(config.hidden**-0.5, param_dtype))

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
        branches: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Hidden states of a packed batch.

        Args:
            tokens: ids below vocab_size.
            positions: RoPE position of each token in its sequence: a token of a branch counts the trunk tokens before it too.
            segment_ids: segment of each token; a token sees only earlier tokens of its segment. 0 is padding. None: each row
                is one segment.
            branches: branch of each token. A token sees only the tokens of its segment that are in the trunk (branch 0) or in
                its own branch. None: all tokens are in the trunk.
        """
        rotary, width = rotation_by_layer(self.config, positions), self.config.sliding_window
        graph, stacked = nnx.split(self.layers)

        def one_layer(x: Hidden, stack: tuple[nnx.State, Array | None]) -> tuple[Hidden, None]:
            state, slides = stack
            window = None if width is None or slides is None else Window(width, slides, positions)

            def attend(q: Array, k: Array, v: Array) -> Array:
                return packed_attention(self.attention, q, k, v, segment_ids, branches, window)

            layer = nnx.merge(graph, state)
            return constrain(layer(x, rotary(slides), attend), ROW_AXES, None, None), None

        if self.remat != "none":
            policies = jax.checkpoint_policies
            keep = (
                policies.nothing_saveable
                if self.remat == "full"
                else policies.dots_with_no_batch_dims_saveable
            )
            one_layer = jax.checkpoint(one_layer, policy=keep, prevent_cse=False)
        x = constrain(self._embed(tokens), ROW_AXES, None, None)
        stacks = stacked, self._sliding_layers()
        x, _ = jax.lax.scan(one_layer, x, stacks, unroll=self._unroll_layers)
        return normalize(self, "norm", x)

    def extend(
        self,
        tokens: Int[Array, "P T"],
        *,
        positions: Int[Array, "P T"],
        cache: KVCache,
        rows: Int[Array, "P"] | None = None,
        attention_batches: Sequence[int] = (),
    ) -> tuple[Float[Array, "P T D"], KVCache]:
        """Continues sequences whose past is in the cache.

        Args:
            tokens: the next tokens of P entries.
            positions: slot and RoPE position of each token; tokens at positions >= `cache.slots` are padding and are
                not stored.
            cache: holds keys and values of the past.
            rows: cache row of each entry; None: entry p is row p, and P is `cache.rows`. Two entries may be
                consecutive chunks of the same row. The second chunk then attends to the first one too.
            attention_batches: allowed numbers of entries that read a cache block together, in descending order
                (`rrl.models.attention.cache_attention`). `rrl.rollout.backends.find_shapes` finds numbers that give bitwise equal
                results. (): all entries read every block that the longest entry needs.

        Returns:
            Hidden states, and the cache with the new tokens.
        """
        if (kernels := self._layer_kernels(cache)) is not None:
            x, cache = self._run_kernels(kernels, tokens, positions, cache, rows)
            return normalize(self, "norm", x), cache
        start, one_layer, stacked = self._layer_step(tokens, positions, cache, rows, attention_batches)
        layers = jnp.arange(self.config.layers), stacked
        (x, cache), _ = jax.lax.scan(lambda carry, layer: (one_layer(carry, *layer), None), start, layers)
        return normalize(self, "norm", x), cache

    def prefill(
        self,
        tokens: Int[Array, "P T"],
        *,
        positions: Int[Array, "P T"],
        cache: KVCache,
        rows: Int[Array, "P"] | None = None,
        attention_batches: Sequence[int] = (),
    ) -> KVCache:
        """Returns the same cache as `extend`, without hidden states: the last layer only writes its keys and values."""
        if (kernels := self._layer_kernels(cache)) is not None:
            return self._run_kernels(kernels, tokens, positions, cache, rows, last_layer_attends=False)[1]
        start, one_layer, stacked = self._layer_step(tokens, positions, cache, rows, attention_batches)

        def weights_of(index: Array | int) -> nnx.State:
            return jax.tree.map(
                lambda stack: jax.lax.dynamic_index_in_dim(stack, index, keepdims=False), stacked
            )

        last = self.config.layers - 1
        carry = jax.lax.fori_loop(
            0, last, lambda index, carry: one_layer(carry, index, weights_of(index)), start
        )
        return one_layer(carry, jnp.int32(last), weights_of(last), reads=False)[1]

    def _layer_kernels(self, cache: KVCache) -> GenerationKernels | None:
        """The cache's kernels if they compute all layers, else None."""
        mesh, kernels = jax.sharding.get_abstract_mesh(), cache.kernels
        has_adapters = any(
            str(path[-1]).endswith(LORA_A) for path, _ in nnx.to_flat_state(nnx.state(self.layers))
        )
        single_device = mesh.empty or mesh.size == 1
        if kernels is None or not single_device or has_adapters:
            return None
        return kernels if kernels.computes_layers(self.config, self.dtype) else None

    def _run_kernels(
        self,
        kernels: GenerationKernels,
        tokens: Array,
        positions: Array,
        cache: KVCache,
        rows: Array | None,
        last_layer_attends: bool = True,
    ) -> tuple[Hidden, KVCache]:
        """Returns the output of the last layer, which is meaningless without `last_layer_attends`, and the cache."""
        parameters = {str(path[-1]): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(self.layers))}
        x, (k, v) = kernels.run_layers(
            self._embed(tokens),
            rotation(self.config, positions),
            parameters | (self.kernel_weights or {}),
            cache.k,
            cache.v,
            positions,
            rows,
            config=self.config,
            slots=cache.slots,
            last_layer_attends=last_layer_attends,
        )
        return x, dataclasses.replace(cache, k=k, v=v)

    def _layer_step(
        self,
        tokens: Array,
        positions: Array,
        cache: KVCache,
        rows: Array | None,
        attention_batches: Sequence[int],
    ) -> tuple[tuple[Hidden, KVCache], Callable, nnx.State]:
        """Prepares a loop over the layers.

        Returns:
            The initial carry (input of the first layer, cache); the loop's body, a function (carry, layer number, layer
            weights) -> carry; and the weights of all layers, stacked.
        """
        rotary, groups = (
            rotation_by_layer(self.config, positions),
            cache.read_groups(positions, attention_batches),
        )
        sliding_layers = self._sliding_layers()
        graph, stacked = nnx.split(self.layers)
        # With few tokens per row the activations are smaller than the weights, so the weights stay split over fsdp.
        split = ("data", None, "fsdp") if tokens.shape[1] <= MAX_DECODE_TOKENS else (ROW_AXES, None, None)

        def one_layer(
            carry: tuple[Hidden, KVCache], index: Array, state: nnx.State, reads: bool = True
        ) -> tuple[Hidden, KVCache]:
            x, cache = carry

            def attend(q: Array, k: Array, v: Array) -> Array:
                nonlocal cache
                out, cache = cache.attend(index, q, k, v, positions, rows, groups, reads)
                return out

            slides = None if sliding_layers is None else sliding_layers[index]
            x = nnx.merge(graph, state)(x, rotary(slides), attend)
            return constrain(x, *split), cache

        return (constrain(self._embed(tokens), *split), cache), one_layer, stacked

    def unembed(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Returns logits in float32."""
        if self.transposed_embedding is not None:
            table, axes = self.transposed_embedding.astype(hidden.dtype), "...D,DV->...V"
        elif self.config.tie_embeddings:
            table, axes = self.embedding[...].astype(hidden.dtype), "...D,VD->...V"
        else:
            table, axes = self.head[...].astype(hidden.dtype), "...D,DV->...V"
        logits = jnp.einsum(axes, hidden, table, preferred_element_type=jnp.float32)
        if hasattr(self, "head" + LORA_A):
            narrow = hidden @ getattr(self, "head" + LORA_A)[...].astype(hidden.dtype)
            logits += self.lora_scale * (narrow @ getattr(self, "head" + LORA_B)[...].astype(hidden.dtype))
        return constrain(logits, ROW_AXES, *[None] * (logits.ndim - 2), "tensor")

    def sampling_table(self, cache: KVCache) -> Any:
        """The unembedding table for the cache's kernels (`GenerationKernels.sample`): a float32 array [D, V], or the one of
        `kernel_weights`.

        None if they cannot sample for this model, or if embeddings are tied and neither `kernel_weights` nor
        `transposed_embedding` is set.
        """
        kernels = None if hasattr(self, "head" + LORA_A) else self._layer_kernels(cache)
        if kernels is None or not kernels.samples(self.config.vocab_size):
            return None
        if (table := (self.kernel_weights or {}).get(TABLE)) is not None:
            return table
        return self.transposed_embedding if self.config.tie_embeddings else self.head[...].astype(jnp.float32)

    @property
    def _unroll_layers(self) -> bool:
        """Whether `__call__` unrolls the scan over layers.

        On a CPU the scan makes the gradient of a shallow model an eighth slower, because it copies each layer's residuals into
        a stacked array and out again.
        """
        return self.attention == "blocks" and self.config.layers <= MAX_UNROLLED_LAYERS

    def _sliding_layers(self) -> Bool[Array, "L"] | None:
        """Whether each layer has the sliding window; None if no layer has one."""
        return jnp.asarray(self.config.sliding_layers) if self.config.sliding_layers else None

    def _embed(self, tokens: Int[Array, "B T"]) -> Hidden:
        x = self.embedding[...][tokens].astype(self.dtype)
        if not self.config.family.scales_embeddings:
            return x
        return x * jnp.asarray(self.config.hidden**0.5, self.dtype)


def cast_params(params: PyTree, dtype: DTypeLike) -> PyTree:
    """Casts parameters once to the decoder's dtype, instead of in every step. Norms stay as they are."""
    flat = {
        path: leaf if str(path[-1]).endswith("norm") else leaf.replace(leaf[...].astype(dtype))
        for path, leaf in nnx.to_flat_state(params)
    }
    return nnx.from_flat_state(flat)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: Float[Array, "... D"], scale: Float[Array, "D"], eps: float) -> Float[Array, "... D"]:
    """RMSNorm over the last axis: x / rms(x) * scale, computed in float32 and returned in x's dtype."""
    return _norm_forward(x, scale, eps)[0]


def _norm_forward(
    x: Float[Array, "... D"], scale: Float[Array, "D"], eps: float
) -> tuple[Float[Array, "... D"], tuple[Array, ...]]:
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(mean_square(x32) + eps)
    return (x32 * inverse * scale.astype(jnp.float32)).astype(x.dtype), (x, inverse, scale)


def _norm_backward(
    eps: float, residuals: tuple[Array, ...], grad: Float[Array, "... D"]
) -> tuple[Float[Array, "... D"], Float[Array, "D"]]:
    x, inverse, scale = residuals
    normed, grad32 = x.astype(jnp.float32) * inverse, grad.astype(jnp.float32)
    x_grad = grad32 * scale.astype(jnp.float32)
    mean = sum_products(x_grad, normed) / x.shape[-1]
    x_grad = inverse * (x_grad - normed * mean)
    scale_grad = (grad32 * normed).sum(axis=tuple(range(x.ndim - 1)))
    return x_grad.astype(x.dtype), scale_grad.astype(scale.dtype)


rms_norm.defvjp(_norm_forward, _norm_backward)
