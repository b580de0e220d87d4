"""The contract of all recipes: whatever an episode looks like, it is scored without error and within the declared range."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rrl.data.passages import Passage
from rrl.data.questions import Question
from rrl.data.trajectory import ENVIRONMENT, NOT_FINITE, POLICY, PROMPT, Search, Trajectory
from rrl.recipes.base import Recipe, ScoringContext
from rrl.recipes.card import make_card
from rrl.recipes.catalogue import RECIPES, make_recipe
from rrl.recipes.episodes import prompt_ids
from rrl.recipes.r2ag_forest import RetrievalTree
from rrl.recipes.r3rag_steps import ANALYSIS, QUERY
from rrl.rewards.judge import ModelJudge
from rrl.rl.dynamic_sampling import informative_groups
from rrl.rollout.protocol import Episode, Restart
from rrl.text.chat import Prompt
from rrl.text.spans import markers
from tests.recipes.sample_episodes import trajectory as episode

OWN = "tests.recipes.user_recipe:Brief"
NAMES = [*RECIPES, OWN]
GOLD = Question(
    "q", "Who directed Silver Harbour?", ("Marta Velikov",), gold=("Silver Harbour", "Marta Velikov")
)
QUESTIONS = (GOLD, dataclasses.replace(GOLD, gold=()), dataclasses.replace(GOLD, answers=("yes",)))
ENDS = (
    "answer",
    "turn_limit",
    "context_limit",
    "length",
    "no_action",
    "malformed",
    "search_limit",
    NOT_FINITE,
)
WORDS = (
    *(
        "Marta Velikov",
        "yes",
        "unknown",
        "\\boxed{Marta Velikov}",
        "\\boxed{",
        "the film",
        "",
        "\n",
        "stop retrieval",
    ),
    *("none", "Step 1:", "The problem analysis:", "The retrieval query:", "The final answer:", "é 東 \u0000"),
)


def pieces(recipe: Recipe) -> st.SearchStrategy[str]:
    """Return a strategy for pieces of text: words, and the recipe's tags whole, unclosed and reversed."""
    tags = [*recipe.tags, "think", "original_evidence", "observation", "information"]
    marks = [marker for tag in tags for marker in markers(tag)]
    spans = [
        f"{opening} {word} {closing}" for tag in tags for opening, closing in [markers(tag)] for word in WORDS
    ]
    return st.sampled_from([*WORDS, *marks, *spans])


@st.composite
def trajectories(draw: st.DrawFn, recipe: Recipe, group: int = 0) -> Trajectory:
    """Draw an episode of one to four turns, with any text, searches, end and question."""
    question = draw(st.sampled_from(QUESTIONS))
    if draw(st.booleans()):
        question = RetrievalTree.of(question)
    text = st.lists(pieces(recipe), max_size=6).map(" ".join)
    turns = draw(st.integers(0, 4))  # 0: the prompt did not fit
    segments, searches = [(PROMPT, "Who directed Silver Harbour?")], []
    for turn in range(turns):
        segments.append((POLICY, draw(text)))
        if turn < turns - 1:
            segments.append((ENVIRONMENT, draw(text)))
            titles = draw(st.lists(st.sampled_from(("Silver Harbour", "Marta Velikov", "Noise")), max_size=2))
            found = [Passage(title, "text", title) for title in titles]
            searches.append(Search.of(turn, "it", draw(st.sampled_from((found, None)))))
    count = max(2 * turns, 1)
    roles = np.tile([PROMPT, POLICY], turns) if turns else np.array([PROMPT])
    return Trajectory(
        question,
        request=0,
        group=group,
        tokens=np.zeros(count, np.int32),
        roles=roles,
        logps=np.zeros(count, np.float32),
        sampled_logps=np.zeros(count, np.float32),
        turns=np.repeat(np.arange(turns), 2) if turns else np.zeros(1, np.int32),
        segments=segments,
        searches=searches,
        ended=draw(st.sampled_from(ENDS)) if turns else "context_limit",
    )


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_episodes_are_scored_in_range_and_give_finite_advantages(name, data):
    recipe = make_recipe(name)
    group = st.lists(trajectories(recipe), min_size=1, max_size=4)
    found = data.draw(group)
    for index, trajectory in enumerate(found):
        trajectory.group = index // 2
    reply = data.draw(st.sampled_from(("1", "0.5", "Yes", "Answer: 3", "nonsense", "")))
    recipe.score(
        found,
        ScoringContext(
            lambda prompts: [reply] * len(prompts), ModelJudge(lambda prompts: [reply] * len(prompts))
        ),
    )
    low, high = recipe.reward_range
    names = {tuple(trajectory.rewards) for trajectory in found}
    assert len(names) == 1 and "total" in names.pop()
    for trajectory in found:
        assert low - 1e-9 <= trajectory.rewards["total"] <= high + 1e-9
        # Retrieval metrics of a question without gold passages are NaN.
        metrics = trajectory.metrics.values() if trajectory.question.gold else ()
        assert all(math.isfinite(value) for value in (*trajectory.rewards.values(), *metrics))
        assert isinstance(trajectory.answer, str) and isinstance(trajectory.evidence, str)
        for metric in ("em", "f1", "cem", "full_recall", "recall"):
            assert not trajectory.metrics.get(metric, 0) < 0 and not trajectory.metrics.get(metric, 0) > 1
        if trajectory.turn_rewards is not None:
            assert sum(trajectory.turn_rewards.values()) == pytest.approx(trajectory.rewards["total"])
        if not trajectory.policy_tokens:  # no token earns the reward, and nothing is learned from the episode
            continue
        assert trajectory.token_rewards.sum() == pytest.approx(trajectory.rewards["total"], abs=1e-5)
    excluded, advantages = recipe.excluded(found), recipe.advantages(found)
    assert excluded.shape == advantages.shape == (len(found),)
    assert excluded.dtype == bool and np.isfinite(advantages).all()


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_declares_what_the_run_needs(name):
    recipe = make_recipe(name)
    low, high = recipe.reward_range
    assert low <= 0 < high and 0 <= recipe.uninformative_spread < high - low
    assert low <= recipe.collapsed_reward <= 0  # an episode that fails
    assert isinstance(recipe.prompt(GOLD), str | Prompt)
    assert make_card(recipe, 1024, 3).make() == recipe
    first = recipe.curriculum([GOLD] * 3, 2, 0)
    assert 1 <= len(first.select(0, 0, 2)) <= 2
    recipe.check_samples(4)
    rewards = np.array([0.0, recipe.uninformative_spread, 0.0, high if math.isfinite(high) else 1.0])
    assert informative_groups(rewards, np.array([0, 0, 1, 1]), recipe.uninformative_spread) == [1]


