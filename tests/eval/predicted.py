"""Three questions, and predictions for them, for tests of scoring."""

from rrl.data.questions import Question
from rrl.eval.predictions import Prediction
from rrl.text.normalize import RULES

SQUAD = RULES["squad"]
QUESTIONS = [
    Question("a", "Who?", ("Paris",), "bridge", ("T", "U"), 2),
    Question("b", "What?", ("the red house",), "bridge", ("V",), 3),
    Question("c", "Is it?", ("yes",), "comparison"),
]


def predicted(*answers: str, **more: object) -> list[Prediction]:
    return [
        Prediction(f"line {at}", question.id, question.text, (answer,), **more)
        for at, (question, answer) in enumerate(zip(QUESTIONS, answers), 1)
    ]
