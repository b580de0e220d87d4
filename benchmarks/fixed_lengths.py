"""Rollouts of fixed lengths: a model with random weights that never ends a sequence."""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from transformers import PreTrainedTokenizerBase

from benchmarks.measure import elapsed
from rrl.config.sections import build
from rrl.data.questions import Question
from rrl.models.config import DecoderConfig
from rrl.models.decoder import Decoder
from rrl.models.hardware import DTYPES, ComputeConfig
from rrl.models.tokenizer import load_tokenizer
from rrl.models.weights import read_config
from rrl.plan.policy_shape import PUBLISHED
from rrl.rollout.config import EngineConfig
from rrl.rollout.engine import Engine
from rrl.rollout.episodes import Request

KEY = jax.random.key(0)
SHIPPED = "assets/miniwiki-policy"
"""Folder of the shipped policy."""
PREFILL_TOKENS = 1024
"""`EngineConfig.prefill_tokens`, as in configs/rsearch_grpo.py for an ordinary language model on a single device."""


@dataclasses.dataclass(frozen=True)
class FixedLengthModel:
    """A decoder, with its tokenizer, whose sequences end only at their length limits."""

    decoder: Decoder
    tokenizer: PreTrainedTokenizerBase

    def engine(self, config: EngineConfig, retriever: Any = None) -> Engine:
        """Return an engine that never samples an end of sequence."""
        engine = Engine(self.decoder, self.tokenizer, config, retriever=retriever)
        engine.programs.eos = np.full(1, -1, np.int32)
        return engine

    def requests(
        self, count: int, length: int, *, samples: int = 1, temperature: float = 1.0
    ) -> list[Request]:
        """Return requests with prompts of random tokens, `samples` per prompt.

        The prompts are the same as those of benchmarks/peers. The id of a question is the number of its
        prompt.
        """
        draws = np.random.default_rng(0).integers(1, self.decoder.config.vocab_size, (count, length))
        return [
            Request(
                Question(str(number), "", ()),
                prompt.astype(np.int32),
                seed=number * samples + sample,
                group=number,
                temperature=temperature,
            )
            for number, prompt in enumerate(draws)
            for sample in range(samples)
        ]

    def timed(
        self, engine: Engine, requests: Sequence[Request], environment: Any, tokens: int | None = None
    ) -> Callable[[], float]:
        """Return a function that runs the requests and returns the seconds.

        It checks that the model has generated `tokens` tokens in total, unless `tokens` is None.
        """
        params = nnx.state(self.decoder)

        def run() -> float:
            took = elapsed(lambda: engine.run(params, requests, environment, KEY))
            assert tokens is None or engine.stats.policy_tokens == tokens, engine.stats
            return took

        return run


def shape_config(shape: str) -> DecoderConfig:
    """Return the architecture of a shape: "tiny", the shipped policy's, or a name in PUBLISHED."""
    if shape == "tiny":
        return dataclasses.replace(DecoderConfig.from_hf(read_config(SHIPPED)), max_positions=8192)
    return DecoderConfig.from_hf(PUBLISHED[shape])


def shape_name(text: str) -> str:
    """Return the name of a shape as `shape_config` takes it. Upper and lower case are equal on the command line."""
    names = {name.lower(): name for name in ("tiny", *PUBLISHED)}
    if text.lower() not in names:
        raise argparse.ArgumentTypeError(f"{text!r} must be one of {', '.join(names.values())}")
    return names[text.lower()]


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--shape`, and the settings of our side that belong to it."""
    parser.add_argument(
        "--shape", type=shape_name, help="measure this model shape: tiny or a published model"
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="with --shape: our dtype (compute.dtype of a config)",
    )
    parser.add_argument(
        "--rollout",
        default="",
        help="with --shape: fields of our engine (section rollout), such as workers=2,top_k=5",
    )


def engine_config(args: argparse.Namespace, **sizes: int) -> EngineConfig:
    """Return the engine's config with these sizes; the fields in `--rollout` replace them. Raises UserError for a wrong field."""
    given = dict(item.partition("=")[::2] for item in args.rollout.split(",") if item)
    values = {name: int(value) if value.isdecimal() else value for name, value in given.items()}
    return build(EngineConfig, sizes | values, "rollout")


def random_decoder(shape: str, compute: ComputeConfig, *, branches: bool = False) -> Decoder:
    """Return a decoder with random weights.

    Args:
      shape: see `shape_config`.
      compute: dtypes, attention and rematerialisation, as in the section `compute` of a training config.
      branches: whether the packed rows of its updates have branches (`ObjectiveConfig.share_prefixes`).
    """
    backend = compute.backend(jax.default_backend(), branches)
    dtypes = {"dtype": jnp.dtype(compute.dtype), "param_dtype": jnp.dtype(compute.param_dtype)}
    return Decoder(shape_config(shape), rngs=nnx.Rngs(0), attention=backend, remat=compute.remat, **dtypes)


@functools.cache
def random_model() -> FixedLengthModel:
    """Return a random model of the shipped policy's shape, in float32 on a CPU, otherwise in bfloat16. Peers load its weights."""
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    decoder = Decoder(shape_config("tiny"), rngs=nnx.Rngs(0), dtype=dtype, param_dtype=dtype)
    return FixedLengthModel(decoder, load_tokenizer(SHIPPED))
