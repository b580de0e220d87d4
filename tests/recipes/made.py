"""Finished episodes for the tests of recipes, from what was said in them."""

import numpy as np

from rrl.data.questions import Question
from rrl.data.trajectory import ENVIRONMENT, POLICY, Search, Trajectory
from rrl.recipes.base import ScoringContext

QUESTION = Question("q", "Who directed Silver Harbour?", ("Marta Velikov",))


def trajectory(*segments, question=QUESTION, searches=0, group=0):
    """An episode of these (role, text) segments."""
    arrays = [np.zeros(0)] * 5
    return Trajectory(question, 0, group, *arrays, list(segments), [Search(0, "q")] * searches, "answer")


def scored(recipe, *segments, **more):
    """The same, scored."""
    one = trajectory(*segments, **more)
    recipe.score([one], ScoringContext())
    return one


def turns(environment, *texts):
    """The segments of an episode in which the environment answers every text of the policy but the last."""
    told = environment.observe(None, None)
    given = (ENVIRONMENT, f"{told.prefix}{told.body}{told.suffix}")
    segments = [segment for text in texts for segment in ((POLICY, text), given)]
    return segments[:-1]


def spoken(segments):
    """(role, text) of an expert's demonstration."""
    return [
        (POLICY, part) if isinstance(part, str) else (ENVIRONMENT, f"{part.prefix}{part.body}{part.suffix}")
        for part in segments
    ]
