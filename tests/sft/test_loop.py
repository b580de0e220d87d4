"""Supervised training: learning, exact resumption, early stopping, divergence, meshes."""

import contextlib
import dataclasses
import itertools
import json
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rrl.data.examples import Example
from rrl.errors import UserError
from rrl.models.config import DecoderConfig
from rrl.models.decoder import Decoder
from rrl.models.lora import LoraConfig, add_lora
from rrl.parallel.mesh import make_mesh
from rrl.parallel.rules import shard
from rrl.rl.optim import OptimConfig
from rrl.runs.metrics import read_metrics
from rrl.sft import loop as sft
from rrl.sft.config import SFTConfig
from rrl.sft.loop import train
from rrl.sft.sources import FixedSource, StreamSource

CONFIG = SFTConfig(
    steps=6,
    optim=OptimConfig(name="muon", lr=1e-2, total_steps=6),
    rows=2,
    row_length=32,
    log_every=1,
    eval_every=2,
)


def make_decoder():
    shape = DecoderConfig(vocab_size=32, hidden=16, layers=2, heads=2, kv_heads=1, head_dim=8, mlp=32)
    return Decoder(shape, rngs=nnx.Rngs(0))


def make_examples(count, seed=0):
    """Return examples that repeat their first half, with the loss on the second."""
    rng = np.random.default_rng(seed)
    halves = [rng.integers(1, 32, n) for n in rng.integers(3, 7, count)]
    tokens = [np.concatenate([h, h]).astype(np.int32) for h in halves]
    return [Example(t, np.arange(len(t)) >= len(t) // 2) for t in tokens]


def written(workdir):
    """Return the lines of metrics in the order of writing, without times."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def params_of(decoder):
    return jax.tree.leaves(nnx.state(decoder))


def test_loss_falls_and_metrics_are_written(tmp_path):
    config = dataclasses.replace(CONFIG, steps=30, optim=dataclasses.replace(CONFIG.optim, total_steps=30))
    examples = make_examples(40)
    result = train(
        config, FixedSource(examples, 2, 32, 0), make_decoder(), tmp_path, held_out={"train": examples}
    )
    lines = read_metrics(tmp_path / "metrics.jsonl")
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0] and len(losses) == 30
    assert result.stopped == "done" and result.evaluation["loss"] < losses[0]
    assert {"loss", "accuracy", "match", "match/train"} == set(result.evaluation)


@pytest.mark.parametrize("killed_at", [1, 4])
def test_a_killed_and_resumed_run_ends_bitwise_like_an_uninterrupted_one(tmp_path, killed_at):
    def source():
        return StreamSource(lambda block: make_examples(9, seed=block), 2, 32, seed=3, steps_per_block=2)

    class Killed(StreamSource):
        def batch(self, step):
            if step == killed_at:
                raise KeyboardInterrupt
            return super().batch(step)

    held_out = {"dev": make_examples(8, seed=99)}
    config = dataclasses.replace(CONFIG, checkpoint_every=1, patience=50)
    whole, cut = make_decoder(), make_decoder()
    train(config, source(), whole, tmp_path / "whole", held_out=held_out)
    with pytest.raises(KeyboardInterrupt):
        train(
            config,
            Killed(**{f.name: getattr(source(), f.name) for f in dataclasses.fields(StreamSource)}),
            cut,
            tmp_path / "cut",
            held_out=held_out,
        )
    train(config, source(), cut := make_decoder(), tmp_path / "cut", held_out=held_out)
    for a, b in zip(params_of(whole), params_of(cut), strict=True):
        np.testing.assert_array_equal(a, b)
    assert written(tmp_path / "whole") == written(tmp_path / "cut")


def test_starting_a_finished_run_again_changes_nothing(tmp_path):
    first, again = make_decoder(), make_decoder()
    for decoder in (first, again):
        train(CONFIG, FixedSource(make_examples(9), 2, 32, 0), decoder, tmp_path)
    for a, b in zip(params_of(first), params_of(again), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_finished_run_continues_bitwise_when_its_steps_are_raised(tmp_path):
    optim = dataclasses.replace(CONFIG.optim, total_steps=CONFIG.steps)
    short = dataclasses.replace(CONFIG, steps=2, optim=dataclasses.replace(optim, total_steps=2))
    source = FixedSource(make_examples(9), 2, 32, 0)
    train(short, source, make_decoder(), tmp_path / "cut")
    cut, whole = make_decoder(), make_decoder()
    assert train(CONFIG, source, cut, tmp_path / "cut").step == CONFIG.steps
    train(CONFIG, source, whole, tmp_path / "whole")
    for a, b in zip(params_of(cut), params_of(whole), strict=True):
        np.testing.assert_array_equal(a, b)


class Stop:
    """A stop flag that becomes true in the given step, counted from 1 in this process."""

    def __init__(self, step):
        self.step, self.asked = step, 0

    def __bool__(self):
        self.asked += 1
        return self.asked >= self.step


@pytest.mark.slow
def test_a_run_stopped_twice_and_killed_while_it_writes_its_result_has_each_metrics_line_once(
    tmp_path, monkeypatch
):
    held_out = {"dev": make_examples(8, seed=99)}
    config = dataclasses.replace(CONFIG, patience=50)

    def process(name):
        decoder, source = make_decoder(), FixedSource(make_examples(9), 2, 32, 0)
        result = train(config, source, decoder, tmp_path / name, held_out=held_out)
        return result, params_of(decoder), written(tmp_path / name)

    expected = process("whole")
    for step in (1, 2):
        with monkeypatch.context() as patch:
            patch.setattr(sft, "stop_requested", lambda step=step: contextlib.nullcontext(Stop(step)))
            assert process("cut")[0].stopped == "signal"
    with monkeypatch.context() as patch:
        patch.setattr(sft.json, "dumps", lambda *_, **__: 1 / 0)  # of result.json
        with pytest.raises(ZeroDivisionError):
            process("cut")
    for _ in range(2):  # the second time the run is already finished
        result, params, lines = process("cut")
        assert (result, lines) == (expected[0], expected[2])
        for a, b in zip(params, expected[1], strict=True):
            np.testing.assert_array_equal(a, b)
    results = [(tmp_path / name / "result.json").read_bytes() for name in ("whole", "cut")]
    assert results[0] == results[1]


@pytest.mark.slow
@pytest.mark.parametrize("patience", [0, 1])
def test_a_signal_in_the_last_step_does_not_change_the_result(tmp_path, monkeypatch, patience):
    config = (
        CONFIG
        if not patience
        else dataclasses.replace(
            CONFIG, eval_every=1, patience=1, optim=OptimConfig(name="adamw", lr=0.5, total_steps=6)
        )
    )

    def process(name):
        source, held_out = FixedSource(make_examples(6), 2, 32, 0), {"dev": make_examples(6, seed=5)}
        return train(config, source, make_decoder(), tmp_path / name, held_out=held_out)

    whole = process("whole")
    monkeypatch.setattr(sft, "stop_requested", lambda: contextlib.nullcontext(Stop(whole.step)))
    assert process("stopped") == whole and whole.stopped == ("patience" if patience else "done")
    assert written(tmp_path / "stopped") == written(tmp_path / "whole")


@pytest.mark.parametrize(("log_every", "checkpoint_every"), [(1, 1), (50, 1), (50, 0)])
def test_a_loss_that_is_not_finite_raises_an_error_before_a_checkpoint_is_saved(
    tmp_path, log_every, checkpoint_every
):
    config = dataclasses.replace(
        CONFIG,
        steps=50,
        log_every=log_every,
        checkpoint_every=checkpoint_every,
        optim=OptimConfig(name="adamw", lr=1e30, total_steps=50),
    )
    with pytest.raises(UserError, match=r"step \d+: the loss is (nan|inf). Lower optim.lr"):
        train(config, FixedSource(make_examples(6), 2, 32, 0), make_decoder(), tmp_path)


def test_a_run_ended_by_its_time_limit_checks_the_loss_before_saving(tmp_path, monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr("rrl.sft.loop.time", types.SimpleNamespace(monotonic=lambda: float(next(clock))))
    optim = OptimConfig(name="adamw", lr=1e30, total_steps=1000)
    config = dataclasses.replace(CONFIG, steps=1000, log_every=1000, minutes=0.1, optim=optim)
    with pytest.raises(UserError, match=r"step \d+: the loss is (nan|inf)"):
        train(config, FixedSource(make_examples(6), 2, 32, 0), make_decoder(), tmp_path)


def test_the_time_limit_ends_a_run_at_the_next_step_and_is_shown(tmp_path, monkeypatch, capsys):
    now = 0.0

    def clock():
        nonlocal now
        now += 1.0
        return now

    monkeypatch.setattr("rrl.sft.loop.time", types.SimpleNamespace(monotonic=clock))
    config = dataclasses.replace(CONFIG, steps=100_000, minutes=0.5, log_every=1, eval_every=1000, patience=1)
    result = train(
        config,
        FixedSource(make_examples(6), 2, 32, 0),
        make_decoder(),
        tmp_path,
        held_out={"dev": make_examples(6, seed=5)},
    )
    assert result.stopped == "minutes" and result.step == 31
    assert result.evaluation["loss"] > 0
    first = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("sft: 1/"))
    assert re.search(r"minutes=0\.\d/0\.5 .*left=0:[0-3]\d$", first), first
    again = train(config, FixedSource(make_examples(6), 2, 32, 0), make_decoder(), tmp_path)
    assert (again.step, again.stopped) == (result.step, "minutes")
    assert f"finished already, after step {result.step} of 100000" in capsys.readouterr().err


def test_early_stopping_keeps_the_best_parameters(tmp_path):
    config = dataclasses.replace(
        CONFIG, steps=200, eval_every=1, patience=2, optim=OptimConfig(name="adamw", lr=0.5, total_steps=200)
    )
    held_out = {"dev": make_examples(6, seed=5)}
    result = train(
        config, FixedSource(make_examples(6), 2, 32, 0), make_decoder(), tmp_path, held_out=held_out
    )
    lines = [line for line in read_metrics(tmp_path / "metrics.jsonl") if "eval/loss" in line]
    assert result.stopped == "patience" and result.step < 200
    assert result.evaluation["loss"] == pytest.approx(min(line["eval/loss"] for line in lines), rel=1e-5)


def test_a_fixed_source_has_every_example_once_per_epoch_and_depends_only_on_the_step():
    examples = make_examples(23)
    source, other = FixedSource(examples, 2, 32, 7), FixedSource(examples, 2, 32, 7)
    targets = sum(int(e.loss_mask.sum()) for e in examples)
    for epoch in range(2):
        steps = range(epoch * source.steps_per_epoch, (epoch + 1) * source.steps_per_epoch)
        assert sum(int(source.batch(s).loss_mask.sum()) for s in steps) == targets
    late = source.steps_per_epoch + 1
    source.batch(0)
    np.testing.assert_array_equal(source.batch(late).tokens, other.batch(late).tokens)
    assert not np.array_equal(source.batch(0).tokens, source.batch(source.steps_per_epoch).tokens)


def test_frozen_parameters_have_the_compute_dtype_and_trained_ones_keep_theirs(tmp_path):
    decoder = Decoder(make_decoder().config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    add_lora(decoder, LoraConfig(rank=2), rngs=nnx.Rngs(1))
    config = dataclasses.replace(CONFIG, steps=1, optim=OptimConfig(name="sgd", total_steps=1))
    train(config, FixedSource(make_examples(9), 2, 32, 0), decoder, tmp_path)
    layers = decoder.layers
    assert layers.q[...].dtype == decoder.embedding[...].dtype == jnp.bfloat16
    assert layers.attention_norm[...].dtype == layers.q_lora_a[...].dtype == jnp.float32


@pytest.mark.slow
@pytest.mark.parametrize("lora", [0, 2])
def test_training_on_a_mesh_gives_the_same_losses_as_on_one_device(tmp_path, lora):
    losses = []
    for mesh in (None, make_mesh(1, 2, 2, devices=jax.devices()[:4])):
        decoder = make_decoder()
        add_lora(decoder, LoraConfig(rank=lora), rngs=nnx.Rngs(1))
        if mesh is not None:
            nnx.update(decoder, shard(nnx.state(decoder), mesh))
        workdir, examples = tmp_path / str(mesh is None), make_examples(9)
        train(
            CONFIG, FixedSource(examples, 2, 32, 0), decoder, workdir, held_out={"train": examples}, mesh=mesh
        )
        lines = read_metrics(workdir / "metrics.jsonl")
        losses.append([line.get("loss", line.get("eval/loss")) for line in lines])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert len(losses[0]) == 9 and losses[0][-1] < losses[0][0]
    assert not decoder.layers.down[...].is_fully_replicated


def test_rows_that_do_not_divide_evenly_among_the_devices_are_refused(tmp_path):
    mesh = make_mesh(4, 1, 1, devices=jax.devices()[:4])
    decoder = make_decoder()
    nnx.update(decoder, shard(nnx.state(decoder), mesh))
    with pytest.raises(UserError, match=r"2 rows cannot be split over data x fsdp = 4"):
        train(CONFIG, FixedSource(make_examples(9), 2, 32, 0), decoder, tmp_path, mesh=mesh)
