"""Agreement of judges with the oracle."""

import numpy as np
import pytest

from rrl.data.questions import Question
from rrl.data.trajectory import ENVIRONMENT, POLICY, PROMPT, Search, Trajectory
from rrl.errors import UserError
from rrl.rewards.judge_prompts import Correctness, Thinking
from rrl.rewards.oracle import Oracle
from rrl.rewards.transcript import Transcript
from rrl.sft.judge_agreement import agreement, agreement_table, held_out_judge_examples, judge_examples_of
from rrl.sft.judge_examples import PROMPT_KINDS, JudgeExample, JudgeExamplesConfig
from rrl.text.spans import tag_named

QUESTION = Question("q", "Who?", ("x",), gold=("A",))


class FixedJudge:
    """A judge with fixed scores."""

    def __init__(self, scores):
        self.scores = scores

    def grade(self, prompts):
        assert len(prompts) == len(self.scores)
        return self.scores


def test_agreement_and_its_table_match_hand_computed_numbers():
    truths = [1.0, 1.0, 1.0, 0.5, 0.0]
    examples = [JudgeExample(Thinking(QUESTION, Transcript(())), truth, "") for truth in truths]
    examples += [JudgeExample(Correctness(QUESTION, "x"), 1.0, "")]
    found = agreement(FixedJudge([1.0, 0.8, None, 0.5, 0.3, 1.0]), examples)
    thinking = found["Thinking"]
    assert (thinking["cases"], thinking["unread"]) == (5, 1)
    assert thinking["exact"] == pytest.approx(2 / 5) and thinking["near"] == pytest.approx(3 / 5)
    assert thinking["balanced"] == pytest.approx((1 / 3 + 1 + 0) / 3)
    assert thinking["majority_exact"] == thinking["majority_near"] == pytest.approx(3 / 5)
    assert thinking["majority_balanced"] == pytest.approx(1 / 3)
    assert found["Correctness"]["exact"] == 1
    line = next(line for line in agreement_table(found).splitlines() if line.startswith("thinking"))
    assert line.split() == ["thinking", "5", "40.0", "60.0", "60.0", "60.0", "44.4", "33.3", "1"]


def test_the_oracle_agrees_with_itself_and_a_constant_judge_does_not():
    examples = held_out_judge_examples(50, JudgeExamplesConfig(), "dev", 1)
    found = agreement(Oracle(), examples)
    assert list(found) == [kind.__name__ for kind in PROMPT_KINDS]
    for scores in found.values():
        assert scores["cases"] == 50 and scores["exact"] == scores["near"] == scores["balanced"] == 1
        assert scores["majority_exact"] < 0.75 and scores["majority_balanced"] <= 0.5


def test_a_number_of_questions_that_is_not_a_multiple_of_the_kinds_is_refused():
    with pytest.raises(UserError, match=r"questions=7 must be a multiple of 5"):
        held_out_judge_examples(7, JudgeExamplesConfig())


def test_trajectories_give_examples_with_the_scores_of_the_oracle():
    none, question = np.zeros(0), Question("q", "Who?", ("x",), gold=("Silver Harbour",))
    segments = [
        (PROMPT, "Who?"),
        (POLICY, "<think> Look. </think><search>films</search>"),
        (ENVIRONMENT, "<information>(Title: Silver Harbour) It is x.</information>"),
        (POLICY, "<think> So Silver Harbour says. </think><answer>x</answer>"),
    ]
    done = [
        Trajectory(question, 0, 0, none, none, none, none, none, said, searches, "answer", answer=answer)
        for said, searches, answer in (
            (segments, [Search(0, "films", ("Silver Harbour",))], "x"),
            (segments[:2], [], ""),
        )
    ]
    found = [(type(v.prompt).__name__, v.score) for v in judge_examples_of(done)]
    assert found == [
        ("Sufficiency", 1.0),
        ("Thinking", 1.0),
        ("Correctness", 1.0),
        ("Sufficiency", 0.0),
        ("Thinking", 0.0),
    ]
    assert "<answer>" not in judge_examples_of(done)[0].prompt.transcript.text
    done[0].segments = [(PROMPT, "Who?"), (POLICY, "The problem analysis: so\nThe final answer: x")]  # R3-RAG
    assert (
        judge_examples_of(done, tag_named("The final answer:"))[0].prompt.transcript.text
        == "The problem analysis: so"
    )
