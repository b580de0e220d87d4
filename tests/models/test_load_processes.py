"""A mesh over two processes: each reads only what its own devices hold, and both write one folder together."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx

from rrl.models.hf import load_decoder, save_decoder
from tests.models.small import SMALL, filled

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = """
import json, sys
import jax
folder, port, process = sys.argv[1], sys.argv[2], int(sys.argv[3])
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=process)
from flax import nnx
from rrl.models.hf import load_decoder, save_decoder
from rrl.models.weights import Weights
from rrl.parallel.mesh import make_mesh

read, counted = Weights.read, []
def counting(self, *arguments):
    value = read(self, *arguments)
    counted.append(value.nbytes)
    return value
Weights.read = counting
decoder = load_decoder(folder, mesh=make_mesh(data=1, fsdp=2, tensor=4))
here = sum(
    shard.data.nbytes
    for leaf in jax.tree.leaves(nnx.state(decoder))
    for shard in {str(s.index): s for s in leaf.addressable_shards}.values()
)
save_decoder(folder + "-again", decoder, shard_size=4000)
print(json.dumps({"read": sum(counted), "here": here}))
"""


def test_two_processes_read_their_own_parts_and_write_the_same_folder(tmp_path):
    save_decoder(tmp_path / "model", filled(SMALL), shard_size=4000)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    flags = "--xla_force_host_platform_device_count=4"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path / "model"), str(port), str(process)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    try:
        ended = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], ended
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(filled(SMALL))))
    for out, _ in ended:
        found = json.loads(out.splitlines()[-1])
        assert found["read"] == found["here"] < 0.7 * whole
    again = nnx.state(load_decoder(tmp_path / "model-again"))
    expected = nnx.state(filled(SMALL))
    assert all(map(np.array_equal, jax.tree.leaves(again), jax.tree.leaves(expected)))
