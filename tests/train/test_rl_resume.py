"""The training loop that is broken off: it goes on to the same numbers, and ends where it should."""

import contextlib
import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from rrl.errors import UserError
from rrl.models.heads import ValueModel
from rrl.rl.critic import CriticConfig
from rrl.rl.optim import OptimConfig
from rrl.runs.checkpoints import saved_steps
from rrl.runs.metrics import MetricsWriter
from rrl.runs.saved_trajectories import as_json
from rrl.stopping import ServiceUnavailable, StopSignal
from rrl.train import loop as rl
from rrl.train.guard import GuardConfig
from tests.train.small_run import CONFIG, EVERY_LINE, STEPS, fresh, lines, run, steps_of


def test_a_run_that_died_continues_to_the_same_numbers(parts, whole, tmp_path):
    workdir, outcome, params = whole
    with pytest.raises(ConnectionError):
        run(parts, tmp_path, CONFIG, die_at=5)  # evaluation, 2 steps, evaluation, 1 step
    again, other = run(parts, tmp_path, CONFIG)
    jax.tree.map(np.testing.assert_array_equal, params, other)
    assert again.step == STEPS
    assert outcome.start_metrics["eval/f1"] == again.start_metrics["eval/f1"]

    assert lines(workdir) == lines(tmp_path)
    assert steps_of(workdir) == EVERY_LINE


@pytest.mark.slow
def test_with_a_critic_the_policy_waits_for_it_and_a_run_that_died_continues_to_the_same_numbers(
    parts, tmp_path
):
    critic = CriticConfig(OptimConfig(lr=1e-2, total_steps=3), warmup_steps=1)
    objective = dataclasses.replace(
        CONFIG.objective, kl_in="reward", kl_estimator="k1", whiten=True, epochs=2
    )
    config = dataclasses.replace(
        CONFIG, steps=3, samples=1, eval_every=0, checkpoint_every=2, objective=objective, critic=critic
    )

    def values():
        return ValueModel(fresh().config, rngs=nnx.Rngs(1))

    _, params = run(parts, tmp_path / "whole", config, value_model=values())
    with pytest.raises(ConnectionError):
        run(parts, tmp_path / "died", config, die_at=3, value_model=values())  # evaluation, 2 steps
    _, other = run(parts, tmp_path / "died", config, value_model=values())
    jax.tree.map(np.testing.assert_array_equal, params, other)
    assert lines(tmp_path / "whole") == lines(tmp_path / "died")
    first, second, third = (line for line in lines(tmp_path / "whole") if "reward/total" in line)
    assert "train/kl" not in first and "train/kl" in second and "train/kl" in third
    assert first["train/lr"] == 0 < second["train/lr"]
    assert first["critic/explained_variance"] == pytest.approx(0, abs=1e-5)  # its output starts at 0
    assert all(np.isfinite(line["critic/loss"]) for line in (first, second, third))
    # Its own advantages': the recipe's, of groups of one, have none.
    assert all(line["train/advantage_std"] > 0.1 for line in (first, second, third))
    _, waiting = run(parts, tmp_path / "one", dataclasses.replace(config, steps=1), value_model=values())
    jax.tree.map(np.testing.assert_array_equal, waiting, nnx.state(fresh()))


def test_a_run_that_died_before_its_first_checkpoint_keeps_its_evaluation(parts, tmp_path):
    with pytest.raises(ConnectionError):
        run(parts, tmp_path, CONFIG, die_at=2)
    outcome, _ = run(parts, tmp_path, CONFIG)
    assert steps_of(tmp_path) == EVERY_LINE
    assert outcome.start_metrics["eval/em"] == lines(tmp_path)[1]["eval/em"]


