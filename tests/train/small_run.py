"""A very small RL run for tests, and readers of its metrics."""

import dataclasses
import json

import numpy as np
from flax import nnx

from rrl.data.trajectory import POLICY
from rrl.models.decoder import Decoder
from rrl.recipes.rsearch import RSearch
from rrl.rl.objective import ObjectiveConfig
from rrl.rl.optim import OptimConfig
from rrl.setup.rl_config import RLConfig
from rrl.train.loop import train
from rrl.train.task import RunModels, Task
from tests.tiny import tiny_shape

STEPS = 4


def fresh() -> Decoder:
    config = tiny_shape(416, 256)
    return Decoder(config, rngs=nnx.Rngs(0))


def run(
    parts,
    workdir,
    config,
    die_at: int | None = None,
    decoder=None,
    value_model=None,
    poor_from: int = 10**9,
    poisoned: int = 0,
):
    """Train a small policy.

    Args:
        die_at: raise ConnectionError after this many scored batches.
        poor_from: from this scored batch on all rewards are 0.
        poisoned: the scored batch whose advantages are NaN.

    Scored batches include those of evaluations.

    Returns:
        The outcome and the final parameters.
    """
    questions, engine, recipe = parts
    decoder = decoder or fresh()
    calls = 0

    class Scored(RSearch):
        """Pays by token ids, since a random policy would get no reward."""

        def score(self, trajectories, scoring):
            nonlocal calls
            calls += 1
            if die_at is not None and calls > die_at:
                raise ConnectionError("the machine went away")
            super().score(trajectories, scoring)
            for t in trajectories:
                written = t.tokens[t.roles == POLICY]
                t.rewards["total"] = float(written.sum() % 7) if calls < poor_from else 0.0

        def advantages(self, trajectories):
            advantages = super().advantages(trajectories)
            return advantages * np.nan if calls == poisoned else advantages

    recipe = Scored(**{f.name: getattr(recipe, f.name) for f in dataclasses.fields(recipe)})
    task = Task(questions[:8], questions[8:])
    outcome = train(config, recipe, task, RunModels(engine, decoder, value_model), workdir)
    return outcome, nnx.state(decoder)


CONFIG = RLConfig(
    steps=STEPS,
    optim=OptimConfig(lr=1e-2, total_steps=STEPS),
    objective=ObjectiveConfig(kl_coef=0.01, row_lengths=(128,), microbatch_tokens=512),
    questions=4,
    samples=3,
    eval_every=2,
    checkpoint_every=2,
)


EVERY_LINE = ["train 1", "eval 0", "train 2", "eval 2", "train 3", "train 4", "eval 4"]


def lines(workdir):
    """Return the lines of metrics in the order of writing, without times, speeds and memory."""
    drop = ("time/", "rollout/", "memory/", "minutes")
    found = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(drop)} for line in found]


def steps_of(workdir):
    return [f"{'eval' if 'eval/em' in line else 'train'} {line['step']}" for line in lines(workdir)]
