"""`GradientAccumulator`: compilation, threads, and equality for any number of parallel microbatches."""

import dataclasses
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rrl.parallel.mesh import make_mesh
from rrl.rl.batch import Batch
from rrl.rl.optim import OptimConfig, make_optimizer
from rrl.rl.update import GradientAccumulator


def loss(params, _, batch):
    return jnp.sum(params * batch.tokens), {"tokens": jnp.float32(batch.tokens.shape[1] // 3)}


def batch(value):
    """A microbatch whose gradient equals its tokens."""
    tokens = np.full((1, 3), value, np.float32)
    return Batch(tokens, tokens, tokens, tokens > 0)


def made(parallel):
    """An accumulator, and parameters and optimiser state committed to a device, as a learner's are."""
    optimizer = make_optimizer(OptimConfig(total_steps=10))
    params = jax.device_put(jnp.ones(3), jax.devices()[0])
    state = jax.device_put(optimizer.init(params), jax.devices()[0])
    return GradientAccumulator(loss, optimizer, ("tokens",), parallel_microbatches=parallel), params, state


@pytest.mark.parametrize(("parallel", "cores"), [(1, 2), (2, 2), (2, 1), (3, 2)])
def test_each_program_compiles_once_over_many_steps_and_microbatches(caplog, monkeypatch, parallel, cores):
    monkeypatch.setattr("rrl.parallel.threads.available_cores", lambda: cores)
    accumulator, params, state = made(parallel)
    jax.config.update("jax_log_compiles", True)  # in all threads
    try:
        with caplog.at_level("WARNING"):
            for _ in range(3):
                params, state, found = accumulator.step(params, state, (), [batch(1.0)] * 5, 2.0)
    finally:
        jax.config.update("jax_log_compiles", False)
    assert found["tokens"] == 5
    for name in ("accumulate", "apply"):
        assert sum(f"Finished XLA compilation of jit({name})" in line for line in caplog.messages) == 1


def test_parallel_microbatches_give_the_same_step_with_bits_independent_of_the_cores(monkeypatch):
    batches = [batch(value) for value in np.random.default_rng(0).normal(size=7)]
    steps = []
    for parallel, cores in ((1, 2), (2, 2), (2, 1), (9, 2)):
        monkeypatch.setattr("rrl.parallel.threads.available_cores", lambda cores=cores: cores)
        accumulator, params, state = made(parallel)
        params, _, found = accumulator.step(params, state, (), batches, 3.0)
        steps.append((np.asarray(params), found["loss"]))
    np.testing.assert_array_equal(steps[1][0], steps[2][0])
    assert steps[1][1] == steps[2][1]
    for params, loss in steps[1:]:
        np.testing.assert_allclose(params, steps[0][0], rtol=1e-6)
        np.testing.assert_allclose(loss, steps[0][1], rtol=1e-6)


@pytest.mark.parametrize(("parallel", "cores", "threads"), [(1, 2, 0), (2, 1, 0), (2, 2, 2)])
def test_parallel_microbatches_use_threads_only_with_several_cores(monkeypatch, parallel, cores, threads):
    monkeypatch.setattr("rrl.parallel.threads.available_cores", lambda: cores)
    accumulator, params, state = made(parallel)
    accumulate, seen, together = (
        accumulator.accumulate,
        set(),
        threading.Barrier(max(1, threads), timeout=120),
    )

    def watched(*given):
        together.wait()  # until all threads run
        seen.add(threading.current_thread().name)
        return accumulate(*given)

    accumulator.accumulate = watched
    accumulator.step(params, state, (), [batch(1.0)] * 4, 1.0)
    assert sum(name.startswith("rrl-microbatch") for name in seen) == threads


def test_an_error_in_a_thread_is_raised_by_the_step():
    accumulator, params, state = made(2)
    wrong = dataclasses.replace(batch(1.0), tokens=np.ones((1, 4), np.float32))
    with pytest.raises(ValueError, match="Incompatible shapes"):
        accumulator.step(params, state, (), [batch(1.0), wrong], 1.0)


def test_parallel_microbatches_need_a_single_cpu_device():
    mesh = make_mesh(1, 1, 2, devices=jax.devices()[:2])
    assert (
        made(2)[0].parallel_microbatches == 2
        and GradientAccumulator(loss, make_optimizer(OptimConfig()), (), mesh, 2).parallel_microbatches == 1
    )
