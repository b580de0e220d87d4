"""What a judge's folder says of itself: how it is asked, how long it may answer, and what it was trained on."""

import pytest

from rrl.data.questions import Question
from rrl.data.trajectory import POLICY
from rrl.errors import UserError
from rrl.rewards.judge import ModelJudge
from rrl.rewards.judge_card import FILE, JudgeCard, read_judge_card, write_judge_card
from rrl.rewards.judge_prompts import Correctness, Sufficiency, Transcript, Validation

QUESTION = Question("q", "Who?", ("Ivo Danes",), gold=("A",))
CASE = Sufficiency(QUESTION, Transcript(((POLICY, "thought"),)))
BARE = JudgeCard(instructions=False, context=64, answer_tokens=8, cases=("Sufficiency", "Correctness"))


def test_a_card_is_read_as_it_was_written(tmp_path):
    assert read_judge_card(tmp_path) is None
    write_judge_card(tmp_path, BARE)
    assert read_judge_card(tmp_path) == BARE


def test_without_instructions_the_systems_turn_alone_is_left_out():
    assert JudgeCard().prompt_for(CASE) == CASE.prompt and CASE.prompt.system
    asked = BARE.prompt_for(CASE)
    assert not asked.system and asked.user_message == CASE.prompt.user_message
    assert BARE.prompt_for(Correctness(QUESTION, "x")) == Correctness(QUESTION, "x").prompt


def test_a_judge_is_asked_as_its_card_says():
    asked = []

    def answers(prompts):
        asked.extend(prompts)
        return ['{"Sufficient Context": 1}'] * len(prompts)

    assert ModelJudge(answers, BARE).grade([CASE]) == ModelJudge(answers).grade([CASE]) == [1.0]
    assert [prompt.system for prompt in asked] == ["", CASE.prompt.system]


def test_a_kind_of_case_that_it_was_not_trained_on_is_refused():
    with pytest.raises(UserError, match=r"trained on Sufficiency, Correctness alone.*asked for Validation"):
        ModelJudge(lambda prompts: 1 / 0, BARE).grade([Validation(QUESTION, "x")])


@pytest.mark.parametrize(
    "text", ["[1", '{"instruction": true}', '{"context": "long"}', '{"answer_tokens": 0}']
)
def test_a_card_that_cannot_be_read_is_named(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(UserError, match=FILE if "0" not in text else "answer_tokens=0"):
        read_judge_card(tmp_path)
