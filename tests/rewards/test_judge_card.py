"""The judge card: form of the prompts, limits, and the kinds of prompts that the judge was trained on."""

import pytest

from rrl.data.questions import Question
from rrl.data.trajectory import POLICY
from rrl.errors import UserError
from rrl.rewards.judge import ModelJudge
from rrl.rewards.judge_card import FILE, JudgeCard, read_judge_card, write_judge_card
from rrl.rewards.judge_prompts import Correctness, Sufficiency, Validation
from rrl.rewards.transcript import Transcript

QUESTION = Question("q", "Who?", ("Ivo Danes",), gold=("A",))
CASE = Sufficiency(QUESTION, Transcript(((POLICY, "thought"),)))
BARE = JudgeCard(instructions=False, context=64, answer_tokens=8, cases=("Sufficiency", "Correctness"))


def test_a_card_is_read_as_written(tmp_path):
    assert read_judge_card(tmp_path) is None
    write_judge_card(tmp_path, BARE)
    assert read_judge_card(tmp_path) == BARE


def test_without_instructions_only_the_system_turn_is_omitted():
    assert JudgeCard().prompt_for(CASE) == CASE.prompt and CASE.prompt.system
    asked = BARE.prompt_for(CASE)
    assert not asked.system and asked.user_message == CASE.prompt.user_message
    assert BARE.prompt_for(Correctness(QUESTION, "x")) == Correctness(QUESTION, "x").prompt


def test_the_card_determines_the_form_of_prompts():
    asked = []

    def answers(prompts):
        asked.extend(prompts)
        return ['{"Sufficient Context": 1}'] * len(prompts)

    assert ModelJudge(answers, BARE).grade([CASE]) == ModelJudge(answers).grade([CASE]) == [1.0]
    assert [prompt.system for prompt in asked] == ["", CASE.prompt.system]


def test_a_kind_of_prompt_that_the_judge_was_not_trained_on_is_refused():
    with pytest.raises(UserError, match=r"trained only on Sufficiency, Correctness .*asked for Validation"):
        ModelJudge(lambda prompts: 1 / 0, BARE).grade([Validation(QUESTION, "x")])


@pytest.mark.parametrize(
    "text", ["[1", '{"instruction": true}', '{"context": "long"}', '{"answer_tokens": 0}']
)
def test_a_broken_card_is_named(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(UserError, match=FILE if "0" not in text else "answer_tokens=0"):
        read_judge_card(tmp_path)
