"""The judge of a run, from its config: three kinds with their sections, identities and error messages."""

import pathlib

import jax
import pytest
from ml_collections import ConfigDict

from rrl.data.questions import Question
from rrl.data.trajectory import POLICY
from rrl.errors import UserError
from rrl.models.hardware import ComputeConfig
from rrl.models.hf import save_decoder
from rrl.models.tokenizer import load_tokenizer
from rrl.parallel.mesh import make_mesh
from rrl.rewards.judge import ModelJudge
from rrl.rewards.judge_card import FILE, JudgeCard, write_judge_card
from rrl.rewards.judge_prompts import Thinking
from rrl.rewards.judge_settings import SECTIONS, JudgeSettings, fill_judge_defaults, judge_sections
from rrl.rewards.oracle import Oracle
from rrl.rewards.transcript import Transcript
from tests.rollout.world import make_world

KNOWN = Question("q", "Who?", ("x",), gold=("A",))
UNKNOWN = Question("r", "Where?", ("y",))
ENDPOINT = {"judge": {"kind": "endpoint"}, "judge_endpoint": {"url": "http://127.0.0.1:9/v1", "model": "m"}}


def load(values, questions=(KNOWN,)):
    mesh = make_mesh(data=1, devices=jax.devices()[:1])
    return JudgeSettings.parse(values).load(questions, ComputeConfig(), mesh)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    decoder, tokenizer, *_ = make_world()
    path = tmp_path_factory.mktemp("judge")
    save_decoder(path, decoder, tokenizer)
    assert load_tokenizer(path).chat_template
    return str(path)


def test_judge_sections_from_one_word():
    kinds = {word: judge_sections(word)["judge"] for word in ("oracle", "some/folder", "https://x/v1")}
    assert kinds == {
        "oracle": {"kind": "oracle", "folder": ""},
        "some/folder": {"kind": "model", "folder": "some/folder"},
        "https://x/v1": {"kind": "endpoint", "folder": ""},
    }
    assert JudgeSettings.parse(judge_sections("https://x/v1", "m")).endpoint.model == "m"


@pytest.mark.parametrize("judge", ["oracle", "some/folder", ""])
def test_judge_model_without_a_service_is_refused(judge):
    with pytest.raises(UserError, match=rf"judge_model='m' names a service's model, but judge='{judge}'"):
        judge_sections(judge, "m")


def test_the_judge_card_sets_limits_and_is_part_of_the_identity(folder):
    plain = JudgeSettings.parse(judge_sections(folder))
    assert (plain.judge.answer_tokens, plain.rollout.context) == (1024, 8192)
    before = plain.identity()
    write_judge_card(folder, JudgeCard(instructions=False, context=96, answer_tokens=8, cases=("Thinking",)))
    try:
        values = judge_sections(folder)
        settings = JudgeSettings.parse(values)
        assert (settings.judge.answer_tokens, settings.rollout.context) == (8, 96)
        assert JudgeSettings.parse(judge_sections(folder, context=64)).rollout.context == 64
        assert "card" not in before and settings.identity()["card"]["instructions"] is False
        assert load(values | {"judge_rollout": values["judge_rollout"] | {"rows": 2}}).card.cases == (
            "Thinking",
        )
    finally:
        (pathlib.Path(folder) / FILE).unlink()


def test_an_oracle_needs_gold_passages_of_every_question():
    assert isinstance(load({"judge": {"kind": "oracle"}}), Oracle)
    with pytest.raises(UserError, match="question 'r' names no gold passages"):
        load({"judge": {"kind": "oracle"}}, (KNOWN, UNKNOWN))


def test_a_model_judge_is_loaded_from_its_folder(folder):
    values = {
        "judge": {"kind": "model", "folder": folder, "answer_tokens": 4},
        "judge_rollout": {"rows": 2, "context": 64, "wake_threshold": 2, "prefill_tokens": 32},
    }
    judge = load(values, (UNKNOWN,))
    assert isinstance(judge, ModelJudge)
    (score,) = judge.grade([Thinking(UNKNOWN, Transcript(((POLICY, "thought"),)))])
    assert score is None or 0 <= score <= 1
    identity = JudgeSettings.parse(values).identity()
    assert identity["kind"] == "model" and len(identity["folder"]) == 64 and identity["context"] == 64
    assert set(identity) == {"kind", "folder", "answer_tokens", "context"}  # as before `weights` existed
    in_int8 = values | {"judge_rollout": values["judge_rollout"] | {"weights": "int8"}}
    assert JudgeSettings.parse(in_int8).identity() == identity | {"weights": "int8"}


def test_identity_of_a_service_is_its_model_not_its_address():
    elsewhere = ENDPOINT | {"judge_endpoint": {"url": "https://elsewhere/v1", "model": "m", "retries": 9}}
    other = ENDPOINT | {"judge_endpoint": {"url": "https://elsewhere/v1", "model": "n"}}
    one, same, another = (JudgeSettings.parse(v).identity() for v in (ENDPOINT, elsewhere, other))
    assert one == same != another
    assert isinstance(load(ENDPOINT, (UNKNOWN,)), ModelJudge)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"judge": {"kind": "human"}},
            r"^judge\.kind='human' is unknown; choose one of oracle, model, endpoint",
        ),
        ({"judge": {"kind": "endpoint"}}, r"^judge_endpoint\.url='' must begin with http"),
        (ENDPOINT | {"judge_endpoint": {"url": "http://x"}}, r"^judge_endpoint\.model='' is empty"),
        (
            {"judge": {"folder": "models/x"}},
            r"^judge\.folder='models/x' needs judge\.kind=model, not oracle",
        ),
        (
            {"judge": {"thinking": True}},
            r"^judge\.thinking=True needs judge\.kind=model, not oracle; for a service set judge_endpoint.thinking",
        ),
        ({"judge": {"answer_tokens": 0}}, r"^judge\.answer_tokens=0 must be at least 1"),
        (
            {"judge": {"kind": "model"}, "judge_rollout": {"context": 1000}},
            r"^judge_rollout\.context=1000 must hold judge\.answer_tokens=1024 and a prompt",
        ),
        ({"judge": {"sort": "oracle"}}, r"^judge\.sort is unknown; the fields of judge are"),
    ],
)
def test_a_wrong_field_is_named(values, message):
    with pytest.raises(UserError, match=message):
        JudgeSettings.parse(values)


def test_a_missing_model_folder_is_named():
    with pytest.raises(UserError, match=r"judge\.folder='nowhere'"):
        JudgeSettings.parse({"judge": {"kind": "model", "folder": "nowhere"}}).check()


def test_a_config_with_one_section_of_a_judge_gets_all_and_one_without_gets_none():
    config, without = ConfigDict({"judge_rollout": {"rows": 4}}), ConfigDict({"rollout": {}})
    fill_judge_defaults(config)
    fill_judge_defaults(without)
    assert set(config) == set(SECTIONS) and without.to_dict() == {"rollout": {}}
    assert (config.judge.kind, config.judge_rollout.rows) == ("oracle", 4)
