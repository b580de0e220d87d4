"""One update of a tiny model on a mesh, as a function and as a program that several processes run together.

python sharded_step.py DATA FSDP TENSOR PORT PROCESS      # prints its loss, gradient norm and a fingerprint
"""

import json
import sys

import jax
import numpy as np
from flax import nnx

from rrl.data.questions import Question
from rrl.data.trajectory import ENVIRONMENT, POLICY, PROMPT, Trajectory
from rrl.models.config import DecoderConfig
from rrl.models.decoder import Decoder
from rrl.parallel.mesh import make_mesh
from rrl.parallel.rules import shard
from rrl.rl.objective import ObjectiveConfig
from rrl.rl.optim import OptimConfig, init_optimizer, make_optimizer, split_trained
from rrl.rl.update import Updater

# 97 tokens and 2 kv heads: sizes that are not multiples of some mesh axes.
SHAPE = DecoderConfig(vocab_size=97, hidden=16, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=24)
OBJECTIVE = ObjectiveConfig(kl_coef=0.1, row_lengths=(64,), microbatch_tokens=512)
# SGD, so that parameters differ as much as gradients do; Adam would normalise even tiny gradients.
OPTIMIZER = OptimConfig(name="sgd", lr=1.0, total_steps=10)


def trajectory(seed):
    rng, length = np.random.default_rng(seed), 10 + 7 * (seed % 5)
    roles = np.array([PROMPT] * 4 + [POLICY] * (length - 9) + [ENVIRONMENT] * 3 + [POLICY] * 2)
    logps = np.where(roles == POLICY, -rng.random(length) - 4, 0).astype(np.float32)
    tokens, turns = rng.integers(0, SHAPE.vocab_size, length).astype(np.int32), np.zeros(length, np.int16)
    question = Question("q", "", ("a",))
    return Trajectory(question, seed, seed // 4, tokens, roles, logps, logps, turns, [], [], "answer")


def parameters(seed):
    """A decoder's graph and its state as NumPy arrays, the same in every process."""
    decoder = nnx.eval_shape(lambda: Decoder(SHAPE, rngs=nnx.Rngs(0)))
    graph, shapes, fixed = split_trained(decoder)
    draws = np.random.default_rng(seed)
    return (
        graph,
        jax.tree.map(lambda leaf: draws.normal(0, 0.3, leaf.shape).astype(np.float32), shapes),
        fixed,
    )


def step(mesh):
    """Takes two updates on a mesh (None: one device). Returns the parameters and the metrics of both."""
    graph, params, fixed = parameters(0)
    _, reference, _ = parameters(1)
    if mesh is None:
        params, reference = (jax.tree.map(jax.numpy.asarray, state) for state in (params, reference))
    else:
        params, reference = (shard(state, mesh) for state in (params, reference))
    optimizer = make_optimizer(OPTIMIZER)
    updater = Updater(graph, optimizer, OBJECTIVE, mesh)
    state = init_optimizer(optimizer, params, mesh)
    trajectories = [trajectory(seed) for seed in range(16)]
    advantages = np.random.default_rng(9).normal(size=16).astype(np.float32)
    metrics = []
    for _ in range(2):
        params, state, found = updater(params, state, reference, fixed, trajectories, advantages)
        metrics.append(found)
    return params, metrics


if __name__ == "__main__":
    *sizes, port, process = map(int, sys.argv[1:])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=process)
    print(json.dumps(step(make_mesh(*sizes))[1]))
