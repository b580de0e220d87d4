"""A thousand turns of the loop: python soak.py PORT PROCESS does it with another process; prints how many it took."""

import json
import sys

import jax
import numpy as np
from flax import nnx

TURNS = 1000


def soak(mesh, loops: int = 0) -> int:
    """Asks the hosts of a mesh, or of the loops of one device, until each has been asked `TURNS` times, one row fed at a time;
    returns how often that was."""
    from rrl.parallel.rules import shard
    from rrl.rollout.config import EngineConfig
    from rrl.rollout.engine import Engine
    from tests.rollout.test_engine import ENVIRONMENT_
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
    config = EngineConfig(**sizes, workers=loops, stall_seconds=60)
    params = shard(jax.tree.map(np.asarray, nnx.state(decoder)), mesh)
    engine = Engine(decoder, tokenizer, config, retriever=retriever, mesh=mesh)
    turns = number = 0
    while turns < TURNS:
        found = engine.run(params, requests, ENVIRONMENT_, jax.random.key(number))
        assert len(found) == len(requests)
        # Every host of a mesh is asked equally often, another process's too.
        turns += max(host.exchanges for host in engine._schedulers)
        number += 1
    return turns


if __name__ == "__main__":
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{sys.argv[1]}", num_processes=2, process_id=int(sys.argv[2]))

    from rrl.parallel.mesh import make_mesh

    print(json.dumps({"turns": soak(make_mesh(data=4, tensor=2))}))