@pytest.mark.parametrize("name", NAMES)
def test_every_context_shows_the_choices_of_a_question(name):
    class Characters:
        """An engine whose tokens are the characters of a prompt's text."""

        tokenizer = None
        config = SimpleNamespace(context=10_000)

    recipe, question = make_recipe(name), dataclasses.replace(GOLD, choices=("Ada Berg", "Marta Velikov"))
    shown = f"{GOLD.text}\n(A) Ada Berg\n(B) Marta Velikov\nAnswer with the letter of the right choice."
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rrl.recipes.episodes.chat_ids", lambda _, prompt: shown_text(prompt))
        patch.setattr("rrl.recipes.episodes.fitting_ids", lambda _, prompt, room: shown_text(prompt))
        assert shown_text(prompt_ids(Characters(), recipe, question)).count(shown) == 1
    film = Passage("0", "Silver Harbour", "A film.")
    for asked in (question, RetrievalTree.of(question)) if name == "r2ag" else (question,):
        later = Episode(asked, 0, [Search.of(0, "it", [film])], [f"{ANALYSIS} It. {QUERY} it"])
        reply = recipe.environment.observe(later, [film])
        if isinstance(reply, Restart):
            assert shown_text(reply.prompt).count(shown) == 1
        assert (name in ("r3rag", "r2ag") and asked is question) == isinstance(reply, Restart)


def shown_text(prompt: str | Prompt) -> str:
    """Return the text of a prompt that the model reads."""
    return prompt if isinstance(prompt, str) else f"{prompt.system}{prompt.user_message}{prompt.prefill}"


@pytest.mark.parametrize("name", RECIPES)
def test_the_declared_spread_follows_the_weights_of_the_rewards(name):
    weights = {
        "rsearch": {"answer_weight": 0.4, "evidence_weight": 0.4, "reader_weight": 2.0},
        "search_r1": {"structure_reward": 0.4, "answered_reward": 0.2},
        "research": {"format_reward": 0.2},
    }
    usual, changed = make_recipe(name), make_recipe(name, weights.get(name))
    assert changed.uninformative_spread == pytest.approx(2 * usual.uninformative_spread)


def test_the_declared_spreads_are_those_of_earlier_runs():
    # Runs from before `drop_spread="auto"` stored these numbers, and continue.
    for name, spread in (("rsearch", 1.4), ("search_r1", 0.3), ("research", 0.15)):
        assert make_recipe(name).uninformative_spread == spread
    assert make_recipe("rsearch", {"reader_weight": 0.3}).uninformative_spread == 0.7


@pytest.mark.parametrize(
    "fields", [{}, {"answer_weight": 0.5, "reader_weight": 0.3}, {"use_evidence": False}]
)
def test_a_perfect_episode_of_rsearch_earns_the_upper_end_of_its_range(fields):
    recipe = make_recipe("rsearch", fields)
    text = "<original_evidence> it </original_evidence> <answer> Marta Velikov </answer>"
    one = episode((POLICY, "<search> it </search>"), (POLICY, text), question=GOLD, searches=1)
    recipe.score([one], ScoringContext(reader=lambda prompts: ["Marta Velikov"] * len(prompts)))
    assert one.rewards["total"] == pytest.approx(recipe.reward_range[1])
