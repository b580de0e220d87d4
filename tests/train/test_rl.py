"""The training loop: resumes to the same numbers, evaluates, and keeps its order of questions."""

import contextlib
import dataclasses
import json

import jax
import numpy as np
import pytest
from flax import nnx

from rrl.data.miniwiki import generate
from rrl.data.tokenizer import train_tokenizer
from rrl.errors import UserError
from rrl.models.config import DecoderConfig
from rrl.models.decoder import Decoder
from rrl.models.heads import ValueModel
from rrl.models.lora import LoraConfig, add_lora
from rrl.parallel.mesh import make_mesh
from rrl.parallel.rules import shard
from rrl.recipes.base import Scoring
from rrl.recipes.rsearch import RSearch
from rrl.retrieval.index import make_retriever
from rrl.rl.optim import OptimConfig
from rrl.rollout.curriculum import question_order
from rrl.rollout.engine import Engine, EngineConfig
from rrl.rollout.protocol import Stream
from rrl.rollout.trajectory import POLICY
from rrl.train import rl
from rrl.train.checkpoints import saved_steps
from rrl.train.critic import CriticConfig
from rrl.train.guard import GuardConfig
from rrl.train.metrics import read_metrics
from rrl.train.objective import ObjectiveConfig
from rrl.train.rl import Task, train
from rrl.train.rl_config import RLConfig
from rrl.train.rollouts import permute_rewards, refuse_long_prompts, run_questions

STEPS = 4


@pytest.fixture(scope="module")
def parts():
    wiki = generate("train", 0, 100)
    questions = [item.question for item in wiki.questions("one_hop", 12, 0)]
    tokenizer = train_tokenizer([p.text for p in wiki.passages] + [q.text for q in questions], 400)
    retriever = make_retriever(wiki.passages, "bm25")
    recipe = RSearch(instruction="", environment=Stream(max_searches=1, turn_tokens=8, observation_tokens=30))
    sizes = EngineConfig(rows=8, context=128, feeds=4, feed_tokens=32)
    return questions, Engine(fresh(), tokenizer, sizes, retriever=retriever), recipe


def fresh() -> Decoder:
    config = DecoderConfig.from_hf(
        {
            "model_type": "qwen2",
            "vocab_size": 416,
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "intermediate_size": 32,
            "rope_theta": 10000.0,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "max_position_embeddings": 256,
        }
    )
    return Decoder(config, rngs=nnx.Rngs(0))


def run(
    parts,
    workdir,
    config,
    die_at: int | None = None,
    decoder=None,
    value_model=None,
    poor_from: int = 10**9,
    poisoned: int = 0,
):
    """`die_at`, `poor_from` and `poisoned` count batches that were scored, those of evaluations too."""
    questions, engine, recipe = parts
    decoder = decoder or fresh()
    calls = 0

    class Scored(RSearch):
        """Random policies earn nothing; pay by token ids, so that there is something to learn."""

        def score(self, trajectories, scoring):
            nonlocal calls
            calls += 1
            if die_at is not None and calls > die_at:
                raise ConnectionError("the machine went away")
            super().score(trajectories, scoring)
            for t in trajectories:
                own = t.tokens[t.roles == POLICY]
                t.rewards["total"] = float(own.sum() % 7) if calls < poor_from else 0.0

        def advantages(self, trajectories):
            found = super().advantages(trajectories)
            return found * np.nan if calls == poisoned else found

    recipe = Scored(**{f.name: getattr(recipe, f.name) for f in dataclasses.fields(recipe)})
    task = Task(questions[:8], questions[8:])
    outcome = train(config, recipe, task, engine, decoder, workdir, value_model=value_model)
    return outcome, nnx.state(decoder)


CONFIG = RLConfig(
    steps=STEPS,
    optim=OptimConfig(lr=1e-2, total_steps=STEPS),
    objective=ObjectiveConfig(kl_coef=0.01, lengths=(64, 128), microbatch_tokens=512),
    questions=4,
    samples=3,
    eval_every=2,
    checkpoint_every=2,
)


@pytest.fixture(scope="module")
def whole(parts, tmp_path_factory):
    """A run that nothing disturbed: its workdir, outcome and parameters."""
    workdir = tmp_path_factory.mktemp("whole")
    return workdir, *run(parts, workdir, CONFIG)


def test_a_run_that_died_continues_to_the_same_numbers(parts, whole, tmp_path):
    workdir, outcome, params = whole
    with pytest.raises(ConnectionError):
        run(parts, tmp_path, CONFIG, die_at=5)  # evaluation, 2 steps, evaluation, 1 step
    again, other = run(parts, tmp_path, CONFIG)
    jax.tree.map(np.testing.assert_array_equal, params, other)
    assert again.step == STEPS
    assert outcome.before["eval/f1"] == again.before["eval/f1"]

    assert lines(workdir) == lines(tmp_path)
    assert steps_of(workdir) == EVERY_LINE


