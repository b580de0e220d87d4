"""Sampling of a training step: dynamic sampling, temperatures, penalties, permuted rewards; and evaluation."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx

from rrl.data.passages import Passage
from rrl.data.questions import Question
from rrl.data.trajectory import Trajectory
from rrl.models.decoder import Decoder
from rrl.models.tokenizer import load_tokenizer
from rrl.recipes.base import ScoringContext
from rrl.recipes.catalogue import RECIPES, make_recipe
from rrl.recipes.episodes import Sampling, find_long_prompts, prompt_ids, run_questions
from rrl.recipes.r2ag import R2AG, R2AGEnvironment
from rrl.recipes.r2ag_forest import RetrievalTree
from rrl.recipes.rsearch import RSearch
from rrl.rl.objective import ObjectiveConfig
from rrl.rl.optim import OptimConfig
from rrl.rollout.config import EngineConfig
from rrl.rollout.engine import Engine, RolloutStats
from rrl.rollout.episodes import EpisodeState, Request
from rrl.setup.rl_config import RLConfig
from rrl.train import sample as rollouts
from rrl.train.evaluation import evaluate
from rrl.train.sample import informative_group_ids, sample_and_score
from tests.tiny import tiny_shape

OBJECTIVE = ObjectiveConfig(drop_spread=0.0)


class NumberedQuestions:
    """A curriculum whose round r asks questions 10 r, 10 r + 1, ..."""

    state = None

    def select(self, step, number, count):
        return [10 * number + i for i in range(count)]

    def update(self, trajectories):
        self.updated = trajectories


@pytest.fixture
def sample(monkeypatch):
    """`sample_and_score` with fake rollouts in which only odd questions have unequal rewards.

    Returns the step, the questions of the groups that its update uses, and the calls.
    """
    calls = []

    def run(engine, params, recipe, questions, sampling, **options):
        key = jax.random.key_data(sampling.key).tolist()
        asked = {"questions": list(questions), "key": key, "temperature": sampling.temperature}
        calls.append(asked | options)
        engine.stats = RolloutStats(seconds=1.0, policy_tokens=len(questions))
        return [
            SimpleNamespace(
                group=group,
                question=question,
                rewards={"total": float(sample * (question % 2))},
                turn_rewards=None,
            )
            for group, question in enumerate(questions)
            for sample in range(sampling.samples)
        ]

    monkeypatch.setattr(rollouts, "run_questions", run)

    def sampled(questions, rounds, recipe=None, step=3, **settings):
        settings = {"objective": OBJECTIVE, "samples": 2} | settings
        config = RLConfig(10, OptimConfig(), questions=questions, rounds=rounds, **settings)
        recipe = recipe or RSearch()
        calls.clear()
        found = sample_and_score(
            config, step, SimpleNamespace(), None, recipe, NumberedQuestions(), ScoringContext()
        )
        groups = informative_group_ids(config, found.trajectories, recipe)[:questions]
        used = [next(t.question for t in found.trajectories if t.group == group) for group in groups]
        return found, used, list(calls)

    return sampled


def test_a_single_round_uses_the_key_of_the_step(sample):
    found, used, calls = sample(4, 1, seed=7)
    key = jax.random.fold_in(jax.random.key(7), 3)
    assert [call["questions"] for call in calls] == [[0, 1, 2, 3]]
    assert calls[0]["key"] == jax.random.key_data(key).tolist()
    assert [t.group for t in found.trajectories] == [0, 0, 1, 1, 2, 2, 3, 3] and used == [1, 3]


def test_without_drop_spread_every_group_is_used(sample):
    _, used, _ = sample(4, 1, objective=ObjectiveConfig(drop_spread=None))
    assert used == [0, 1, 2, 3]


def test_the_control_selects_groups_by_the_permuted_rewards(sample, monkeypatch):
    seeds = []

    class Backwards:
        """Reverses the order: totals 00 01 00 01 of questions 0 to 3 become 10 00 10 00."""

        def __init__(self, seed):
            seeds.append(seed)

        def permutation(self, values):
            return np.array(values[::-1])

    monkeypatch.setattr(np.random, "default_rng", Backwards)
    _, used, _ = sample(2, 2, permute_rewards=True, seed=3, step=1)
    assert seeds == [(3, 1), (3, 1, 1)][: len(seeds)] and seeds
    assert used and set(used) <= {0, 2, 10, 12}


def test_the_overlong_penalty_is_applied_before_groups_are_selected(sample, monkeypatch):
    # Questions 0 and 2 have equal rewards, but the penalty for their long second samples makes them differ.
    plain = rollouts.run_questions

    def run(*given, **options):
        found = plain(*given, **options)
        for place, t in enumerate(found):
            t.policy_tokens = 95 if place % 2 else 80
            t.turn_rewards = {0: 0.5, 1: t.rewards["total"]}
        return found

    monkeypatch.setattr(rollouts, "run_questions", run)
    found, used, _ = sample(4, 1, overlong=(100, 20))
    assert used == [0, 1, 2, 3]
    assert [t.rewards["overlong"] for t in found.trajectories] == [0, -0.75] * 4  # DAPO, Eq. 13
    assert [t.rewards["total"] for t in found.trajectories] == [0, -0.75, 0, 0.25] * 2
    assert [t.turn_rewards for t in found.trajectories[2:4]] == [{0: 0.5, 1: 0}, {0: 0.5, 1: 0.25}]


def test_the_control_permutes_rewards_differently_in_each_step_and_round(sample, monkeypatch):
    draws, permute = [], rollouts.permute_rewards

    def permuted(trajectories, rng):
        draws.append(tuple(rng.permutation(100).tolist()))
        permute(trajectories, rng)

    monkeypatch.setattr(rollouts, "permute_rewards", permuted)
    excluded = SimpleNamespace(
        excluded=lambda some: np.ones(len(some), bool)
    )  # so that all rounds are sampled
    for step in (0, 1):
        sample(4, 2, excluded, step=step, permute_rewards=True)
    assert len(set(draws)) == len(draws) == 4
    sample(4, 2, permute_rewards=False)
    assert len(draws) == 4


def test_further_rounds_sample_the_missing_groups_with_new_keys_and_group_numbers(sample):
    found, used, calls = sample(4, 5)
    # Two of four groups had spread: two are missing, so four questions are asked.
    assert [call["questions"] for call in calls] == [[0, 1, 2, 3], [10, 11, 12, 13]]
    assert len({tuple(call["key"]) for call in calls}) == 2
    assert [t.group for t in found.trajectories[::2]] == list(range(8))
    assert used == [1, 3, 11, 13]
    assert dataclasses.asdict(found.stats) == dataclasses.asdict(RolloutStats(seconds=2.0, policy_tokens=8))


def test_groups_that_the_recipe_excludes_are_replaced_in_further_rounds(sample):
    recipe = SimpleNamespace(excluded=lambda some: np.array([t.question == 3 for t in some]))
    _, _, calls = sample(2, 4, recipe)
    assert [call["questions"] for call in calls] == [[0, 1], [10, 11]]
    _, used, _ = sample(4, 2, recipe)
    assert used == [1, 11, 13]


def test_sampling_ends_after_the_allowed_rounds_if_no_group_has_spread(sample):
    found, used, calls = sample(1, 3)  # questions 0, 10, 20
    assert len(calls) == 3 and not used and len(found.trajectories) == 6
    assert np.all([t.rewards["total"] == 0 for t in found.trajectories])


def test_each_sample_of_a_question_has_its_own_temperature():
    class Stub:
        tokenizer = load_tokenizer("assets/miniwiki-tokenizer")
        stats = RolloutStats()
        fits = staticmethod(lambda prompt: True)

        def run(self, params, requests, *_, **__):
            self.asked = [(r.group, r.seed, r.temperature) for r in requests]
            return []

    engine, questions = Stub(), [Question("a", "Who?", ("x",)), Question("b", "What?", ("x",))]
    temperatures = (0.1, 0.4, 0.7, 1.0)

    def ask(temperature):
        run_questions(engine, None, RSearch(), questions, Sampling(jax.random.key(0), 4, temperature))
        return engine.asked

    assert ask(temperatures) == [(i // 4, i, temperatures[i % 4]) for i in range(8)]
    assert ask(0.5) == [(i // 4, i, 0.5) for i in range(8)]


def test_an_evaluation_counts_failed_searches_and_episodes_with_non_finite_logits():
    none = np.zeros(0)

    class Stub:
        tokenizer = load_tokenizer("assets/miniwiki-tokenizer")
        fits = staticmethod(lambda prompt: True)

        def run(self, params, requests, *_, **__):
            self.stats = RolloutStats(searches_failed=3, not_finite=2)
            return [Trajectory(r.question, 0, 0, *(none,) * 5, [], [], "no_action") for r in requests]

    questions = [Question("a", "Who?", ("x",), "bridge"), Question("b", "What?", ("x",), "bridge")]
    found, _ = evaluate(Stub(), None, RSearch(), questions, scoring=ScoringContext())
    assert found["eval/searches_failed"] == 3 and found["eval/not_finite"] == 2
    assert found["eval/em"] == found["eval/em/bridge"] == 0


def test_documents_that_leave_no_room_for_a_turn_are_dropped_from_the_prompt():
    class Stub:
        tokenizer, stats = load_tokenizer("assets/miniwiki-tokenizer"), RolloutStats()
        config = EngineConfig(context=100)
        fits = staticmethod(lambda prompt: True)

        def run(self, params, requests, *_, **__):
            self.prompts = [request.prompt for request in requests]
            return []

    engine, recipe = Stub(), R2AG(environment=R2AGEnvironment(opening="bare", turn_tokens=40))
    documents = [Passage(name, name, "far too long " * 20) for name in ("A", "B")]
    short, long = (RetrievalTree.of(Question("q", "Who?", ("x",)), 0, some) for some in ([], documents))
    run_questions(engine, None, recipe, [short, long], Sampling(jax.random.key(0)))
    assert (
        len(engine.prompts[0]) < 20 and len(engine.prompts[1]) == 59
    )  # context 100, minus turn and last token
    texts = [engine.tokenizer.decode(ids) for ids in engine.prompts]
    assert all("Who?" in text for text in texts) and "(Title: A)" not in texts[1]


def test_long_documents_are_truncated_and_a_long_question_ends_as_context_limit():
    class Stub:
        tokenizer = load_tokenizer("assets/miniwiki-tokenizer")
        config = EngineConfig(context=100)
        fits = staticmethod(lambda ids: len(ids) + 2 <= 100)

    engine, recipe = Stub(), R2AG(environment=R2AGEnvironment(opening="bare", turn_tokens=40))
    documents = [Passage(name, name, "far too long " * 60) for name in ("A", "B")]
    found = [
        RetrievalTree.of(Question("documents", "Who?", ("x",)), 0, documents),
        RetrievalTree.of(Question("question", "Who is it ? " * 60, ("x",)), 0, documents),
    ]
    lines = []
    assert find_long_prompts(engine, recipe, found, "skip", lines.append) == {1}
    assert len(lines) == 1 and "'question'" in lines[0]
    truncated, whole = (prompt_ids(engine, recipe, question) for question in found)
    assert len(truncated) <= 59 and engine.tokenizer.decode(whole).count("Who") == 60


def test_a_step_samples_at_its_temperatures(sample):
    _, _, (call,) = sample(4, 1, temperature=0.5)
    assert call["temperature"] == 0.5
    _, _, (call,) = sample(4, 1, temperatures=(0.1, 0.4))
    assert call["temperature"] == (0.1, 0.4)


@pytest.fixture(scope="module")
def small():
    tokenizer = load_tokenizer("assets/miniwiki-tokenizer")
    decoder = Decoder(tiny_shape(len(tokenizer), 128, eos_token_id=tokenizer.eos_token_id), rngs=nnx.Rngs(0))
    config = EngineConfig(rows=4, context=96, wake_threshold=2, prefill_tokens=16)
    return Engine(decoder, tokenizer, config), nnx.state(decoder)


def test_a_question_too_long_for_the_context_ends_at_once_and_does_not_affect_others(small):
    engine, params = small
    recipe = RSearch(instruction="")
    recipe = dataclasses.replace(recipe, environment=dataclasses.replace(recipe.environment, turn_tokens=8))
    questions = [Question(str(at), f"Who directed film {at}?", ("A",)) for at in range(3)]
    long = Question("long", "Who directed all of these films? " * 60, ("A",))
    ended = []
    asked = [questions[0], long, *questions[1:]]
    _, found = evaluate(
        engine,
        params,
        recipe,
        asked,
        on_finish=lambda place, trajectory: ended.append((place, trajectory.ended)),
    )
    assert [t.question.id for t in found] == ["0", "long", "1", "2"]
    assert found[1].ended == "context_limit" and found[1].policy_tokens == 0 and found[1].metrics["em"] == 0
    assert len(found[1].tokens) == 96 and found[1].cuts == ((0, "room"),)
    assert sorted(place for place, _ in ended) == [0, 1, 2, 3] and (1, "context_limit") in ended
    _, alone = evaluate(engine, params, recipe, [questions[0], questions[0], *questions[1:]])
    for place in (0, 2, 3):
        np.testing.assert_array_equal(found[place].tokens, alone[place].tokens)
    metrics, found = evaluate(engine, params, recipe, [long])
    assert metrics["eval/em"] == 0 and found[0].ended == "context_limit"


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_scores_an_episode_that_ended_before_a_turn(name):
    question = Question("q", "Who?", ("A",), gold=("T",))
    for asked in (question, RetrievalTree.of(question)):
        state = EpisodeState(Request(asked, np.arange(5, dtype=np.int32), 0), "prompt")
        state.hit_limit("room")
        trajectory = state.trajectory("context_limit")
        make_recipe(name).score([trajectory], ScoringContext(reader=lambda prompts: [""] * len(prompts)))
        assert not trajectory.token_rewards.any() and trajectory.metrics.get("em", 0) == 0
