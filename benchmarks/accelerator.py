"""Rollouts of a published shape on one accelerator, beside what its memory and its matrix units give:
`python -m benchmarks.accelerator [--shape=Qwen2.5-7B] [--rounds=5] [--hf_python=PYTHON]`; rows go to RESULTS.md.

The roofs are measured first: bytes a second of a copy, and operations a second of a bfloat16 matrix product. The weights are
random, in bfloat16; on a CPU, where `--shape=tiny` shows that all of it runs, in float32.
"""

import argparse
import dataclasses
import functools
import os
import sys
import tempfile
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from benchmarks.fixed_lengths import KEY, FixedLengths
from benchmarks.measure import Peer, Row, alternate, imports, seconds, write
from rrl.data.tokenizer import load_tokenizer
from rrl.models.attention_backends import choose_backend
from rrl.models.config import DecoderConfig
from rrl.models.decoder import Decoder
from rrl.models.hf import save_decoder
from rrl.models.weights import read_config
from rrl.rollout.engine import EngineConfig
from rrl.rollout.protocol import SingleTurn
from rrl.train.estimate import cache_bytes, forward_flops, matrix_parameters
from rrl.train.plan import PUBLISHED

TINY = "assets/miniwiki-policy"
NEW = 256
"""Tokens that a row writes."""


@dataclasses.dataclass(frozen=True)
class Roofs:
    """What the device reaches by itself."""

    bandwidth: float
    """Bytes a second, read and written, of a copy."""
    flops: float
    """Operations a second of a square matrix product."""


def roofs(dtype: DTypeLike, on_cpu: bool) -> Roofs:
    """Measures both: the fastest of ten calls, each long enough for its start not to count."""
    size, side = (2**26, 1024) if on_cpu else (2**31, 8192)
    data = jnp.zeros(size, jnp.uint8)
    copy = jax.jit(lambda x: x ^ 1)
    left = jax.random.normal(jax.random.key(0), (side, side), dtype)
    times = 8

    @jax.jit
    def multiply(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, times, lambda _, y: (x @ y) * jnp.asarray(side**-0.5, dtype), x)

    def fastest(function: functools.partial) -> float:
        function().block_until_ready()
        return min(seconds(lambda: function().block_until_ready()) for _ in range(10))

    return Roofs(
        2 * size / fastest(functools.partial(copy, data)),
        times * 2 * side**3 / fastest(functools.partial(multiply, left)),
    )


class Rollouts:
    """Rollouts of one turn, whose rows all write as many tokens."""

    def __init__(self, decoder: Decoder, batch: int, longest: int) -> None:
        self.decoder, self.batch = decoder, batch
        self._model = FixedLengths(decoder, load_tokenizer(TINY))
        config = EngineConfig(rows=batch, context=longest, feeds=batch, feed_tokens=8192)
        self._engine = self._model.engine(config)

    def seconds(self, prompt: int, new: int) -> float:
        """How long `batch` prompts of so many random tokens take to be continued by `new`, drawn."""
        asked, environment = self._model.requests(self.batch, prompt), SingleTurn(turn_tokens=new)
        return self._model.timed(self._engine, asked, environment, self.batch * new)()

    def greedy(self, prompt: int, new: int) -> list[np.ndarray]:
        """The most probable continuations."""
        asked = self._model.requests(self.batch, prompt, temperature=0.0)
        found = self._engine.run(nnx.state(self.decoder), asked, SingleTurn(turn_tokens=new), KEY)
        return [trajectory.tokens[prompt:] for trajectory in found]


