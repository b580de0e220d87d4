"""All attention kernels give the same outputs and gradients, packed or not, on one device or a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rrl.errors import UserError
from rrl.models.attention import Window, causal_attention
from rrl.models.attention_backends import (
    choose_backend,
    cudnn_attention,
    packed_attention,
    splash_attention,
)
from rrl.models.block_attention import block_attention
from rrl.parallel.mesh import make_mesh

SEGMENTS = np.repeat([1, 2, 3, 0], [60, 37, 80, 23])[None].repeat(4, 0)  # T = 200, not a multiple of a block
BRANCHES = np.repeat([0, 1, 0, 2, 0, 1, 3, 0], [20, 15, 25, 10, 27, 40, 40, 23])[None].repeat(4, 0)


def draw(kv_heads, width=16, dtype=jnp.float32):
    """q, k, v and the output's gradient: 4 rows, 4 query heads."""
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (4, kv_heads, kv_heads, 4)
    return [jax.random.normal(key, (4, 200, n, width), dtype) for key, n in zip(keys, heads)]


def with_gradients(attention, inputs, segments):
    *qkv, grad = inputs

    @jax.jit
    def run(q, k, v):
        out, back = jax.vjp(lambda *x: attention(*x, segments), q, k, v)
        return (out, *back(grad))

    real = np.asarray(SEGMENTS > 0)[..., None, None]  # the output of padding tokens is undefined
    return [np.where(real, np.asarray(part, np.float32), 0) for part in run(*qkv)]


def close(ours, theirs):
    """Equality up to rounding, relative to the largest value; against float64 the XLA kernel errs by 1e-6 of it."""
    for one, other in zip(ours, theirs):
        np.testing.assert_allclose(one, other, atol=5e-6 * np.abs(one).max())


def masked(inputs):
    """The outputs of padding tokens get no gradient in training."""
    return [*inputs[:3], inputs[3] * (SEGMENTS > 0)[..., None, None]]


def interpreted(q, k, v, segments):
    return splash_attention(q, k, v, segments, interpret=True)


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_interpreted_splash_gives_the_outputs_and_gradients_of_xla(kv_heads):
    inputs = masked(draw(kv_heads))
    ours = with_gradients(causal_attention, inputs, jnp.asarray(SEGMENTS))
    theirs = with_gradients(interpreted, inputs, jnp.asarray(SEGMENTS))
    close(ours, theirs)


@pytest.mark.parametrize(
    "kv_heads",
    [
        pytest.param(2, id="heads divide the tensor axis", marks=pytest.mark.slow),
        pytest.param(1, id="they do not"),
    ],
)
def test_splash_gives_the_same_outputs_on_a_mesh(kv_heads):
    q, k, v, _ = draw(kv_heads)
    segments = jnp.asarray(SEGMENTS)
    expected = causal_attention(q, k, v, segments)
    with jax.set_mesh(make_mesh(data=2, fsdp=2, tensor=2)):
        found = jax.jit(interpreted)(q, k, v, segments)
    real = SEGMENTS > 0
    np.testing.assert_allclose(np.asarray(found)[real], np.asarray(expected)[real], atol=2e-5)


def test_the_mask_passed_to_cudnn_gives_the_outputs_of_xla():
    def stand_in(q, k, v, segments):
        return cudnn_attention(q, k, v, segments, implementation="xla")

    inputs = masked(draw(2))
    for segments in (jnp.asarray(SEGMENTS), None):
        ours = with_gradients(causal_attention, inputs, segments)
        theirs = with_gradients(stand_in, inputs, segments)
        close(ours, theirs)


@pytest.mark.parametrize("kernel", ["blocks", "cudnn's mask"])
def test_a_branch_is_visible_only_to_itself_in_every_kernel(kernel):
    branches = jnp.asarray(BRANCHES)

    def stand_in(q, k, v, segments):
        if kernel == "blocks":
            return block_attention(q, k, v, segments, branches)
        return cudnn_attention(q, k, v, segments, branches, implementation="xla")

    def textbook(q, k, v, segments):
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        at = jnp.arange(200)
        seen = (at[:, None] >= at) & (segments[:, :, None] == segments[:, None])
        seen &= (branches[:, None] == 0) | (branches[:, :, None] == branches[:, None])
        scores = jnp.where(seen[:, None], jnp.einsum("BTNH,BSNH->BNTS", q, k), -jnp.inf)
        return jnp.einsum("BNTS,BSNH->BTNH", jax.nn.softmax(scores, axis=-1), v)

    inputs, segments = masked(draw(2)), jnp.asarray(SEGMENTS)
    theirs = with_gradients(textbook, inputs, segments)
    close(with_gradients(stand_in, inputs, segments), theirs)
    close(with_gradients(lambda *x: causal_attention(*x, branches), inputs, segments), theirs)


def visible_tokens(branches=None):
    """[B, T, T]: the tokens that each token sees without a window."""
    seen = np.tril(np.ones((200, 200), bool)) & (SEGMENTS[:, :, None] == SEGMENTS[:, None])
    if branches is not None:
        seen &= (branches[:, None] == 0) | (branches[:, :, None] == branches[:, None])
    return seen


