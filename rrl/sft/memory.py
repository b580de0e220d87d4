"""Memory of supervised training, counted without loading anything: `require_training_memory`."""

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from rrl.models.config import DecoderConfig
from rrl.models.decoder import Decoder
from rrl.models.hardware import ComputeConfig
from rrl.models.lora import LoraConfig, add_lora
from rrl.parallel.memory import device_memory, require_memory
from rrl.parallel.mesh import data_shards
from rrl.rl.memory import device_bytes, optimizer_state, sharded, update_temporaries
from rrl.rl.optim import split_trained
from rrl.rollout.memory import is_cpu
from rrl.sft.config import SFTConfig

SMALLER_RUN = (
    "use a smaller model, --config.lora.rank=32 (trains adapters only), fewer --config.train.rows, or a smaller "
    "--config.train.row_length"
)
"""How to make a run smaller, for an error message."""


def training_memory(
    config: DecoderConfig, training: SFTConfig, compute: ComputeConfig, lora: LoraConfig, mesh: Mesh
) -> dict[str, float]:
    """Return part -> bytes on one device of a model in training."""

    def make() -> Decoder:
        decoder = Decoder(
            config,
            rngs=nnx.Rngs(0),
            dtype=jnp.dtype(compute.dtype),
            param_dtype=jnp.dtype(compute.param_dtype),
        )
        add_lora(decoder, lora, rngs=nnx.Rngs(0))
        return decoder

    _, params, frozen = split_trained(nnx.eval_shape(make), training.optim.frozen)
    params, frozen = sharded(params, mesh), sharded(frozen, mesh)
    gradients = device_bytes(params)
    temporaries = update_temporaries(
        config,
        mesh,
        (params, frozen),
        jnp.dtype(compute.dtype),
        compute.remat,
        rows=training.rows / data_shards(mesh),
        length=training.row_length,
    )
    return {
        "parameters": device_bytes(params) + device_bytes(frozen),
        "optimiser state": device_bytes(optimizer_state(training.optim, params, mesh)),
        "best parameters": device_bytes(params) if training.patience else 0.0,
        "gradients": gradients,
        "activations": temporaries - gradients,
    }


def require_training_memory(
    config: DecoderConfig,
    training: SFTConfig,
    compute: ComputeConfig,
    lora: LoraConfig,
    mesh: Mesh,
    model: str,
) -> None:
    """Raise UserError, with the numbers, if a run needs more memory than a device has. `model` names the model."""
    needs = training_memory(config, training, compute, lora, mesh)
    if not is_cpu(mesh):  # the estimate was compared with compiled programs on CPUs only
        del needs["activations"]
    require_memory(needs, device_memory(mesh), f"{model}: the training of this model", SMALLER_RUN)
