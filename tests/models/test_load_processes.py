"""A mesh over two processes: each process reads only its devices' shards, and both together write one folder."""

import jax
import numpy as np
import pytest
from flax import nnx

from rrl.models.hf import load_decoder, save_decoder
from tests.models.small import SMALL, filled
from tests.two_processes import run_twice

pytestmark = pytest.mark.slow

PROGRAM = """
import json, sys
import jax
folder, port, process = sys.argv[1], sys.argv[2], int(sys.argv[3])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=process)
from flax import nnx
from rrl.models.hf import load_decoder, save_decoder
from rrl.models.weights import SafetensorsFolder
from rrl.parallel.mesh import make_mesh

read, counted = SafetensorsFolder.read, []
def counting(self, *arguments):
    value = read(self, *arguments)
    counted.append(value.nbytes)
    return value
SafetensorsFolder.read = counting
decoder = load_decoder(folder, mesh=make_mesh(data=1, fsdp=2, tensor=4))
here = sum(
    shard.data.nbytes
    for leaf in jax.tree.leaves(nnx.state(decoder))
    for shard in {str(s.index): s for s in leaf.addressable_shards}.values()
)
save_decoder(folder + "-again", decoder, shard_size=4000)
print(json.dumps({"read": sum(counted), "here": here}))
"""


def test_two_processes_read_their_shards_and_write_the_same_folder(tmp_path):
    save_decoder(tmp_path / "model", filled(SMALL), shard_size=4000)
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(filled(SMALL))))
    for found in run_twice("-c", PROGRAM, str(tmp_path / "model")):
        assert found["read"] == found["here"] < 0.7 * whole
    again = nnx.state(load_decoder(tmp_path / "model-again"))
    expected = nnx.state(filled(SMALL))
    assert all(map(np.array_equal, jax.tree.leaves(again), jax.tree.leaves(expected)))
