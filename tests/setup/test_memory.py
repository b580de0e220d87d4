"""Tests of the memory of an RL run: what counts, the refusal before anything is loaded, and agreement with the plan."""

import dataclasses
import re

import jax
import pytest

from configs.rsearch_grpo import get_config
from rrl.errors import UserError
from rrl.parallel.mesh import make_mesh
from rrl.plan.capacity import plan_capacity
from rrl.plan.report import report
from rrl.setup.memory import require_run_memory
from rrl.setup.settings import TrainSettings
from rrl.train import components
from rrl.train.experiment import run
from tests.memory import limit_memory

MIB = 2**20


@pytest.fixture(scope="module")
def plan():
    return plan_capacity(get_config("steps=1"), "cpu:1")


def test_a_run_that_needs_more_memory_is_refused_before_anything_is_loaded(tmp_path, monkeypatch, plan):
    need = sum(plan.memory[plan.largest_phase].values())
    limit_memory(monkeypatch, tmp_path, int(need) - MIB)
    monkeypatch.setattr(components, "load_language_model", lambda *_: pytest.fail("nothing may be loaded"))
    with pytest.raises(
        UserError, match=r"assets/miniwiki-policy'.* of memory, but .* are available"
    ) as error:
        run(get_config("steps=1"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert f"the {plan.largest_phase} of this run needs {need / MIB:.2f} MiB" in str(error.value)
    # The plan reads the same limit, and comes to the same numbers and the same verdict.
    refused = plan_capacity(get_config("steps=1"), "cpu:1")
    assert refused.memory == plan.memory and not refused.fits and plan.fits
    assert "IT DOES NOT FIT" in report(refused)
    for part, size in plan.memory[plan.largest_phase].items():
        assert f"{part} {size / MIB:.2f}" in str(error.value)


def test_a_run_that_fits_exactly_is_accepted(tmp_path, monkeypatch, plan):
    limit_memory(monkeypatch, tmp_path, int(sum(plan.memory[plan.largest_phase].values())) + 1)
    mesh = make_mesh(devices=jax.devices()[:1])
    require_run_memory(TrainSettings.from_config(get_config("steps=1")), plan.config, mesh)


def test_a_run_without_updates_needs_no_memory_for_them(tmp_path, monkeypatch, plan):
    phases = {name: sum(parts.values()) for name, parts in plan.memory.items()}
    inference = max(phases["rollout"], phases["reader"])
    limit_memory(monkeypatch, tmp_path, int(inference) + 1)
    mesh, settings = make_mesh(devices=jax.devices()[:1]), TrainSettings.from_config(get_config("steps=1"))
    with pytest.raises(UserError, match="the update of this run"):
        require_run_memory(settings, plan.config, mesh)
    evaluated = dataclasses.replace(settings, train=dataclasses.replace(settings.train, steps=0))
    require_run_memory(evaluated, plan.config, mesh)


def test_reader_and_average_are_counted(plan):
    rollout = plan.memory["rollout"]
    assert (
        rollout["average"] == plan.memory["update"]["gradients"] > 0
    )  # average_last=0.5: of the trained parameters
    assert 0 < rollout["reader"] == plan.memory["update"]["reader"]
    assert plan.memory["reader"]["KV cache"] > 0
    assert re.search("^excluded  query encoder$", report(plan), re.MULTILINE)
    config = get_config("steps=1")
    config.reader, config.train.average_last = "", 0.0
    alone = plan_capacity(config, "cpu:1")
    assert "reader" not in alone.memory and alone.memory["rollout"].keys().isdisjoint({"reader", "average"})


def test_a_judge_that_is_a_model_is_counted():
    from configs.tiresrag_grpo import get_config as get_tiresrag

    memory = plan_capacity(
        get_tiresrag("steps=1,judge=assets/miniwiki-judge,policy=assets/miniwiki-policy"), "cpu:1"
    ).memory
    assert memory["update"]["judge"] > 0 and memory["judge"]["KV cache"] > 0
