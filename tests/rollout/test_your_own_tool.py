"""The code of docs/your_own_tool.md runs as it stands on the page."""

import importlib
import pathlib
import re
import sys

import pytest

from rrl.data.trajectory import ENVIRONMENT, POLICY
from rrl.recipes.catalogue import make_recipe
from rrl.rollout.protocol import Append, Episode, Finish, SearchFor
from tests.recipes.sample_episodes import QUESTION, scored

PAGE = pathlib.Path(__file__).parents[2].joinpath("docs/your_own_tool.md").read_text(encoding="utf-8")
(CODE,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    (tmp_path / "calculator.py").write_text(CODE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "calculator", raising=False)
    importlib.invalidate_caches()
    return make_recipe("calculator:Calculator")


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("1912 - 1889", "23"),
        ("2 * (3 + 4) / 7", "2.0"),
        ("1 / 0", "not an expression (ZeroDivisionError)"),
        ("open", "not an expression (AttributeError)"),
        ("2 **", "not an expression (SyntaxError)"),
        ("", "not an expression (SyntaxError)"),
    ],
)
def test_the_policy_reads_the_result_of_its_expression(recipe, expression, result):
    stop = "</calculate>"
    assert stop in recipe.environment.stops
    message = recipe.environment.step(Episode(QUESTION), f"<calculate> {expression} {stop}", stop)
    assert message == Append("\n<result> ", result, " </result>\n")


def test_searches_answers_and_limits_are_those_of_rsearch(recipe):
    environment = recipe.environment
    asked = environment.step(Episode(QUESTION), "<search> it </search>", "</search>")
    assert asked == SearchFor("it")
    last = Episode(QUESTION, turn=environment.max_searches)
    assert environment.step(last, "<calculate> 1 </calculate>", "</calculate>") == Finish("turn_limit")
    text = "<calculate> 1 + 1 </calculate>", "<answer> Marta Velikov </answer>"
    one = scored(recipe, (POLICY, text[0]), (ENVIRONMENT, "<result> 2 </result>"), (POLICY, text[1]))
    assert one.rewards["answer"] == 1 and "<calculate>" in recipe.prompt(QUESTION)