def test_wherever_a_run_dies_its_lines_and_the_trajectories_of_its_report_are_those_of_an_unbroken_run(
    parts, whole, tmp_path, monkeypatch
):
    def life(most: int) -> None:
        """Dies once it has written so many lines."""
        written, write = 0, MetricsWriter.write

        def dying(self, step, metrics):
            nonlocal written
            write(self, step, metrics)
            written += 1
            if written == most:
                raise ConnectionError("the machine went away")

        with monkeypatch.context() as patch:
            patch.setattr(MetricsWriter, "write", dying)
            with pytest.raises(ConnectionError):
                run(parts, tmp_path, CONFIG)

    life(2)  # the start is evaluated, nothing is saved
    life(4)  # step 2 is evaluated, and not saved
    life(7)  # the last step is evaluated, and saved before that
    life(1)  # the same in a life that has its line from the former one
    again, _ = run(parts, tmp_path, CONFIG)
    assert lines(tmp_path) == lines(whole[0]) and steps_of(tmp_path) == EVERY_LINE
    for name in ("sampled", "evaluated"):
        found, expected = getattr(again, name), getattr(whole[1], name)
        assert [as_json(t) for t in found] == [as_json(t) for t in expected] and expected
    np.testing.assert_array_equal(again.left_out, whole[1].left_out)


def test_a_guard_that_warned_says_so_after_the_run_died(parts, tmp_path):
    config = dataclasses.replace(CONFIG, guard=GuardConfig("warn", steps=2), checkpoint_every=1)
    with pytest.raises(ConnectionError):
        run(parts, tmp_path, config, poor_from=1, die_at=5)  # steps 1 to 3 earn nothing
    outcome, _ = run(parts, tmp_path, config)
    assert outcome.guard_message == "the reward is at most 0 in each step from 1 to 2"


@pytest.mark.parametrize("after", [1, 2])
def test_a_signal_loses_no_evaluation(parts, tmp_path, monkeypatch, after):
    class Stop:
        """A signal that comes during the given step: it is asked for before and after each, and once before the start is
        evaluated."""

        asked = 0

        def __bool__(self):
            self.asked += 1
            return self.asked >= 2 * after + 1

    with monkeypatch.context() as patch:
        patch.setattr(rl, "stop_requested", lambda: contextlib.nullcontext(Stop()))
        stopped, _ = run(parts, tmp_path, CONFIG)
    assert (stopped.step, stopped.stopped) == (after, "signal" if after < STEPS else "done")
    run(parts, tmp_path, CONFIG)
    assert steps_of(tmp_path) == EVERY_LINE


@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_signal_during_an_evaluation_ends_the_run_there(parts, whole, tmp_path, monkeypatch, before):
    class Stop:
        asked = 0

        def __bool__(self):
            self.asked += 1
            return self.asked >= 2 * before + (2 if before else 1)

    with monkeypatch.context() as patch:
        patch.setattr(rl, "stop_requested", lambda: contextlib.nullcontext(Stop()))
        stopped, _ = run(parts, tmp_path, CONFIG)
    assert (stopped.step, stopped.stopped) == (before, "signal")
    _, params = run(parts, tmp_path, CONFIG)
    assert steps_of(tmp_path) == EVERY_LINE
    jax.tree.map(np.testing.assert_array_equal, params, whole[2])


@pytest.mark.parametrize("asked", [False, True])
def test_where_a_judge_falls_silent_what_was_learned_is_kept(parts, whole, tmp_path, monkeypatch, asked):
    stop, sample_step = StopSignal(), rl.sample_step

    def silent(config, step, *others):
        if step == 1:
            sample_step(config, step, *others)  # what it did to the curriculum is undone
            if asked:
                stop.set()
            raise ServiceUnavailable("no answer")
        return sample_step(config, step, *others)

    with monkeypatch.context() as patch:
        patch.setattr(rl, "sample_step", silent)
        patch.setattr(rl, "stop_requested", lambda: contextlib.nullcontext(stop))
        with contextlib.nullcontext() if asked else pytest.raises(ServiceUnavailable):
            stopped, _ = run(parts, tmp_path, CONFIG)
            assert (stopped.step, stopped.stopped) == (1, "signal")
    assert saved_steps(tmp_path)[-1] == 1
    _, params = run(parts, tmp_path, CONFIG)
    assert steps_of(tmp_path) == EVERY_LINE
    jax.tree.map(np.testing.assert_array_equal, params, whole[2])


