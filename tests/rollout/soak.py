"""A thousand exchanges of the loop. `python soak.py PORT PROCESS` runs one of two processes and prints its exchanges."""

import json
import sys

import jax
import numpy as np
from flax import nnx

EXCHANGES = 1000


def soak(mesh, workers: int = 0) -> int:
    """Run until each scheduler had EXCHANGES exchanges, with one slot prefilled at a time. Return the number of exchanges."""
    from rrl.parallel.rules import shard
    from rrl.rollout.config import EngineConfig
    from rrl.rollout.engine import Engine
    from tests.rollout.scripted import SCRIPTED
    from tests.rollout.world import make_world

    decoder, tokenizer, retriever, requests = make_world()
    sizes = {
        "rows": 8,
        "context": 192,
        "wake_threshold": 1,
        "prefill_tokens": 17,
        "max_wait_steps": 1,
        "top_k": 2,
    }
    config = EngineConfig(**sizes, workers=workers, stall_seconds=60)
    params = shard(jax.tree.map(np.asarray, nnx.state(decoder)), mesh)
    engine = Engine(decoder, tokenizer, config, retriever=retriever, mesh=mesh)
    exchanges = number = 0
    while exchanges < EXCHANGES:
        trajectories = engine.run(params, requests, SCRIPTED, jax.random.key(number))
        assert len(trajectories) == len(requests)
        # All schedulers of a mesh have the same number of exchanges, in other processes too.
        exchanges += max(scheduler.exchanges for scheduler in engine.loops.schedulers)
        number += 1
    return exchanges


if __name__ == "__main__":
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{sys.argv[1]}", num_processes=2, process_id=int(sys.argv[2]))

    from rrl.parallel.mesh import make_mesh

    print(json.dumps({"exchanges": soak(make_mesh(data=4, tensor=2))}))
