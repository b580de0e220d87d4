"""Measures rollouts of a published model shape on one accelerator, against the device's roofline and against Hugging Face's
generate: `python -m benchmarks.accelerator [--shape=Qwen2.5-7B] [--rounds=5] [--hf_python=PYTHON]`; rows go to RESULTS.md.

The roofline is measured first: bytes per second of a copy, and FLOP/s of a bfloat16 matrix product. The weights are random, in
bfloat16. On a CPU only `--shape=tiny` is measured, in float32, to show that the benchmark works; the rows of other shapes say
that they are not measured.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from benchmarks.fixed_lengths import KEY, FixedLengthModel
from benchmarks.measure import (
    NOT_MEASURED,
    BenchmarkRow,
    command,
    elapsed,
    imports,
    interleave,
    medians,
    warm_up_note,
    write,
)
from benchmarks.peer_library import HF, compare_first_tokens, peers
from rrl.models.attention_backends import choose_backend
from rrl.models.config import DecoderConfig, matrix_parameters
from rrl.models.decoder import Decoder
from rrl.models.tokenizer import load_tokenizer
from rrl.models.weights import read_config
from rrl.plan.costs import forward_flops
from rrl.plan.policy_shape import PUBLISHED
from rrl.rollout.config import EngineConfig
from rrl.rollout.memory import cache_bytes
from rrl.rollout.protocol import SingleTurn

TINY = "assets/miniwiki-policy"
"""Folder of the shipped policy: its shape is `--shape=tiny`, and its tokenizer serves all shapes."""
TARGETS = {"decoding": "at least 70 %", "prefilling": "at least 50 %", HF: "at least 5x"}
"""Targets of the rows: percent of the measured roofline, and speed as a multiple of Hugging Face's generate."""


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Measured peak rates of the device."""

    bytes_per_second: float
    """Rate of a copy; bytes read and bytes written both count."""
    flops_per_second: float
    """Rate of a square matrix product."""


def measure_roofline(dtype: DTypeLike, on_cpu: bool) -> Roofline:
    """Measure both rates. Each is the fastest of ten calls, which are long enough to hide the launch
    overhead."""
    size, side = (2**26, 1024) if on_cpu else (2**31, 8192)
    data = jnp.zeros(size // 4, jnp.uint32)
    copy = jax.jit(lambda x: x ^ 1)
    # The scale keeps the entries of repeated products at the same magnitude.
    matrix = jax.random.normal(jax.random.key(0), (side, side), dtype) * jnp.asarray(side**-0.5, dtype)
    products = 8

    @jax.jit
    def multiply(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, products, lambda _, y: y @ x, x)

    def fastest(function: functools.partial) -> float:
        function().block_until_ready()
        return min(elapsed(lambda: function().block_until_ready()) for _ in range(10))

    return Roofline(
        2 * size / fastest(functools.partial(copy, data)),
        products * 2 * side**3 / fastest(functools.partial(multiply, matrix)),
    )


class TimedRollouts:
    """Rollouts of one turn in which all sequences of the batch generate the same number of tokens."""

    def __init__(self, decoder: Decoder, batch: int, longest: int) -> None:
        """Create the engine.

        Args:
          decoder: the model.
          batch: number of sequences.
          longest: maximum tokens of a sequence, prompt included.
        """
        self.model, self.batch = FixedLengthModel(decoder, load_tokenizer(TINY)), batch
        # The engine needs a context of at least the prompt and two tokens, even if it generates one token only.
        config = EngineConfig(rows=batch, context=longest + 1, wake_threshold=batch, prefill_tokens=8192)
        self._engine = self.model.engine(config)

    def seconds(self, prompt: int, new: int) -> float:
        """Return the time in which `batch` random prompts of `prompt` tokens are continued by `new`
        sampled tokens."""
        requests, environment = self.model.requests(self.batch, prompt), SingleTurn(turn_tokens=new)
        return self.model.timed(self._engine, requests, environment, self.batch * new)()

    def greedy(self, prompt: int, new: int) -> list[np.ndarray]:
        """Return the greedy continuations."""
        requests = self.model.requests(self.batch, prompt, temperature=0.0)
        trajectories = self._engine.run(
            nnx.state(self.model.decoder), requests, SingleTurn(turn_tokens=new), KEY
        )
        return [trajectory.tokens[prompt:] for trajectory in trajectories]


def against_roofline(
    decoder: Decoder, args: argparse.Namespace, roof: Roofline
) -> tuple[list[BenchmarkRow], str]:
    """Compare a decode step with the bytes that it must read, and the prefill with its FLOPs."""
    config, itemsize = decoder.config, decoder.dtype.itemsize
    batch, prompt, new, prefill = args.batch, args.prompt, args.new, args.read
    rollouts, prefills = (
        TimedRollouts(decoder, batch, prompt + new + 1),
        TimedRollouts(decoder, batch, prefill + 1),
    )
    sides = {
        "one token": lambda: rollouts.seconds(prompt, 1),
        "all tokens": lambda: rollouts.seconds(prompt, new + 1),
        "prefilling": lambda: prefills.seconds(prefill, 1),
    }
    times = interleave(sides, args.rounds)
    seconds_of = medians(times)
    step = (seconds_of["all tokens"] - seconds_of["one token"]) / new
    # A decode step reads the weights of all layers and of the output head.
    weights = itemsize * (matrix_parameters(config) + config.hidden * config.vocab_size)
    bytes_per_step = weights + cache_bytes(config, batch, prompt + new / 2, itemsize)
    flops = forward_flops(config, batch * prefill, prefill / 2, batch)
    decode_rate, prefill_rate = bytes_per_step / step, flops / seconds_of["prefilling"]
    rows = [
        BenchmarkRow(
            f"decoding, batch {batch}, {prompt} to {prompt + new} tokens: GB/s of weights, keys and values read",
            f"{decode_rate / 1e9:.0f} ({1e3 * step:.2f} ms a step)",
            f"a copy {roof.bytes_per_second / 1e9:.0f}",
            f"{100 * decode_rate / roof.bytes_per_second:.0f} %",
            TARGETS["decoding"],
        ),
        BenchmarkRow(
            f"prefilling {batch} prompts of {prefill} tokens: TFLOP/s",
            f"{prefill_rate / 1e12:.3g} ({batch * prefill / seconds_of['prefilling']:.0f} tokens/s)",
            f"a matrix product {roof.flops_per_second / 1e12:.3g}",
            f"{100 * prefill_rate / roof.flops_per_second:.0f} %",
            TARGETS["prefilling"],
        ),
    ]
    return rows, f"Roofline: {warm_up_note(times)}"


def against_hf(decoder: Decoder, args: argparse.Namespace) -> tuple[list[BenchmarkRow], list[str]]:
    """Compare tokens per second with Hugging Face's generate, with the same weights and the faster of its
    caches.

    The outputs are compared by the first token of a greedy continuation.
    """
    batch, prompt, new = args.batch, args.prompt, args.new
    what = f"one turn, batch {batch}, {prompt} prompt and {new} new tokens, sampled: tokens/s"
    rollouts = TimedRollouts(decoder, batch, prompt + new)
    with peers(rollouts.model, {HF: args.hf_python}, batch, prompt, new) as (started, missing):
        if missing:
            return [BenchmarkRow(what, "", HF, missing[HF], TARGETS[HF])], []
        hf = started[HF]
        times = interleave({"ours": lambda: rollouts.seconds(prompt, new)} | hf.sides("sample"), args.rounds)
        check = compare_first_tokens(hf.process, [row[0] for row in rollouts.greedy(prompt, new)])
    seconds_of = medians(times)
    hf_seconds, hf_text = hf.best(seconds_of, lambda value: f"{batch * new / value:.0f}")
    rows = [
        BenchmarkRow(
            what,
            f"{batch * new / seconds_of['ours']:.0f}",
            hf_text,
            f"{hf_seconds / seconds_of['ours']:.2f}x",
            TARGETS[HF],
        ),
        check,
    ]
    return rows, [f"{HF}: {warm_up_note(times)}"]


def unmeasured_rows(args: argparse.Namespace) -> list[BenchmarkRow]:
    """Return the rows that a CPU cannot measure, marked as not measured."""
    reason = f"{NOT_MEASURED}: this is a CPU"
    return [
        BenchmarkRow(
            f"decoding, batch {args.batch}", reason, "the bandwidth of a copy", "", TARGETS["decoding"]
        ),
        BenchmarkRow(
            f"prefilling, batch {args.batch}",
            reason,
            "the rate of a matrix product",
            "",
            TARGETS["prefilling"],
        ),
        BenchmarkRow(f"one turn, batch {args.batch}, sampled: tokens/s", reason, HF, "", TARGETS[HF]),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Run all measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=("tiny", *PUBLISHED), default="Qwen2.5-7B", help="model shape")
    parser.add_argument("--batch", type=int, default=64, help="number of sequences")
    parser.add_argument("--prompt", type=int, default=256, help="number of prompt tokens")
    parser.add_argument("--new", type=int, default=256, help="number of tokens that each sequence generates")
    parser.add_argument(
        "--read", type=int, default=1024, help="number of tokens of the prompts whose prefill is timed"
    )
    parser.add_argument("--rounds", type=int, default=5, help="number of timed rounds")
    parser.add_argument(
        "--hf_python", default=sys.executable, help="Python interpreter with torch and transformers"
    )
    args = parser.parse_args(argv)
    imports(args.hf_python, "torch")  # fails at once if this Python does not exist
    platform = jax.default_backend()
    section, command_line = (
        f"Rollout: {args.shape}'s shape",
        command("benchmarks.accelerator", parser, vars(args)),
    )
    if platform == "cpu" and args.shape != "tiny":
        write(section, command_line, unmeasured_rows(args), [], measured=False)
        return
    dtype = jnp.float32 if platform == "cpu" else jnp.bfloat16
    roof = measure_roofline(dtype, platform == "cpu")
    shape = DecoderConfig.from_hf(read_config(TINY) if args.shape == "tiny" else PUBLISHED[args.shape])
    decoder = Decoder(
        shape,
        rngs=nnx.Rngs(0),
        dtype=dtype,
        param_dtype=dtype,
        attention=choose_backend("auto", platform, dtype),
    )
    rows, note = against_roofline(decoder, args, roof)
    hf_rows, notes = against_hf(decoder, args)
    write(section, command_line, rows + hf_rows, [note, *notes])


if __name__ == "__main__":
    main()
