"""A frozen decoder as judge: its prompts, batched by the engine, and the parsing of its replies."""

import pytest

from rrl.data.questions import Question
from rrl.data.trajectory import ENVIRONMENT, POLICY
from rrl.errors import UserError
from rrl.rewards.judge import ModelJudge
from rrl.rewards.judge_prompts import Correctness, Sufficiency, Thinking
from rrl.rewards.reader import Reader
from rrl.rewards.transcript import Transcript
from rrl.rollout.config import EngineConfig
from tests.rollout.world import make_world

QUESTION = Question("q", "Who directed Silver Harbour?", ("Marta Velikov",))


@pytest.fixture(scope="module")
def reader():
    decoder, tokenizer, *_ = make_world()
    sizes = EngineConfig(rows=4, context=128, wake_threshold=2, prefill_tokens=32)
    return Reader(decoder, tokenizer, sizes, answer_tokens=8)


def test_each_prompt_is_sent_unchanged_and_its_reply_parsed():
    asked = []

    def answers(prompts):
        asked.extend(prompts)
        return ['{"Sufficient Context": 1}', "0.4", "who knows", "False"]

    transcript = Transcript(((POLICY, "thought"), (ENVIRONMENT, "found")))
    cases = [
        Sufficiency(QUESTION, transcript),
        Thinking(QUESTION, transcript),
        Thinking(QUESTION, transcript),
        Correctness(QUESTION, "x"),
    ]
    assert ModelJudge(answers).grade(cases) == [1.0, 0.4, None, 0.0]
    assert asked == [case.prompt for case in cases]


def test_no_prompts_call_no_model():
    assert ModelJudge(lambda prompts: 1 / 0).grade([]) == []


def test_prompts_longer_than_the_context_are_answered(reader):
    long = Transcript(((ENVIRONMENT, "a passage that goes on " * 100), (POLICY, "thought")))
    cases = [Thinking(QUESTION, long), Thinking(QUESTION, Transcript(((POLICY, "short"),)))]
    scores = ModelJudge(reader.answers).grade([*cases, *cases])
    assert scores[:2] == scores[2:]
    assert len(reader.cache) == 2  # equal prompts are answered once
    assert all(score is None or 0 <= score <= 1 for score in scores)


def test_a_context_without_room_for_a_prompt_is_refused():
    decoder, tokenizer, *_ = make_world()
    with pytest.raises(UserError, match=r"context=64 must be at least answer_tokens=64 plus 3"):
        Reader(decoder, tokenizer, EngineConfig(context=64), answer_tokens=64)
