"""A scripted service, configs and pair files for the tests of cold starts."""

import collections
import json
import re

from rrl.recipes.r3rag_steps import Step
from tests.train import made


def config(arg="", name="r3rag_cold_start"):
    return made.config(name, arg)


def write_pairs(path, questions=6):
    rows = [
        {"id": f"q{q}", "step": s, "input": f"The question: {q}?{s}", "output": f"Step {s}:\nsaid {q}"}
        for q in range(questions)
        for s in (1, 2)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


class ScriptedService:
    """A service that answers like the scripted expert, except at some temperatures.

    At temperature 0.4 the final answer is wrong, at 0.7 the second step is malformed, and at 1.0 it searches without end.
    `before` is called with each request.
    """

    def __init__(self, items):
        self.plans = {item.question.text: item for item in items}
        self.asked = collections.Counter()
        self.before = lambda text: None
        self.cut = lambda said: False
        self.refused = lambda body: False

    def answer(self, body):
        text = body["messages"][-1]["content"]
        if body["model"] == "j":
            return "Hm."
        (question,) = re.findall(r"Current Input: The question: (.*?)(?:\. The Previous Steps:|\n)", text)
        self.asked[question] += 1
        self.before(text)
        item, number = self.plans[question], text.count("The retrieval documents:") + 1
        hops, temperature = item.plan.hops, body["temperature"]
        if temperature == 0.7 and number == 2:
            return "I give up."
        if number <= len(hops) or temperature == 1.0:
            return Step("Go on.", query=hops[min(number, len(hops)) - 1].query).to_text(number)
        answer = "Nobody" if temperature == 0.4 else item.question.answers[0]
        return Step("That is it.", answer=answer).to_text(number)