def test_where_a_judge_falls_silent_in_the_first_evaluation_the_update_before_it_is_written_down(
    parts, whole, tmp_path, monkeypatch
):
    def silent(*args, **kwargs):
        raise ServiceUnavailable("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(rl, "evaluate", silent)
        with pytest.raises(ServiceUnavailable):
            run(parts, tmp_path, CONFIG)
    assert saved_steps(tmp_path)[-1] == 1
    _, params = run(parts, tmp_path, CONFIG)
    assert steps_of(tmp_path) == EVERY_LINE
    jax.tree.map(np.testing.assert_array_equal, params, whole[2])


def test_a_finished_run_only_reports_again(parts, whole):
    workdir, first, params = whole
    written = (workdir / "metrics.jsonl").read_text()
    again, restored = run(parts, workdir, CONFIG, die_at=0)
    jax.tree.map(np.testing.assert_array_equal, params, restored)
    assert (workdir / "metrics.jsonl").read_text() == written
    assert (
        again.start_metrics["eval/em"] == first.start_metrics["eval/em"]
        and again.final_metrics["eval/f1"] == first.final_metrics["eval/f1"]
    )
    assert again.seconds == first.seconds


def test_a_finished_run_takes_more_steps_from_where_it_was(parts, tmp_path):
    run(parts, tmp_path, dataclasses.replace(CONFIG, steps=2, eval_every=1))
    longer, params = run(parts, tmp_path, CONFIG)
    assert longer.step == STEPS and longer.stopped == "done"
    assert [step for step in steps_of(tmp_path) if step.startswith("train")] == [
        f"train {n}" for n in (1, 2, 3, 4)
    ]
    # Its schedule is constant and its optimiser's state was kept: the numbers are those of one run.
    _, once = run(parts, tmp_path / "once", CONFIG)
    jax.tree.map(np.testing.assert_array_equal, params, once)
    with pytest.raises(UserError, match="steps: 4 there, 3 now"):
        run(parts, tmp_path, dataclasses.replace(CONFIG, steps=3))


def test_another_config_is_refused_by_the_name_of_its_field(parts, whole):
    with pytest.raises(UserError, match="samples"):
        run(parts, whole[0], dataclasses.replace(CONFIG, samples=5))


def test_a_run_that_collapsed_ends_at_its_last_good_checkpoint(parts, tmp_path):
    guarded = dataclasses.replace(CONFIG, guard=GuardConfig("stop", steps=2), checkpoint_every=1)
    outcome, params = run(parts, tmp_path / "poor", guarded, poor_from=5)  # steps 3 and 4
    assert (outcome.stopped, outcome.step) == ("collapse", 2)
    assert outcome.guard_message == "the reward is at most 0 in each step from 3 to 4"
    _, second = run(parts, tmp_path / "two", dataclasses.replace(CONFIG, steps=2))
    jax.tree.map(np.testing.assert_array_equal, params, second)
    assert (
        steps_of(tmp_path / "poor") == EVERY_LINE[:-1]
    )  # what happened is still there, step 2 evaluated once
    assert outcome.final_metrics["eval/f1"] == lines(tmp_path / "poor")[3]["eval/f1"]
    warned = dataclasses.replace(guarded, guard=GuardConfig("warn", steps=1))
    outcome, _ = run(parts, tmp_path / "warned", warned, poor_from=5)
    assert (outcome.stopped, outcome.guard_message) == (
        "done",
        "the reward is at most 0 in each step from 3 to 3",
    )


def test_a_run_that_collapsed_before_its_first_checkpoint_ends_at_its_start(parts, tmp_path):
    guarded = dataclasses.replace(CONFIG, guard=GuardConfig("stop", steps=2), eval_every=0)
    outcome, params = run(parts, tmp_path, guarded, poor_from=1)
    assert (outcome.stopped, outcome.step) == ("collapse", 0)
    jax.tree.map(np.testing.assert_array_equal, params, nnx.state(fresh()))
    assert outcome.final_metrics == outcome.start_metrics and steps_of(tmp_path) == [
        "train 1",
        "eval 0",
        "train 2",
    ]


def test_a_signal_keeps_no_checkpoint_of_what_may_be_a_collapse(parts, tmp_path, monkeypatch):
    class Stop:
        asked = 0

        def __bool__(self):
            self.asked += 1
            return self.asked >= 2 * 3 + 1  # after step 3

    guarded = dataclasses.replace(CONFIG, guard=GuardConfig("stop", steps=2), checkpoint_every=1)
    with monkeypatch.context() as patch:
        patch.setattr(rl, "stop_requested", lambda: contextlib.nullcontext(Stop()))
        assert run(parts, tmp_path, guarded, poor_from=5)[0].stopped == "signal"
    assert saved_steps(tmp_path)[-1] == 2
