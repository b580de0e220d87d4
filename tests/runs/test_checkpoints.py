"""Checkpoints restore exactly, and a workdir refuses another config."""

import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from rrl.errors import UserError
from rrl.runs.checkpoints import Checkpoints
from rrl.runs.workdir import refuse_other_config
from rrl.stopping import stop_requested

CONFIG = {"steps": 3, "optim": {"lr": 1e-3}, "log_every": 1}


def make_state(seed):
    params = nnx.state(nnx.Linear(3, 4, rngs=nnx.Rngs(seed)))
    opt_state = optax.adam(1e-3).init(params)
    return {"params": params, "opt": opt_state, "step": jnp.int32(seed), "none": None}


def test_a_checkpoint_restores_bit_for_bit(tmp_path):
    state = make_state(7)
    with Checkpoints(tmp_path, CONFIG) as checkpoints:
        checkpoints.save(7, state, {"order": [1, 2]})
    with Checkpoints(tmp_path, CONFIG) as checkpoints:
        assert checkpoints.latest == 7
        restored, metadata = checkpoints.restore(make_state(0))
    assert metadata == {"order": [1, 2]} and jax.tree.structure(restored) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, restored, state)


def test_only_the_latest_checkpoints_are_kept(tmp_path):
    with Checkpoints(tmp_path, CONFIG, keep=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, make_state(step))
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["2", "3"]


def test_another_config_is_refused_and_nothing_is_written(tmp_path):
    with Checkpoints(tmp_path, CONFIG):
        pass
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(UserError) as error:
        Checkpoints(tmp_path, {"steps": 3, "optim": {"lr": 2e-3}, "log_every": 1, "seed": 1})
    assert all(w in str(error.value) for w in ("optim.lr: 0.001 there, 0.002 now", "seed", "--workdir"))
    assert (tmp_path / "config.json").read_bytes() == before


def test_checkpoints_without_a_config_are_refused(tmp_path):
    with Checkpoints(tmp_path, CONFIG) as checkpoints:
        checkpoints.save(1, make_state(1))
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match=r"holds checkpoints, but the config\.json of their run is missing"):
        Checkpoints(tmp_path, CONFIG)
    assert not (tmp_path / "config.json").exists()


@pytest.mark.parametrize("below", ["", "run", "deep/run"])
def test_a_workdir_that_is_or_lies_below_a_file_is_refused(tmp_path, below):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"^workdir .*notes\.txt.* is a file"):
        refuse_other_config(tmp_path / "notes.txt" / below, {"lr": 1})
    refuse_other_config(tmp_path / "new" / "run", {"lr": 1})
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_fields_in_may_differ_may_change(tmp_path):
    with Checkpoints(tmp_path, CONFIG):
        pass
    Checkpoints(tmp_path, CONFIG | {"log_every": 5}, may_differ=("log_every",)).close()


def test_fields_in_may_grow_may_rise_but_not_fall(tmp_path):
    Checkpoints(tmp_path, CONFIG).close()
    longer = CONFIG | {"steps": 5}
    assert refuse_other_config(tmp_path, longer, (), ("steps",)) == {"steps": (CONFIG["steps"], 5)}
    assert refuse_other_config(tmp_path, CONFIG, (), ("steps",)) == {}
    Checkpoints(tmp_path, longer, may_grow=("steps",)).close()
    with pytest.raises(UserError, match=r"steps: 5 there, 3 now"):
        refuse_other_config(tmp_path, CONFIG, (), ("steps",))


def test_fields_that_older_versions_did_not_write_are_not_compared(tmp_path):
    old = {"run": {"data": {"path": "here", "files": {"q.jsonl": 3}}}}
    Checkpoints(tmp_path, old).close()
    new = {"run": {"data": {"path": "there", "files": {"q.jsonl": 3}, "content": {"q.jsonl": "a"}}}}
    refuse_other_config(tmp_path, new, ("run.data.path",))
    Checkpoints(tmp_path, new, may_differ=("run.data.path",)).close()
    new["run"]["data"]["content"]["q.jsonl"] = "b"
    with pytest.raises(UserError, match=r"content\.q\.jsonl: 'a' there, 'b' now"):
        refuse_other_config(tmp_path, new, ("run.data.path",))


@pytest.mark.parametrize("section", ["run.rollout", "run.reader_rollout", "rollout"])
def test_a_run_without_number_formats_continues_only_in_float32_or_auto(tmp_path, section):
    def nested(values):
        for name in reversed(section.split(".")):
            values = {name: values}
        return values

    Checkpoints(tmp_path, nested({"rows": 8})).close()
    for weights in ("auto", "float32", "unpacked"):
        refuse_other_config(tmp_path, nested({"rows": 8, "weights": weights}))
    with pytest.raises(UserError, match=rf"{section}\.weights: '\(absent\)' there, 'int8' now"):
        refuse_other_config(tmp_path, nested({"rows": 8, "weights": "int8"}))


def test_restoring_into_another_shape_is_refused(tmp_path):
    with Checkpoints(tmp_path, CONFIG) as checkpoints:
        checkpoints.save(1, {"w": jnp.zeros((2, 3))})
        with pytest.raises(UserError, match="does not fit"):
            checkpoints.restore({"w": jnp.zeros((4, 3)), "extra": jnp.zeros(1)})
        with pytest.raises(UserError, match="no checkpoint of step 9"):
            checkpoints.restore({"w": jnp.zeros((2, 3))}, step=9)


def test_sigterm_sets_the_flag_and_the_old_handler_is_restored():
    before = signal.getsignal(signal.SIGTERM)
    with stop_requested() as stop:
        assert not stop
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop
    assert signal.getsignal(signal.SIGTERM) is before