def test_the_mean_of_the_last_parameters_is_what_a_run_learned(parts, whole, tmp_path):
    averaged = dataclasses.replace(CONFIG, average_last=0.5, checkpoint_every=3)
    with pytest.raises(ConnectionError):  # in step 4; the checkpoint of step 3 holds half of the mean
        run(parts, tmp_path / "mean", averaged, die_at=5)
    outcome, mean = run(parts, tmp_path / "mean", averaged)
    _, third = run(parts, tmp_path / "third", dataclasses.replace(CONFIG, steps=3, eval_every=0))
    jax.tree.map(lambda m, a, b: np.testing.assert_allclose(m, (a + b) / 2, rtol=1e-6), mean, third, whole[2])

    sampled = [line["reward/total"] for line in lines(tmp_path / "mean") if "reward/total" in line]
    assert sampled == [line["reward/total"] for line in lines(whole[0]) if "reward/total" in line]
    assert outcome.after["eval/f1"] == lines(tmp_path / "mean")[-1]["eval/f1"]


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


def test_a_critic_without_a_value_model_is_refused(parts, tmp_path):
    config = dataclasses.replace(CONFIG, critic=CriticConfig(OptimConfig()))
    with pytest.raises(UserError, match=r"train\.critic and a value model"):
        run(parts, tmp_path, config)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [0, 2])
def test_a_run_on_a_mesh_gives_the_numbers_of_one_device(parts, tmp_path, lora):
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


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_a_share_to_average_that_is_none_is_refused(share):
    with pytest.raises(UserError, match=rf"train.average_last={share} must lie in 0..1"):
        dataclasses.replace(CONFIG, average_last=share)


EVERY_LINE = ["eval 0", "train 1", "train 2", "eval 2", "train 3", "train 4", "eval 4"]


def lines(workdir):
    """Every line of the metrics without its times, speeds and memory."""
    drop = ("time/", "rollout/", "memory/", "minutes")
    found = read_metrics(workdir / "metrics.jsonl")
    return [{k: v for k, v in line.items() if not k.startswith(drop)} for line in found]


def steps_of(workdir):
    return [f"{'eval' if 'eval/em' in line else 'train'} {line['step']}" for line in lines(workdir)]


def test_a_run_that_died_before_its_first_checkpoint_keeps_its_evaluation(parts, tmp_path):
    with pytest.raises(ConnectionError):
        run(parts, tmp_path, CONFIG, die_at=2)
    outcome, _ = run(parts, tmp_path, CONFIG)
    assert steps_of(tmp_path) == EVERY_LINE
    assert outcome.before["eval/em"] == lines(tmp_path)[0]["eval/em"]


@pytest.mark.parametrize("after", [2])
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


def test_a_finished_run_only_reports_again(parts, whole):
    workdir, first, params = whole
    written = (workdir / "metrics.jsonl").read_text()
    again, restored = run(parts, workdir, CONFIG, die_at=0)
    jax.tree.map(np.testing.assert_array_equal, params, restored)
    assert (workdir / "metrics.jsonl").read_text() == written
    assert (
        again.before["eval/em"] == first.before["eval/em"]
        and again.after["eval/f1"] == first.after["eval/f1"]
    )
    assert again.seconds == first.seconds and not again.sampled


def test_parameters_move_and_are_held_against_the_frozen_start(whole):
    workdir, outcome, params = whole
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), params, nnx.state(fresh()))
    assert max(jax.tree.leaves(moved)) > 1e-3
    lines = [line for line in read_metrics(workdir / "metrics.jsonl") if "train/kl" in line]
    assert lines[0]["train/kl"] == pytest.approx(0, abs=1e-6)
    assert lines[-1]["train/kl"] > 0
    assert lines[0]["train/logp_gap"] < 1e-5
    assert all(line["memory/host"] > 0.01 for line in lines)
    assert all(0 < line["rollout/busy"] <= 1 for line in lines)
    tokens = [line["rollout/tokens_per_second"] * line["time/rollout"] for line in lines]
    assert tokens == pytest.approx([12 * line["tokens/policy"] for line in lines])
    assert set(outcome.after) >= {"eval/em", "eval/f1", "eval/searches"}


def test_the_start_is_what_is_evaluated_first(parts, tmp_path, monkeypatch):
    """Although the first update has been done by then."""
    evaluated, evaluate = [], rl.evaluate

    def recorded(engine, params, *rest, **options):
        evaluated.append(jax.device_get(params))
        return evaluate(engine, params, *rest, **options)

    monkeypatch.setattr(rl, "evaluate", recorded)
    run(parts, tmp_path, CONFIG)
    start = jax.tree.leaves(nnx.state(fresh()))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(evaluated[0]), start)
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(evaluated[1]), start, strict=True))


