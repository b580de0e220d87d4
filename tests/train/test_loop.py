"""The training loop: updates, evaluations, metrics, guard, and the questions it asks."""

import dataclasses
import json
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rrl.errors import UserError
from rrl.models.lora import LoraConfig, add_lora
from rrl.parallel.mesh import make_mesh
from rrl.parallel.rules import shard
from rrl.recipes.base import ScoringContext
from rrl.recipes.episodes import find_long_prompts
from rrl.recipes.rsearch import RSearch
from rrl.rl.critic import CriticConfig
from rrl.rl.optim import OptimConfig
from rrl.rollout import decoding
from rrl.rollout.curriculum import question_order
from rrl.rollout.engine import Engine
from rrl.runs.metrics import read_metrics
from rrl.setup.rl_config import GuardConfig
from rrl.train import run as train_run
from rrl.train.loop import train
from rrl.train.task import RunModels, Task
from tests.memory import collect, memory_maps
from tests.train.small_run import CONFIG, fresh, lines, run, steps_of


@pytest.mark.slow
def test_with_average_last_the_final_policy_is_the_mean_of_the_last_parameters(parts, whole, tmp_path):
    averaged = dataclasses.replace(CONFIG, average_last=0.5, checkpoint_every=3)
    with pytest.raises(ConnectionError):  # in step 4; the checkpoint of step 3 holds half of the mean
        run(parts, tmp_path / "mean", averaged, die_at=5)
    outcome, mean = run(parts, tmp_path / "mean", averaged)
    _, third = run(parts, tmp_path / "third", dataclasses.replace(CONFIG, steps=3, eval_every=0))
    jax.tree.map(lambda m, a, b: np.testing.assert_allclose(m, (a + b) / 2, rtol=1e-6), mean, third, whole[2])

    sampled = [line["reward/total"] for line in lines(tmp_path / "mean") if "reward/total" in line]
    assert sampled == [line["reward/total"] for line in lines(whole[0]) if "reward/total" in line]
    assert outcome.final_metrics["eval/f1"] == lines(tmp_path / "mean")[-1]["eval/f1"]


def test_a_critic_without_a_value_model_is_refused(parts, tmp_path):
    config = dataclasses.replace(CONFIG, critic=CriticConfig(OptimConfig()))
    with pytest.raises(UserError, match=r"train\.critic and a value model"):
        run(parts, tmp_path, config)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [0, 2])
def test_a_run_on_a_mesh_gives_the_same_metrics_as_on_one_device(parts, tmp_path, lora):
    questions, engine, recipe = parts
    config = dataclasses.replace(CONFIG, steps=1, eval_every=0)
    mesh = make_mesh(2, 2, 2)
    engines = []
    for place in (None, mesh):
        decoder = fresh()
        add_lora(decoder, LoraConfig(rank=lora), rngs=nnx.Rngs(1))
        if place is not None:
            nnx.update(decoder, shard(nnx.state(decoder), place))
        again = Engine(decoder, engine.tokenizer, engine.config, retriever=engine.retriever, mesh=place)
        _, params = run((questions, again, recipe), tmp_path / str(place is None), config, decoder=decoder)
        engines.append(params)
    alone, spread = (lines(tmp_path / name) for name in ("True", "False"))
    for one, other in zip(alone, spread, strict=True):
        assert other == pytest.approx(one, rel=1e-4, abs=1e-4)
    kernel = engines[1]["layers"]["down_lora_a" if lora else "down"][...]
    assert not kernel.is_fully_replicated


def test_parameters_change_and_the_kl_is_measured_from_the_frozen_reference(whole):
    workdir, outcome, params = whole
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), params, nnx.state(fresh()))
    assert max(jax.tree.leaves(moved)) > 1e-3
    lines = [line for line in read_metrics(workdir / "metrics.jsonl") if "train/kl" in line]
    assert lines[0]["train/kl"] == pytest.approx(0, abs=1e-6)
    assert lines[-1]["train/kl"] > 0
    assert lines[0]["train/sampling_logp_diff"] < 1e-5
    assert all(line["memory/host"] > 0.01 for line in lines)
    assert all(0 < line["rollout/busy"] <= 1 <= line["rollout/tokens_per_step"] for line in lines)
    tokens = [line["rollout/tokens_per_second"] * line["time/rollout"] for line in lines]
    assert tokens == pytest.approx([12 * line["tokens/policy"] for line in lines])
    assert set(outcome.final_metrics) >= {"eval/em", "eval/f1", "eval/searches"}


