"""The frozen reader: greedy, cached, and correct for prompts of any length."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rrl.data.trajectory import POLICY, PROMPT
from rrl.models.decoder import Decoder
from rrl.models.tokenizer import train_tokenizer
from rrl.rewards.reader import Reader, ReaderReply
from rrl.rollout.config import EngineConfig
from rrl.text.chat import Prompt
from tests.tiny import tiny_shape


@pytest.fixture(scope="module")
def reader():
    tokenizer = train_tokenizer(["the reader answers from evidence alone " * 3], 300)
    config = tiny_shape(300, 128, model_type="llama")
    settings = EngineConfig(rows=4, context=64, wake_threshold=2, prefill_tokens=16)
    return Reader(Decoder(config, rngs=nnx.Rngs(0)), tokenizer, settings, answer_tokens=6)


def test_equal_prompts_are_answered_once(reader):
    runs = []
    run = reader.engine.run
    reader.engine.run = lambda *args, **kwargs: runs.append(len(args[1])) or run(*args, **kwargs)
    try:
        first = reader.answers(["who?", "where?", "who?"])
        again = reader.answers(["where?", "when?"])
    finally:
        reader.engine.run = run
    assert first[0] == first[2]
    assert again[0] == first[1]
    assert runs == [2, 1]


def test_a_prompt_longer_than_the_context_is_truncated_at_its_front_with_one_warning(reader, caplog):
    (answer, _) = reader.answers(["evidence " * 200, "short"])
    assert isinstance(answer, str)
    reader.answers(["evidence " * 300])
    assert reader.truncated == 2
    (message,) = [record.getMessage() for record in caplog.records if record.name == "rrl.rewards.reader"]
    assert message.startswith("1 of 2 prompts exceed the model's context of 64 tokens")


def test_cache_keeps_the_latest_answers(reader, monkeypatch):
    monkeypatch.setattr(reader, "cache_size", 2)
    prompts = [f"question {i}" for i in range(5)]
    latest = reader.answers(prompts)[3:]
    assert [output.text for output in reader.cache.values()] == latest
    asked = []
    monkeypatch.setattr(reader.engine, "run", lambda params, requests, *_: asked.append(len(requests)) or [])
    assert reader.answers(prompts[3:]) == latest and not asked


def test_cache_holds_no_prompts(reader):
    reader.cache.clear()
    reader.answers([Prompt("who? ", "evidence " * 200), "who? " + "evidence " * 200])
    assert len(reader.cache) == 2 and all(len(key) == 32 for key in reader.cache)


def test_a_truncated_answer_is_empty_if_completeness_is_required(reader):
    asked = ["who?", "where?"]
    assert all(reader.answers(asked))  # random weights: all answers reach the token limit
    reader.cache.clear()
    reader.require_complete = True
    try:
        assert reader.answers(asked) == ["", ""]
    finally:
        reader.cache.clear()
        reader.require_complete = False


def answered(text, prompt=""):
    return SimpleNamespace(
        segments=[(PROMPT, prompt), (POLICY, text)], roles=np.array([POLICY]), ended="answer"
    )


CHOICE = "{{ messages[-1].content }}{% if enable_thinking is defined and not enable_thinking %}<nothing>{% endif %}"
"""Like Qwen3's template: a missing variable means that the model thinks."""


@pytest.mark.parametrize("thinking", [False, True])
def test_the_thinking_switch_reaches_the_chat_template(reader, monkeypatch, thinking):
    monkeypatch.setattr(reader.engine.tokenizer, "chat_template", CHOICE)
    monkeypatch.setattr(reader, "thinking", thinking)
    asked = []
    monkeypatch.setattr(
        reader.engine, "run", lambda _, requests, *rest: asked.extend(requests) or [answered("")]
    )
    reader.cache.clear()
    reader.answers(["a question"])
    reader.cache.clear()
    (request,) = asked
    text = reader.engine.tokenizer.decode(request.prompt)
    assert text.endswith("<nothing>") is not thinking


@pytest.mark.parametrize(("output", "answer"), [("It was Bo.</think>\n\nBo", "Bo"), ("It was", ""), ("", "")])
def test_a_thought_opened_by_the_template_is_not_part_of_the_answer(reader, monkeypatch, output, answer):
    reader.cache.clear()
    monkeypatch.setattr(reader.engine, "run", lambda *_: [answered(output, "assistant\n<think>\n")])
    assert reader.answers(["who?"]) == [answer]
    reader.cache.clear()


@pytest.mark.parametrize(
    ("output", "answer"),
    [("<think>It was Bo.</think>\n\nBo", "Bo"), ("<think>It was", ""), (" Bo ", "Bo")],
)
def test_a_thought_is_not_part_of_the_answer(reader, monkeypatch, output, answer):
    reader.cache.clear()
    monkeypatch.setattr(reader.engine, "run", lambda *_: [answered(output)])
    assert reader.answers(["who?"]) == [answer]
    reader.cache.clear()


def test_no_prompts_run_no_engine(reader):
    assert reader.answers([]) == []


def test_non_finite_logits_give_an_empty_answer(reader):
    asked, params = ["who?", "where?"], reader.params
    assert all(reader.answers(asked))
    reader.cache.clear()
    reader.params = jax.tree.map(lambda x: x * jnp.nan, params)
    try:
        assert reader.replies(asked) == [
            ReaderReply("", read, 0) for read in (s.prompt_tokens for s in reader.cache.values())
        ]
    finally:
        reader.cache.clear()
        reader.params = params