def test_zero_steps_only_evaluate(parts, tmp_path):
    config = dataclasses.replace(CONFIG, steps=0, optim=OptimConfig(total_steps=1))
    outcome, params = run(parts, tmp_path, config)
    jax.tree.map(np.testing.assert_array_equal, params, nnx.state(fresh()))
    assert outcome.before == outcome.after


def test_another_config_is_refused_by_the_name_of_its_field(parts, whole):
    with pytest.raises(UserError, match="samples"):
        run(parts, whole[0], dataclasses.replace(CONFIG, samples=5))


def test_an_epoch_asks_each_question_once():
    asked = np.concatenate([question_order(10, 5, 3, step) for step in range(4)])
    assert sorted(asked[:10]) == sorted(asked[10:]) == list(range(10))
    assert not np.array_equal(asked[:10], asked[10:])
    assert np.array_equal(question_order(10, 5, 3, 1), asked[5:10])


def test_dynamic_sampling_asks_again_and_ends_where_nothing_tells(parts, tmp_path):
    objective = dataclasses.replace(CONFIG.objective, drop_spread=100.0)
    outcome, params = run(
        parts, tmp_path, dataclasses.replace(CONFIG, steps=1, objective=objective, rounds=3)
    )
    assert len(outcome.sampled) == len(outcome.left_out) == 36 and outcome.left_out.all()
    (line,) = (line for line in lines(tmp_path) if "train/groups" in line)
    assert (line["train/groups"], line["train/left_out"]) == (12, 1)  # three rounds of four questions
    jax.tree.map(np.testing.assert_array_equal, params, nnx.state(fresh()))


def test_advantages_over_the_batch_are_over_what_is_learned_from(parts, tmp_path):
    questions, engine, recipe = parts
    over_the_batch = dataclasses.replace(recipe, advantage="reinforce_plus_plus")
    objective = dataclasses.replace(CONFIG.objective, drop_spread=3.0)
    config = dataclasses.replace(CONFIG, steps=1, eval_every=0, objective=objective)
    outcome, _ = run((questions, engine, over_the_batch), tmp_path, config)
    assert outcome.left_out.any() and not outcome.left_out.all()
    (line,) = (line for line in lines(tmp_path) if "train/advantage_std" in line)
    assert line["train/advantage_std"] == pytest.approx(1, abs=1e-5)


def test_a_run_that_collapsed_ends_at_its_last_good_checkpoint(parts, tmp_path):
    guarded = dataclasses.replace(CONFIG, guard=GuardConfig("stop", steps=2), checkpoint_every=1)
    outcome, params = run(parts, tmp_path / "poor", guarded, poor_from=5)  # steps 3 and 4
    assert (outcome.stopped, outcome.step) == ("collapse", 2)
    assert outcome.reason == "the reward is at most 0 in each step from 3 to 4"
    _, second = run(parts, tmp_path / "two", dataclasses.replace(CONFIG, steps=2))
    jax.tree.map(np.testing.assert_array_equal, params, second)
    assert (
        steps_of(tmp_path / "poor") == EVERY_LINE[:-1]
    )  # what happened is still there, step 2 evaluated once
    assert outcome.after["eval/f1"] == lines(tmp_path / "poor")[3]["eval/f1"]
    warned = dataclasses.replace(guarded, guard=GuardConfig("warn", steps=1))
    outcome, _ = run(parts, tmp_path / "warned", warned, poor_from=5)
    assert (outcome.stopped, outcome.reason) == ("done", "the reward is at most 0 in each step from 3 to 3")


def test_a_run_that_collapsed_before_its_first_checkpoint_ends_at_its_start(parts, tmp_path):
    guarded = dataclasses.replace(CONFIG, guard=GuardConfig("stop", steps=2), eval_every=0)
    outcome, params = run(parts, tmp_path, guarded, poor_from=1)
    assert (outcome.stopped, outcome.step) == ("collapse", 0)
    jax.tree.map(np.testing.assert_array_equal, params, nnx.state(fresh()))
    assert outcome.after == outcome.before and steps_of(tmp_path) == ["eval 0", "train 1", "train 2"]


def test_a_question_too_long_for_the_context_is_named_before_a_run_comes_to_it(parts):
    questions, engine, recipe = parts
    refuse_long_prompts(engine, recipe, questions)
    spaces = dataclasses.replace(questions[0], id="many bytes, few tokens", text=questions[0].text * 2)
    refuse_long_prompts(engine, recipe, [spaces])
    long = dataclasses.replace(questions[0], id="endless", text=questions[0].text * 40)
    with pytest.raises(UserError, match=r"question 'endless' has \d+ tokens, the context holds 128"):
        refuse_long_prompts(engine, recipe, [*questions, long])


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