def test_the_first_evaluation_is_of_the_initial_policy(parts, tmp_path, monkeypatch):
    """The evaluation itself runs after the first update."""
    evaluated, evaluate = [], train_run.evaluate

    def recorded(engine, params, *rest, **options):
        evaluated.append(jax.device_get(params))
        return evaluate(engine, params, *rest, **options)

    monkeypatch.setattr(train_run, "evaluate", recorded)
    run(parts, tmp_path, CONFIG)
    start = jax.tree.leaves(nnx.state(fresh()))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(evaluated[0]), start)
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(evaluated[1]), start, strict=True))


def test_training_and_evaluating_share_one_rollout_program(parts, tmp_path, caplog):
    """Initial, current and averaged parameters differ only in their values."""
    questions, engine, recipe = parts
    again = Engine(fresh(), engine.tokenizer, engine.config, retriever=engine.retriever)
    config = dataclasses.replace(CONFIG, average_last=0.5, steps=3)
    jax.config.update("jax_log_compiles", True)  # in all threads
    try:
        with caplog.at_level("WARNING"):
            run((questions, again, recipe), tmp_path, config)
    finally:
        jax.config.update("jax_log_compiles", False)
    compiled = [line for line in caplog.messages if "Finished XLA compilation of jit(episode_loop)" in line]
    assert steps_of(tmp_path) == ["train 1", "eval 0", "train 2", "eval 2", "train 3", "eval 3"]
    assert len(compiled) == 1


def test_only_the_first_step_compiles(parts, tmp_path, caplog, monkeypatch):
    """Neither sampling nor updating compiles in later steps."""
    sample = Engine.run

    def run_and_log(self, *asked, **how):
        logging.getLogger("rrl").warning("samples")
        return sample(self, *asked, **how)

    monkeypatch.setattr(Engine, "run", run_and_log)
    jax.config.update("jax_log_compiles", True)  # in all threads
    try:
        with caplog.at_level("WARNING"):
            run(parts, tmp_path, dataclasses.replace(CONFIG, steps=4, eval_every=0))
    finally:
        jax.config.update("jax_log_compiles", False)
    assert [step for step in steps_of(tmp_path) if "train" in step] == [f"train {n}" for n in (1, 2, 3, 4)]
    starts = [place for place, line in enumerate(caplog.messages) if line == "samples"]
    later = caplog.messages[starts[1] :]
    assert not [line for line in later if "Finished XLA compilation" in line]


def test_a_run_of_zero_steps_only_evaluates(parts, tmp_path):
    config = dataclasses.replace(CONFIG, steps=0, optim=OptimConfig(total_steps=1))
    outcome, params = run(parts, tmp_path, config)
    jax.tree.map(np.testing.assert_array_equal, params, nnx.state(fresh()))
    assert outcome.start_metrics == outcome.final_metrics


def test_an_epoch_asks_each_question_once():
    asked = np.concatenate([question_order(10, 5, 3, step) for step in range(4)])
    assert sorted(asked[:10]) == sorted(asked[10:]) == list(range(10))
    assert not np.array_equal(asked[:10], asked[10:])
    assert np.array_equal(question_order(10, 5, 3, 1), asked[5:10])


def test_dynamic_sampling_without_any_group_with_spread_makes_no_update(parts, tmp_path):
    objective = dataclasses.replace(CONFIG.objective, drop_spread=100.0)
    outcome, params = run(
        parts, tmp_path, dataclasses.replace(CONFIG, steps=1, objective=objective, rounds=3)
    )
    assert len(outcome.last_trajectories) == len(outcome.left_out) == 36 and outcome.left_out.all()
    (line,) = (line for line in lines(tmp_path) if "train/groups" in line)
    assert (line["train/groups"], line["train/left_out"]) == (12, 1)  # three rounds of four questions
    jax.tree.map(np.testing.assert_array_equal, params, nnx.state(fresh()))