def against_roofs(made: Rollouts, roof: Roofs, prompt: int, read: int, rounds: int) -> list[Row]:
    """A decode step against the bytes that it must read, prefilling against the operations that it must do."""
    config, batch, itemsize = made.decoder.config, made.batch, made.decoder.dtype.itemsize
    sides = {
        "one token": lambda: made.seconds(prompt, 1),
        "all tokens": lambda: made.seconds(prompt, NEW + 1),
        "prefill": lambda: made.seconds(read, 1),
    }
    took = alternate(sides, rounds)
    step = (took["all tokens"] - took["one token"]) / NEW
    weights = itemsize * (matrix_parameters(config) + config.hidden * config.vocab_size)
    must = weights + cache_bytes(config, batch, prompt + NEW / 2, itemsize)
    flops = forward_flops(config, batch * read, read / 2, batch)
    rates = must / step, flops / took["prefill"]
    return [
        Row(
            f"decoding, batch {batch}, {prompt} to {prompt + NEW} tokens: GB/s of weights, keys and values read",
            f"{rates[0] / 1e9:.0f} ({1e3 * step:.2f} ms a step)",
            f"a copy {roof.bandwidth / 1e9:.0f}",
            f"{100 * rates[0] / roof.bandwidth:.0f} %",
            "at least 70 %",
        ),
        Row(
            f"prefilling {batch} prompts of {read} tokens: TFLOP/s",
            f"{rates[1] / 1e12:.3g} ({batch * read / took['prefill']:.0f} tokens/s)",
            f"a matrix product {roof.flops / 1e12:.3g}",
            f"{100 * rates[1] / roof.flops:.0f} %",
            "at least 50 %",
        ),
    ]


def against_hf(made: Rollouts, prompt: int, python: str, rounds: int) -> list[Row]:
    """Tokens a second against Hugging Face's generate with the same weights, which are compared by what is most probable;
    `python`: "" for none with torch."""
    what = f"one turn, batch {made.batch}, {prompt} prompt and {NEW} new tokens, drawn: tokens/s"
    if not python:
        return [Row(what, "", "HF generate", "not measured: no torch", "at least 5x")]
    with tempfile.TemporaryDirectory() as folder:
        save_decoder(folder, made.decoder, dtype=made.decoder.dtype)
        peer = Peer(python, "hf_generate.py", folder, str(made.batch), str(prompt), str(NEW))
        theirs, ours = peer.ask("greedy")["tokens"], made.greedy(prompt, NEW)
        # Of random weights one rounding apart: from the first difference on, texts have nothing in common.
        first = np.mean([int(one[0]) == other[0] for one, other in zip(ours, theirs, strict=True)])
        sides = {"ours": lambda: made.seconds(prompt, NEW), "HF": lambda: peer.ask("sample")["seconds"]}
        rates = {side: made.batch * NEW / value for side, value in alternate(sides, rounds).items()}
        peer.close()
    return [
        Row(
            what,
            f"{rates['ours']:.0f}",
            f"HF generate {rates['HF']:.0f} ({peer.says['versions']})",
            f"{rates['ours'] / rates['HF']:.2f}x",
            "at least 5x",
        ),
        Row("the same, greedy: equal first tokens", f"{100 * first:.0f} %", "HF generate", "", "100 %"),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measures all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=("tiny", *PUBLISHED), default="Qwen2.5-7B")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument(
        "--read", type=int, default=1024, help="tokens of the prompts whose prefilling is timed"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hf_python", default=sys.executable, help="a Python with torch and transformers")
    args = parser.parse_args(argv)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the peer needs its part of the memory
    torch = imports(args.hf_python, "torch")
    platform = jax.default_backend()
    dtype = jnp.float32 if platform == "cpu" else jnp.bfloat16
    roof = roofs(dtype, platform == "cpu")
    shape = DecoderConfig.from_hf(read_config(TINY) if args.shape == "tiny" else PUBLISHED[args.shape])
    decoder = Decoder(
        shape,
        rngs=nnx.Rngs(0),
        dtype=dtype,
        param_dtype=dtype,
        attention=choose_backend("auto", platform, dtype),
    )
    made = Rollouts(decoder, args.batch, max(args.prompt + NEW + 1, args.read + 1))
    rows = against_roofs(made, roof, args.prompt, args.read, args.rounds)
    rows += against_hf(made, args.prompt, args.hf_python if torch else "", args.rounds)
    options = "" if args.shape == "Qwen2.5-7B" else f" --shape={args.shape}"
    write(f"Rollout: {args.shape}'s shape", f"python -m benchmarks.accelerator{options}", rows, [])


if __name__ == "__main__":
    main()