def test_a_critic_that_warms_up_for_longer_than_the_run_is_refused():
    critic = CriticConfig(OptimConfig(total_steps=STEPS), warmup_steps=STEPS + 1)
    with pytest.raises(UserError, match=r"train\.steps=4 must be at least critic\.warmup_steps=5"):
        dataclasses.replace(CONFIG, critic=critic)


def test_a_batch_without_a_finite_gradient_is_left_out_and_kept_for_study(parts, tmp_path, capsys):
    falling = dataclasses.replace(CONFIG, optim=dataclasses.replace(CONFIG.optim, schedule="linear"))
    _, params = run(parts, tmp_path, falling, poisoned=3)  # step 2
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
    assert "step 2: a gradient was not finite" in capsys.readouterr().err
    (file,) = (tmp_path / "not_finite").iterdir()
    kept = np.load(file)
    assert file.name == "step_000002.npz" and np.isnan(kept["advantages"]).all()
    about = json.loads(str(kept["about"]))
    assert len(about) == len(kept["lengths"]) == 12 and kept["lengths"].sum() == len(kept["tokens"])
    assert {one["id"] for one in about} <= {question.id for question in parts[0]}
    assert [line["train/skipped"] for line in lines(tmp_path) if "train/skipped" in line] == [0, 1, 1, 1]
    rates = [line["train/lr"] for line in lines(tmp_path) if "train/lr" in line]
    np.testing.assert_allclose(rates, [0.01, 0.01, 0.0075, 0.005])  # of the updates that were taken


def test_a_recipe_knows_where_the_run_stands_and_what_it_leaves_out_is_not_learned_from(
    parts, tmp_path, capsys
):
    questions, engine, recipe = parts
    seen = []

    class Seen(RSearch):
        def score(self, trajectories, scoring):
            seen.append((scoring.step, scoring.steps, scoring.reader("x")))
            super().score(trajectories, scoring)
            for place, t in enumerate(trajectories):
                t.rewards["total"] = float(place % 2)  # something to learn

        def left_out(self, trajectories):
            return np.array([t.group > 0 or seen[-1][0] == 0 for t in trajectories])

    recipe = Seen(instruction="", use_evidence=False, environment=recipe.environment)
    config = dataclasses.replace(CONFIG, steps=2, eval_every=0)
    scoring = Scoring(reader=lambda prompts: prompts)
    train(config, recipe, Task(questions[:8], questions[8:]), engine, fresh(), tmp_path, scoring=scoring)
    assert seen == [
        (0, 2, "x"),
        (0, 2, "x"),
        (1, 2, "x"),
        (2, 2, "x"),
    ]  # a step, the start's evaluation, a step, the end's
    shares = [line["train/left_out"] for line in lines(tmp_path) if "train/left_out" in line]
    assert shares == [1.0, 0.75]
    assert "step 1: nothing to learn from" in capsys.readouterr().err


def test_permuted_rewards_are_dealt_out_with_all_their_components(parts):
    questions, engine, recipe = parts
    trajectories = run_questions(
        engine, nnx.state(fresh()), recipe, questions[:3], key=jax.random.key(0), samples=4
    )
    for place, t in enumerate(trajectories):
        t.rewards = {"answer": float(place), "total": 2.0 * place}
    permute_rewards(trajectories, np.random.default_rng(0))
    answers = [t.rewards["answer"] for t in trajectories]
    assert sorted(answers) == list(range(12)) and answers != list(range(12))
    assert [t.rewards["total"] for t in trajectories] == [2 * answer for answer in answers]
    assert len({id(t.rewards) for t in trajectories}) == 12


def test_permuted_rewards_keep_their_multiset(parts):
    questions, engine, recipe = parts
    trajectories = run_questions(
        engine, nnx.state(fresh()), recipe, questions[:3], key=jax.random.key(0), samples=4
    )
    for place, t in enumerate(trajectories):
        t.rewards["total"] = float(place)
    permute_rewards(trajectories, np.random.default_rng(0))
    totals = [t.rewards["total"] for t in trajectories]
    assert sorted(totals) == list(range(12))
    assert totals != list(range(12))


def test_permuted_rewards_of_turns_keep_their_multiset_too(parts):
    questions, engine, recipe = parts
    trajectories = run_questions(
        engine, nnx.state(fresh()), recipe, questions[:3], key=jax.random.key(0), samples=4
    )
    for place, t in enumerate(trajectories):
        t.turn_rewards = {0: float(place)}
    permute_rewards(trajectories, np.random.default_rng(0))
    dealt = [t.turn_rewards[0] for t in trajectories]
    assert sorted(dealt) == list(range(12)) and dealt != list(range(12))
    assert all(t.token_rewards.sum() == t.turn_rewards[0] for t in trajectories)
