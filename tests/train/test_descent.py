"""The two programs of a step."""

import jax
import jax.numpy as jnp
import numpy as np

from rrl.rl.optim import OptimConfig, make_optimizer
from rrl.train.descent import Descent


def test_many_steps_of_many_microbatches_compile_each_program_once(caplog):
    optimizer = make_optimizer(OptimConfig(total_steps=10))
    descent = Descent(
        lambda p, _, batch: (jnp.sum(p * batch), {"tokens": batch.sum()}), optimizer, ("tokens",)
    )
    # Bound to a device, as a learner's are.
    params = jax.device_put(jnp.ones(3), jax.devices()[0])
    state = jax.device_put(optimizer.init(params), jax.devices()[0])
    with jax.log_compiles():
        for _ in range(3):
            params, state, found = descent.step(params, state, (), [np.ones(3, np.float32)] * 3, 2.0)
    assert found["tokens"] == 9
    for name in ("accumulate", "apply"):
        assert sum(f"Finished XLA compilation of jit({name})" in line for line in caplog.messages) == 1