@pytest.mark.parametrize("slides", [True, False])
@pytest.mark.parametrize("kernel", ["xla", "blocks", "cudnn's mask"])
def test_a_window_counts_positions_along_the_branch_in_every_kernel(kernel, slides):
    seen = visible_tokens(BRANCHES)
    positions = seen.sum(axis=-1) - 1  # the number of tokens before it on the path from the root of its tree
    near = positions[:, :, None] - positions[:, None] < 23
    mask, inputs, segments = (
        jnp.asarray(seen & near if slides else seen),
        masked(draw(2)),
        jnp.asarray(SEGMENTS),
    )
    window, branches = Window(23, jnp.asarray(slides), jnp.asarray(positions)), jnp.asarray(BRANCHES)

    def attend(q, k, v, segments):
        if kernel == "cudnn's mask":
            return cudnn_attention(q, k, v, segments, branches, window, implementation="xla")
        return packed_attention(kernel, q, k, v, segments, branches, window)

    def textbook(q, k, v, segments):
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        scores = jnp.where(mask[:, None], jnp.einsum("BTNH,BSNH->BNTS", q, k), -jnp.inf)
        return jnp.einsum("BNTS,BSNH->BTNH", jax.nn.softmax(scores, axis=-1), v)

    close(with_gradients(attend, inputs, segments), with_gradients(textbook, inputs, segments))


@pytest.mark.slow
@pytest.mark.parametrize("slides", [True, False])
def test_interpreted_splash_with_a_window_gives_the_outputs_and_gradients_of_xla(slides):
    positions = jnp.asarray(visible_tokens().sum(axis=-1) - 1)
    window, inputs, segments = (
        Window(23, jnp.asarray(slides), positions),
        masked(draw(2)),
        jnp.asarray(SEGMENTS),
    )
    ours = with_gradients(lambda *x: splash_attention(*x, window, interpret=True), inputs, segments)
    theirs = with_gradients(lambda *x: causal_attention(*x, window=window), inputs, segments)
    close(ours, theirs)


@pytest.mark.parametrize("kernel", ["blocks", pytest.param("splash", marks=pytest.mark.slow)])
def test_a_window_gives_the_same_outputs_on_a_mesh(kernel):
    q, k, v, _ = draw(2)
    segments, positions = jnp.asarray(SEGMENTS), jnp.asarray(visible_tokens().sum(axis=-1) - 1)
    window = Window(23, jnp.asarray(True), positions)
    expected = causal_attention(q, k, v, segments, window=window)
    with jax.set_mesh(make_mesh(data=2, fsdp=2, tensor=2)):
        if kernel == "splash":
            found = jax.jit(lambda *x: splash_attention(*x, window, interpret=True))(q, k, v, segments)
        else:
            found = jax.jit(lambda *x: packed_attention(kernel, *x, window=window))(q, k, v, segments)
    real = SEGMENTS > 0
    np.testing.assert_allclose(np.asarray(found)[real], np.asarray(expected)[real], atol=2e-5)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="cuDNN's kernel needs an NVIDIA GPU")
def test_cudnn_gives_the_outputs_and_gradients_of_xla():
    inputs = masked(draw(2, width=64, dtype=jnp.bfloat16))
    ours = with_gradients(causal_attention, inputs, jnp.asarray(SEGMENTS))
    theirs = with_gradients(cudnn_attention, inputs, jnp.asarray(SEGMENTS))
    for one, other in zip(ours, theirs):
        np.testing.assert_allclose(one, other, atol=2e-2 * np.abs(one).max())


@pytest.mark.skipif(jax.default_backend() != "tpu", reason="splash attention needs a TPU")
def test_splash_gives_the_outputs_of_xla_on_a_tpu():
    q, k, v, _ = draw(2, width=128, dtype=jnp.bfloat16)
    segments = jnp.asarray(SEGMENTS)
    one, other = (packed_attention(name, q, k, v, segments) for name in ("xla", "splash"))
    real = SEGMENTS > 0
    np.testing.assert_allclose(
        np.asarray(one, np.float32)[real], np.asarray(other, np.float32)[real], atol=2e-2
    )


@pytest.mark.parametrize(
    ("name", "platform", "dtype", "chosen"),
    [
        ("auto", "tpu", jnp.bfloat16, "splash"),
        ("auto", "gpu", jnp.bfloat16, "cudnn"),
        ("auto", "gpu", jnp.float32, "xla"),
        ("auto", "cpu", jnp.bfloat16, "blocks"),
        ("xla", "tpu", jnp.bfloat16, "xla"),
    ],
)
def test_auto_chooses_the_platforms_kernel(name, platform, dtype, chosen):
    assert choose_backend(name, platform, dtype) == chosen


def test_splash_is_not_chosen_for_rows_with_branches():
    assert choose_backend("auto", "tpu", jnp.bfloat16, branches=True) == "xla"
    assert choose_backend("auto", "cpu", jnp.float32, branches=True) == "blocks"
    with pytest.raises(
        UserError, match=r"does not support shared prefixes: set objective\.share_prefixes=False"
    ):
        choose_backend("splash", "tpu", jnp.bfloat16, branches=True)


@pytest.mark.parametrize(
    ("name", "platform", "dtype", "words"),
    [
        (
            "flash",
            "cpu",
            jnp.float32,
            "attention='flash' is unknown; choose one of auto, blocks, xla, cudnn, splash",
        ),
        ("splash", "gpu", jnp.bfloat16, "TPUs only, but this is a gpu"),
        ("cudnn", "gpu", jnp.float32, "bfloat16 or float16, but this is a gpu and float32"),
        ("cudnn", "tpu", jnp.bfloat16, "NVIDIA GPU"),
    ],
)
def test_a_kernel_that_does_not_run_on_the_platform_is_refused(name, platform, dtype, words):
    with pytest.raises(UserError, match=words):
        choose_backend(name, platform, dtype)
