"""Reward functions of users: hand-computed totals, and errors that name the function and the question."""

import dataclasses

import pytest

from rrl.errors import UserError
from rrl.rewards.functions import RewardConfig, RewardFunctions, load_function
from tests.recipes.sample_episodes import trajectory

SHORT = "tests.recipes.user_recipe:short_answer"


def episode(answer="Marta", turn_rewards=None):
    one = trajectory()
    one.answer, one.rewards, one.turn_rewards = answer, {"answer": 0.5, "total": 0.6}, turn_rewards
    return one


def test_a_function_becomes_a_component_and_its_weighted_value_is_added_to_the_total():
    one, other = episode("Marta"), episode("It was Marta Velikov")
    RewardConfig((SHORT,), (0.25,)).load().add_to([one, other])
    assert one.rewards == {"answer": 0.5, "short_answer": 1.0, "total": pytest.approx(0.85)}
    assert other.rewards == {"answer": 0.5, "short_answer": 0.0, "total": pytest.approx(0.6)}


def test_without_weights_each_function_counts_once_and_the_recipe_can_be_left_out():
    functions = {"one": lambda t, question: 1, "length": lambda t, question: -len(t.answer)}
    one = episode("Marta")
    RewardFunctions(functions, {"one": 1.0, "length": 0.1}, recipe_weight=0.0).add_to([one])
    assert one.rewards["total"] == pytest.approx(1 - 0.5)
    assert RewardConfig((SHORT,)).load().weights == {"short_answer": 1.0}


def test_the_last_turn_is_paid_what_the_functions_give():
    one = episode(turn_rewards={0: 0.2, 1: 0.4})
    dataclasses.replace(RewardConfig((SHORT,), (0.5,)).load(), recipe_weight=2.0).add_to([one])
    assert one.turn_rewards == {0: pytest.approx(0.4), 1: pytest.approx(0.8 + 0.5)}
    assert one.rewards["total"] == pytest.approx(sum(one.turn_rewards.values()))


def test_without_functions_nothing_changes():
    one = episode()
    RewardConfig().load().add_to([one])
    assert one.rewards == {"answer": 0.5, "total": 0.6}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"functions": (SHORT,), "weights": (1.0, 2.0)},
            r"weights=\(1.0, 2.0\) must have one number per function.* 1",
        ),
        ({"functions": (SHORT,), "weights": (float("nan"),)}, "all must be finite"),
        ({"recipe_weight": 0.5}, r"recipe_weight=0\.5 has no effect without functions"),
        ({"recipe_weight": -1.0}, "recipe_weight=-1.0 must be at least 0"),
    ],
)
def test_wrong_fields_are_named(fields, words):
    with pytest.raises(UserError, match=words):
        RewardConfig(**fields)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("no_such_module:f", r"'no_such_module:f' cannot be imported .*MODULE:FUNCTION"),
        ("math:absent", "'math:absent' cannot be imported"),
        ("short_answer", "cannot be imported"),
        ("tests.recipes.sample_episodes:as_segments", r"must be a function of \(trajectory, question\)"),
        ("tests.recipes.sample_episodes:QUESTION", r"must be a function of \(trajectory, question\)"),
    ],
)
def test_a_function_that_cannot_be_used_is_named(path, words):
    with pytest.raises(UserError, match=words):
        load_function(path)


def test_two_functions_of_one_name_are_refused():
    with pytest.raises(UserError, match=r"the name 'short_answer' of .* is taken"):
        RewardConfig((SHORT, SHORT)).load()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (float("nan"), r"own returned nan for question 'q'; it must return a finite number"),
        (None, "own returned None for question 'q'"),
        ("1", "own returned '1' for question 'q'"),
    ],
)
def test_anything_but_a_finite_number_is_refused(value, words):
    with pytest.raises(UserError, match=words):
        RewardFunctions({"own": lambda t, question: value}, {"own": 1.0}).add_to([episode()])


def test_a_function_that_fails_or_hides_a_component_is_named():
    def own(trajectory, question):
        raise KeyError("no such metric")

    with pytest.raises(UserError, match=r"own failed on question 'q': KeyError\('no such metric'\)"):
        RewardFunctions({"own": own}, {"own": 1.0}).add_to([episode()])
    with pytest.raises(UserError, match="'answer' is a reward component of the recipe already"):
        RewardFunctions({"answer": own}, {"answer": 1.0}).add_to([episode()])