def test_advantages_over_the_batch_ignore_dropped_groups(parts, tmp_path):
    questions, engine, recipe = parts
    over_the_batch = dataclasses.replace(recipe, advantage="reinforce_plus_plus")
    objective = dataclasses.replace(CONFIG.objective, drop_spread=3.0)
    config = dataclasses.replace(CONFIG, steps=1, eval_every=0, objective=objective)
    outcome, _ = run((questions, engine, over_the_batch), tmp_path, config)
    assert outcome.left_out.any() and not outcome.left_out.all()
    (line,) = (line for line in lines(tmp_path) if "train/advantage_std" in line)
    assert line["train/advantage_std"] == pytest.approx(1, abs=1e-5)


def test_questions_too_long_for_the_context_are_reported_before_training(parts):
    questions, engine, recipe = parts
    messages = []
    assert find_long_prompts(engine, recipe, questions, "refuse", messages.append) == set() and not messages
    spaces = dataclasses.replace(questions[0], id="many bytes, few tokens", text=questions[0].text * 2)
    assert find_long_prompts(engine, recipe, [spaces], "stop", messages.append) == set()
    long = dataclasses.replace(questions[0], id="endless", text=questions[0].text * 40)
    for on_error in ("refuse", "skip"):
        assert find_long_prompts(engine, recipe, [*questions, long], on_error, messages.append) == {
            len(questions)
        }
    words = f"1 of {len(questions) + 1} questions do not fit the context of 128 tokens and end as context_limit; the first is"
    assert len(messages) == 2 and all(f"{words} 'endless', whose prompt has" in text for text in messages)
    with pytest.raises(UserError, match=r"question 'endless' has \d+ tokens; the context holds 128"):
        find_long_prompts(engine, recipe, [*questions, long], "stop", messages.append)


def test_a_batch_with_a_non_finite_gradient_is_skipped_and_saved(parts, tmp_path, capsys):
    falling = dataclasses.replace(CONFIG, optim=dataclasses.replace(CONFIG.optim, schedule="linear"))
    _, params = run(parts, tmp_path, falling, poisoned=3)  # step 2
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
    assert "step 2: a gradient was not finite" in capsys.readouterr().err
    (file,) = (tmp_path / "not_finite").iterdir()
    saved = np.load(file)
    assert file.name == "step_000002.npz" and np.isnan(saved["advantages"]).all()
    about = json.loads(str(saved["about"]))
    assert len(about) == len(saved["lengths"]) == 12 and saved["lengths"].sum() == len(saved["tokens"])
    assert {one["id"] for one in about} <= {question.id for question in parts[0]}
    assert [line["train/skipped"] for line in lines(tmp_path) if "train/skipped" in line] == [0, 1, 1, 1]
    rates = [line["train/lr"] for line in lines(tmp_path) if "train/lr" in line]
    np.testing.assert_allclose(
        rates, [0.01, 0.01, 0.0075, 0.005]
    )  # skipped updates do not advance the schedule


def test_a_recipe_sees_the_step_and_its_excluded_groups_are_not_used(parts, tmp_path, capsys):
    questions, engine, recipe = parts
    seen = []

    class Seen(RSearch):
        def score(self, trajectories, scoring):
            seen.append((scoring.step, scoring.steps, scoring.reader("x")))
            super().score(trajectories, scoring)
            for place, t in enumerate(trajectories):
                t.rewards["total"] = float(place % 2)  # unequal rewards

        def excluded(self, trajectories):
            return np.array([t.group > 0 or seen[-1][0] == 0 for t in trajectories])

    recipe = Seen(instruction="", use_evidence=False, environment=recipe.environment)
    config = dataclasses.replace(CONFIG, steps=2, eval_every=0)
    scoring = ScoringContext(reader=lambda prompts: prompts)
    train(
        config,
        recipe,
        Task(questions[:8], questions[8:]),
        RunModels(engine, fresh(), scoring=scoring),
        tmp_path,
    )
    assert seen == [
        (0, 2, "x"),
        (0, 2, "x"),
        (1, 2, "x"),
        (2, 2, "x"),
    ]  # a step, the evaluation of the start, a step, the final evaluation
    shares = [line["train/left_out"] for line in lines(tmp_path) if "train/left_out" in line]
    assert shares == [1.0, 0.75]
    assert "step 1: no update" in capsys.readouterr().err


