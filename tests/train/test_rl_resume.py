"""Interrupted training runs: resuming gives bitwise the same result, and collapse ends at the right checkpoint."""

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
from rrl.runs.checkpoint_reader import saved_steps
from rrl.runs.metrics import MetricsWriter
from rrl.runs.saved_trajectories import as_json
from rrl.setup.rl_config import GuardConfig
from rrl.stopping import ServiceUnavailable, StopSignal
from rrl.train import loop as rl
from rrl.train import run as train_run
from tests.train.small_run import CONFIG, EVERY_LINE, STEPS, fresh, lines, run, steps_of


def test_a_killed_run_resumes_to_the_same_result(parts, whole, tmp_path):
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
def test_a_killed_run_with_a_critic_resumes_to_the_same_result_and_warms_up_its_critic(parts, tmp_path):
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
    assert first["critic/explained_variance"] == pytest.approx(0, abs=1e-5)  # the value head starts at 0
    assert all(np.isfinite(line["critic/loss"]) for line in (first, second, third))
    # This is of the critic's advantages; the recipe's advantages of groups of one are all 0.
    assert all(line["train/advantage_std"] > 0.1 for line in (first, second, third))
    _, waiting = run(parts, tmp_path / "one", dataclasses.replace(config, steps=1), value_model=values())
    jax.tree.map(np.testing.assert_array_equal, waiting, nnx.state(fresh()))


def test_a_run_killed_before_its_first_checkpoint_keeps_its_evaluation(parts, tmp_path):
    with pytest.raises(ConnectionError):
        run(parts, tmp_path, CONFIG, die_at=2)
    outcome, _ = run(parts, tmp_path, CONFIG)
    assert steps_of(tmp_path) == EVERY_LINE
    assert outcome.start_metrics["eval/em"] == lines(tmp_path)[1]["eval/em"]


def test_a_run_killed_anywhere_ends_with_the_metrics_and_trajectories_of_an_uninterrupted_run(
    parts, whole, tmp_path, monkeypatch
):
    def run_until(max_lines: int) -> None:
        """Run until `max_lines` lines of metrics are written, then fail."""
        written, write = 0, MetricsWriter.write

        def dying(self, step, metrics):
            nonlocal written
            write(self, step, metrics)
            written += 1
            if written == max_lines:
                raise ConnectionError("the machine went away")

        with monkeypatch.context() as patch:
            patch.setattr(MetricsWriter, "write", dying)
            with pytest.raises(ConnectionError):
                run(parts, tmp_path, CONFIG)

    run_until(2)  # the start is evaluated, nothing is saved
    run_until(4)  # step 2 is evaluated, but not saved
    run_until(7)  # the last step is saved, then evaluated
    run_until(1)  # the same, with its line from the process before
    again, _ = run(parts, tmp_path, CONFIG)
    assert lines(tmp_path) == lines(whole[0]) and steps_of(tmp_path) == EVERY_LINE
    for name in ("last_trajectories", "eval_trajectories"):
        found, expected = getattr(again, name), getattr(whole[1], name)
        assert [as_json(t) for t in found] == [as_json(t) for t in expected] and expected
    np.testing.assert_array_equal(again.left_out, whole[1].left_out)


def test_the_warning_of_a_guard_survives_a_restart(parts, tmp_path):
    config = dataclasses.replace(CONFIG, guard=GuardConfig("warn", steps=2), checkpoint_every=1)
    with pytest.raises(ConnectionError):
        run(parts, tmp_path, config, poor_from=1, die_at=5)  # steps 1 to 3 earn nothing
    outcome, _ = run(parts, tmp_path, config)
    assert outcome.guard_message == "the reward is at most 0 in each step from 1 to 2"


@pytest.mark.parametrize("after", [1, 2])
def test_no_evaluation_is_lost_after_a_signal(parts, tmp_path, monkeypatch, after):
    class Stop:
        """A stop flag that becomes true during step `after`.

        The loop reads the flag before and after each step, and once before the start is evaluated.
        """

        reads = 0

        def __bool__(self):
            self.reads += 1
            return self.reads >= 2 * after + 1

    with monkeypatch.context() as patch:
        patch.setattr(train_run, "stop_requested", lambda: contextlib.nullcontext(Stop()))
        stopped, _ = run(parts, tmp_path, CONFIG)
    assert (stopped.step, stopped.stopped) == (after, "signal" if after < STEPS else "done")
    run(parts, tmp_path, CONFIG)
    assert steps_of(tmp_path) == EVERY_LINE


@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_signal_during_an_evaluation_ends_the_run_after_it(parts, whole, tmp_path, monkeypatch, before):
    class Stop:
        reads = 0

        def __bool__(self):
            self.reads += 1
            return self.reads >= 2 * before + (2 if before else 1)

    with monkeypatch.context() as patch:
        patch.setattr(train_run, "stop_requested", lambda: contextlib.nullcontext(Stop()))
        stopped, _ = run(parts, tmp_path, CONFIG)
    assert (stopped.step, stopped.stopped) == (before, "signal")
    _, params = run(parts, tmp_path, CONFIG)
    assert steps_of(tmp_path) == EVERY_LINE
    jax.tree.map(np.testing.assert_array_equal, params, whole[2])


