"""Finished episodes for the tests of recipes, made from their texts."""

import numpy as np

from rrl.data.questions import Question
from rrl.data.trajectory import ENVIRONMENT, POLICY, Search, Trajectory
from rrl.recipes.base import ScoringContext

QUESTION = Question("q", "Who directed Silver Harbour?", ("Marta Velikov",))


def trajectory(*segments, question=QUESTION, searches=0, group=0):
    """Return an episode of these (role, text) segments."""
    arrays = [np.zeros(0)] * 5
    return Trajectory(question, 0, group, *arrays, list(segments), [Search(0, "q")] * searches, "answer")


def scored(recipe, *segments, **more):
    """Return a scored episode of these segments."""
    one = trajectory(*segments, **more)
    recipe.score([one], ScoringContext())
    return one


def turns(environment, *texts):
    """Return the segments of an episode in which the environment answers every text of the policy but the last."""
    message = environment.observe(None, None)
    answer = (ENVIRONMENT, f"{message.prefix}{message.body}{message.suffix}")
    segments = [segment for text in texts for segment in ((POLICY, text), answer)]
    return segments[:-1]


def as_segments(segments):
    """Return the (role, text) segments of a demonstration."""
    return [
        (POLICY, part) if isinstance(part, str) else (ENVIRONMENT, f"{part.prefix}{part.body}{part.suffix}")
        for part in segments
    ]