@pytest.mark.slow
def test_finished_runs_hold_no_compiled_programs(parts, tmp_path):
    counts = []
    for number in range(4):
        config = dataclasses.replace(CONFIG, steps=1, eval_every=0)
        run(parts, tmp_path / str(number), config)
        collect()
        counts.append(memory_maps())
    assert max(counts[2:]) <= counts[1] + 50, counts


def test_nan_logits_are_counted_logged_and_seen_by_the_guard(parts, tmp_path, capsys):
    config = dataclasses.replace(CONFIG, guard=GuardConfig("stop", steps=2))
    decoder = fresh()
    nnx.update(decoder, jax.tree.map(lambda x: x * np.nan, nnx.state(decoder)))
    outcome, _ = run(parts, tmp_path, config, decoder=decoder)
    assert outcome.stopped == "collapse" and "logits of the policy are not finite" in outcome.guard_message
    assert "step 1: no update: logits were not finite" in capsys.readouterr().err
    trained = [line for line in lines(tmp_path) if "reward/total" in line]
    assert [line["train/not_finite"] for line in trained] == [12, 12]
    assert all(line["ended/not_finite"] == 1 and "train/grad_norm" not in line for line in trained)
    evaluated = [line for line in lines(tmp_path) if "eval/em" in line]
    assert evaluated and all(line["eval/not_finite"] == 4 for line in evaluated)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_non_finite_logits_put_no_nan_into_the_update(parts, tmp_path, monkeypatch, aggregation):
    """In each group one sample gets NaN logits at once and one after three tokens."""
    draw = decoding.sample_tokens

    def breaking(model, rows, *rest):
        ends = jnp.where(rows.seed % 3 == 2, 99, 3 * (rows.seed % 3))
        return [
            d._replace(logps=jnp.where(rows.length == ends, jnp.nan, d.logps))
            for d in draw(model, rows, *rest)
        ]

    monkeypatch.setattr(decoding, "sample_tokens", breaking)
    questions, engine, recipe = parts
    again = Engine(fresh(), engine.tokenizer, engine.config, retriever=engine.retriever)
    objective = dataclasses.replace(
        CONFIG.objective, aggregation=aggregation, importance_cap=2.0, minibatches=4
    )
    config = dataclasses.replace(CONFIG, steps=2, eval_every=0, objective=objective)
    outcome, params = run((questions, again, recipe), tmp_path, config)
    assert {t.policy_tokens for t in outcome.last_trajectories if t.ended == "not_finite"} == {0, 3}
    trained = [line for line in read_metrics(tmp_path / "metrics.jsonl") if "reward/total" in line]
    assert all(line["train/not_finite"] == 8 and line["train/skipped"] == 0 for line in trained)
    assert all(value is not None for line in trained for value in line.values())
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))


def test_a_reward_component_that_is_always_0_is_named_in_the_log(parts, tmp_path, capsys):
    run(parts, tmp_path, dataclasses.replace(CONFIG, steps=3, eval_every=0))
    printed = capsys.readouterr().err
    metrics = [line for line in read_metrics(tmp_path / "metrics.jsonl") if "reward/total" in line]
    always_0 = {
        name for name in metrics[0] if name.startswith("reward/") and not any(m[name] for m in metrics)
    }
    named = re.findall(r"step 3: the reward component '(\w+)' was 0 for every trajectory so far", printed)
    assert always_0 and {f"reward/{name}" for name in named} == always_0


def test_a_continued_run_names_no_reward_component_whose_first_steps_it_has_not_seen(parts, tmp_path, capsys):
    for steps in (2, 3):
        optim = dataclasses.replace(CONFIG.optim, total_steps=steps)
        run(parts, tmp_path, dataclasses.replace(CONFIG, steps=steps, optim=optim, eval_every=0))
    assert "reward component" not in capsys.readouterr().err