@pytest.mark.parametrize("stopping", [False, True])
def test_completed_steps_are_saved_when_a_judge_does_not_answer(
    parts, whole, tmp_path, monkeypatch, stopping
):
    stop, sample_and_score = StopSignal(), rl.sample_and_score

    def no_answer(config, step, *others):
        if step == 1:
            sample_and_score(config, step, *others)  # its changes to the curriculum must be undone
            if stopping:
                stop.set()
            raise ServiceUnavailable("no answer")
        return sample_and_score(config, step, *others)

    with monkeypatch.context() as patch:
        patch.setattr(rl, "sample_and_score", no_answer)
        patch.setattr(train_run, "stop_requested", lambda: contextlib.nullcontext(stop))
        with contextlib.nullcontext() if stopping else pytest.raises(ServiceUnavailable):
            stopped, _ = run(parts, tmp_path, CONFIG)
            assert (stopped.step, stopped.stopped) == (1, "signal")
    assert saved_steps(tmp_path)[-1] == 1
    _, params = run(parts, tmp_path, CONFIG)
    assert steps_of(tmp_path) == EVERY_LINE
    jax.tree.map(np.testing.assert_array_equal, params, whole[2])


def test_the_first_update_is_saved_when_a_judge_does_not_answer_in_the_first_evaluation(
    parts, whole, tmp_path, monkeypatch
):
    def no_answer(*args, **kwargs):
        raise ServiceUnavailable("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(train_run, "evaluate", no_answer)
        with pytest.raises(ServiceUnavailable):
            run(parts, tmp_path, CONFIG)
    assert saved_steps(tmp_path)[-1] == 1
    _, params = run(parts, tmp_path, CONFIG)
    assert steps_of(tmp_path) == EVERY_LINE
    jax.tree.map(np.testing.assert_array_equal, params, whole[2])


def test_a_finished_run_only_writes_its_report_again(parts, whole):
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


@pytest.mark.slow
def test_a_finished_run_continues_when_its_steps_are_raised(parts, tmp_path):
    run(parts, tmp_path, dataclasses.replace(CONFIG, steps=2, eval_every=1))
    longer, params = run(parts, tmp_path, CONFIG)
    assert longer.step == STEPS and longer.stopped == "done"
    assert [step for step in steps_of(tmp_path) if step.startswith("train")] == [
        f"train {n}" for n in (1, 2, 3, 4)
    ]
    # With a constant schedule and a restored optimiser the result is that of one longer run.
    _, once = run(parts, tmp_path / "once", CONFIG)
    jax.tree.map(np.testing.assert_array_equal, params, once)
    with pytest.raises(UserError, match="steps: 4 there, 3 now"):
        run(parts, tmp_path, dataclasses.replace(CONFIG, steps=3))


def test_the_error_for_another_config_names_the_field(parts, whole):
    with pytest.raises(UserError, match="samples"):
        run(parts, whole[0], dataclasses.replace(CONFIG, samples=5))


@pytest.mark.slow
def test_a_collapsed_run_ends_at_its_last_good_checkpoint(parts, tmp_path):
    guarded = dataclasses.replace(CONFIG, guard=GuardConfig("stop", steps=2), checkpoint_every=1)
    outcome, params = run(parts, tmp_path / "poor", guarded, poor_from=5)  # steps 3 and 4
    assert (outcome.stopped, outcome.step) == ("collapse", 2)
    assert outcome.guard_message == "the reward is at most 0 in each step from 3 to 4"
    _, second = run(parts, tmp_path / "two", dataclasses.replace(CONFIG, steps=2))
    jax.tree.map(np.testing.assert_array_equal, params, second)
    assert (
        steps_of(tmp_path / "poor") == EVERY_LINE[:-1]
    )  # later lines are kept, and step 2 is evaluated once
    assert outcome.final_metrics["eval/f1"] == lines(tmp_path / "poor")[3]["eval/f1"]
    warned = dataclasses.replace(guarded, guard=GuardConfig("warn", steps=1))
    outcome, _ = run(parts, tmp_path / "warned", warned, poor_from=5)
    assert (outcome.stopped, outcome.guard_message) == (
        "done",
        "the reward is at most 0 in each step from 3 to 3",
    )


def test_a_run_that_collapses_before_its_first_checkpoint_ends_at_its_start(parts, tmp_path):
    guarded = dataclasses.replace(CONFIG, guard=GuardConfig("stop", steps=2), eval_every=0)
    outcome, params = run(parts, tmp_path, guarded, poor_from=1)
    assert (outcome.stopped, outcome.step) == ("collapse", 0)
    jax.tree.map(np.testing.assert_array_equal, params, nnx.state(fresh()))
    assert outcome.final_metrics == outcome.start_metrics and steps_of(tmp_path) == [
        "train 1",
        "eval 0",
        "train 2",
    ]


def test_a_signal_saves_no_checkpoint_while_the_guard_sees_a_sign_of_collapse(parts, tmp_path, monkeypatch):
    class Stop:
        reads = 0

        def __bool__(self):
            self.reads += 1
            return self.reads >= 2 * 3 + 1  # after step 3

    guarded = dataclasses.replace(CONFIG, guard=GuardConfig("stop", steps=2), checkpoint_every=1)
    with monkeypatch.context() as patch:
        patch.setattr(train_run, "stop_requested", lambda: contextlib.nullcontext(Stop()))
        assert run(parts, tmp_path, guarded, poor_from=5)[0].stopped == "signal"
    assert saved_steps(tmp_path)[-1] == 2
