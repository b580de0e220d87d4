"""Loads configs, shrinks them for tests, and saves a small random policy."""

import importlib.util
import pathlib

from flax import nnx

from rrl.models.decoder import Decoder
from rrl.models.hf import save_decoder
from rrl.models.tokenizer import load_tokenizer
from tests.tiny import tiny_shape

ROOT = pathlib.Path(__file__).parents[2]


def config(name, arg=""):
    """Return the config of `--config=configs/NAME.py:ARG`."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "configs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(arg)


def save_random_policy(folder):
    """Save a random one-layer policy with the tokenizer of the built-in world."""
    tokenizer = load_tokenizer(ROOT / "assets" / "miniwiki-tokenizer")
    shape = tiny_shape(
        len(tokenizer), 1024, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    save_decoder(folder, Decoder(shape, rngs=nnx.Rngs(0)), tokenizer)


def shrink_cold_start(filled):
    """Reduce a cold-start config, in place, to five demonstrations in two worlds."""
    filled.data.update({"train_worlds": 1, "held_out_worlds": 1})
    filled.data.demonstrations.held_out = 5
    filled.train.rows = 2
    return filled


def shrink_run(filled):
    """Reduce a training config, in place, to small steps."""
    filled.data.update({"train_worlds": 1, "held_out_worlds": 1, "held_out_per_kind": 1, "train_per_kind": 4})
    filled.train.update({"questions": 4, "samples": 2})
    filled.rollout.update({"rows": 8, "context": 512, "wake_threshold": 4})
    filled.objective.row_lengths = (512,)
    filled.recipe.environment.turn_tokens = 16
    return filled
