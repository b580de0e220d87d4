"""Episodes, scores and actions of R3-RAG for its tests."""

import numpy as np

from rrl.data.passages import Passage
from rrl.data.questions import Question
from rrl.data.trajectory import POLICY, PROMPT, Search, Trajectory
from rrl.recipes.base import ScoringContext
from rrl.recipes.r3rag import R3Rag
from rrl.recipes.r3rag_steps import R3RagEnvironment
from rrl.rewards.judge_prompts import Correctness, Relevance, ShortAnswer
from rrl.rollout.protocol import Episode

QUESTION = Question("q", "Who directed Silver Harbour?", ("Marta Velikov",), gold=("Silver Harbour",))
FILM = Passage("1", "Silver Harbour", "Silver Harbour is a film by Marta Velikov.")
BOOK = Passage("2", "Silver Book", "The author of Silver Book is Edda Tolvik.")
ASK = "Step 1:\nThe problem analysis: I need the director.\nThe retrieval query: director of Silver Harbour"
ASK_MORE = "The problem analysis: Not yet.\nThe retrieval query: Silver Harbour film"
RIGHT = "Step 2:\nThe problem analysis: It says so.\nThe final answer: It was Marta Velikov."
WRONG = RIGHT.replace("Marta Velikov", "Edda Tolvik")
BROKEN = "Step 2: I do not know."


def trajectory(*texts, found=(), ended="answer", question=QUESTION):
    """Return a trajectory with these step texts; `found` has the passages of each search, None if it failed."""
    none = np.zeros(0)
    segments = [piece for text in texts for piece in ((PROMPT, "The question"), (POLICY, text))]
    searches = [
        Search(turn, "q", tuple(p.title for p in ps or ()), ps is None, tuple(ps or ()))
        for turn, ps in enumerate(found)
    ]
    return Trajectory(question, 0, 0, none, none, none, none, none, segments, searches, ended)


class StubJudge:
    """A judge that returns these scores by kind of prompt and records the prompts."""

    def __init__(self, relevance=0.5, correct=0.0, short=0.0):
        self.scores, self.asked = {Relevance: relevance, Correctness: correct, ShortAnswer: short}, []

    def grade(self, cases):
        self.asked += cases
        scores = [self.scores[type(case)] for case in cases]
        return [score.pop(0) if isinstance(score, list) else score for score in scores]


def scored(one, recipe=None, judge=None):
    (recipe or R3Rag()).score([one], ScoringContext(judge=judge or StubJudge()))
    return one


def after(*steps_and_passages, environment=None):
    """Return the action of the environment after these steps."""
    environment = environment or R3RagEnvironment()
    episode = Episode(QUESTION)
    for turn, (text, passages) in enumerate(steps_and_passages):
        episode.turn = turn
        episode.policy_texts.append(text)
        titles = tuple(p.title for p in passages or ())
        episode.searches.append(Search(turn, "q", titles, passages is None, tuple(passages or ())))
        action = environment.observe(episode, passages)
    return action
