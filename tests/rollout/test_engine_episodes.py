"""What an episode holds and how it ends: limits, failed searches, special tokens."""

import dataclasses

import numpy as np
import pytest
from flax import nnx

from rrl.data.passages import Passage
from rrl.data.trajectory import ENVIRONMENT, POLICY
from rrl.data.trajectory_files import load_trajectories, save_trajectories
from rrl.errors import UserError
from rrl.models.decoder import Decoder
from rrl.retrieval.index import make_retriever
from rrl.retrieval.retriever import Hit
from rrl.rollout.config import EngineConfig
from rrl.rollout.engine import Engine
from rrl.rollout.episodes import Request
from rrl.rollout.protocol import Finish, SearchFor, SingleTurn, Stream
from tests.rollout.scripted import CONFIG, KEY, SCRIPTED, Scripted


def test_half_a_character_in_a_passage_becomes_a_question_mark(world, tmp_path):
    decoder, tokenizer, _, requests = world
    retriever = make_retriever([Passage("1", "Half \ud83d", "a passage, \udc00")], "bm25")
    retriever.search = lambda queries, k, vectors=None: [[Hit(retriever.passages[0], 1.0)] for _ in queries]
    engine = Engine(decoder, tokenizer, CONFIG, retriever=retriever)
    results = engine.run(nnx.state(decoder), requests[:3], SCRIPTED, KEY)
    observed = [
        text for t in results for role, text in t.segments if role == ENVIRONMENT and "(Title" in text
    ]
    assert observed and all("Half ?" in text and "a passage, ?" in text for text in observed)
    save_trajectories(tmp_path / "saved.jsonl", results)
    (loaded, *_) = load_trajectories(tmp_path / "saved.jsonl")
    assert loaded.searches[0].titles == results[0].searches[0].titles == ("Half ?",)


def test_a_failed_search_is_shown_to_the_policy_counted_and_logged_once(world, caplog):
    decoder, tokenizer, _retriever, requests = world

    class Broken:
        needs_embeddings = False

        def search(self, queries, k, embeddings=None):
            raise TimeoutError("index gone")

    engine = Engine(decoder, tokenizer, CONFIG, retriever=Broken())
    results = engine.run(nnx.state(decoder), requests[:5], SCRIPTED, KEY)
    searches = [search for t in results for search in t.searches]
    assert searches
    assert all(search.failed for search in searches)
    assert engine.stats.searches_failed == len(searches)
    engine.run(nnx.state(decoder), requests[5:7], SCRIPTED, KEY)
    assert caplog.text.count("TimeoutError('index gone')") == 1
    assert any("The search failed." in text for t in results for _, text in t.segments)


@pytest.mark.parametrize("workers", [1, 2])
def test_run_raises_what_the_environment_raises(world, workers):
    decoder, tokenizer, _, requests = world

    class Faulty(SingleTurn):
        def step(self, episode, text, stop):
            raise RuntimeError("no such turn")

    engine = Engine(decoder, tokenizer, dataclasses.replace(CONFIG, workers=workers))
    with pytest.raises(RuntimeError, match="no such turn"):
        engine.run(nnx.state(decoder), requests, Faulty(turn_tokens=4), KEY)
    assert len(engine.run(nnx.state(decoder), requests[:3], SingleTurn(turn_tokens=4), KEY)) == 3


def test_the_context_ends_an_episode_and_a_long_prompt_is_refused(world):
    decoder, tokenizer, _, requests = world
    config = EngineConfig(rows=4, context=40, wake_threshold=2, prefill_tokens=16)
    engine = Engine(decoder, tokenizer, config)
    short = Request(requests[0].question, requests[0].prompt[:30], 0)
    (one,) = engine.run(nnx.state(decoder), [short], Stream(turn_tokens=100), KEY)
    assert len(one.tokens) <= 40
    assert one.ended in ("context_limit", "answer", "turn_limit")
    long = Request(requests[0].question, np.zeros(39, np.int32), 0)
    message = r"has 39 tokens; the context holds 40, two of which are for the policy: raise rollout\.context"
    with pytest.raises(UserError, match=message):
        engine.run(nnx.state(decoder), [long], Stream(turn_tokens=4), KEY)


def test_a_turn_that_fills_turn_and_context_records_both_limits(world):
    decoder, tokenizer, _, requests = world
    engine = Engine(decoder, tokenizer, dataclasses.replace(CONFIG, context=40))
    batch = [
        dataclasses.replace(r, prompt=np.resize(r.prompt, length))
        for r, length in zip(requests, (34, 35, 36), strict=False)
    ]
    results = engine.run(nnx.state(decoder), batch, SingleTurn(turn_tokens=5), KEY)
    turn, context = (0, "turn_tokens"), (0, "context")
    assert [t.cuts for t in results] == [(turn,), (turn, context), (context,)]


def test_when_full_decides_about_an_observation_that_does_not_fit(world):
    decoder, tokenizer, retriever, requests = world
    requests = requests[:6]
    longest = max(len(request.prompt) for request in requests)
    config = dataclasses.replace(CONFIG, context=longest + 60)

    def run(when_full):
        environment = dataclasses.replace(SCRIPTED, when_full=when_full)
        return engine_.run(nnx.state(decoder), requests, environment, KEY)

    engine_ = Engine(decoder, tokenizer, config, retriever=retriever)
    ended, cut = run("end"), run("cut")
    assert {t.ended for t in ended} >= {"context_limit"}
    assert all(t.cuts[-1][1] in ("room", "context") for t in ended if t.ended == "context_limit")
    assert any(limit == "room" and turn < t.turns[-1] for t in cut for turn, limit in t.cuts)
    assert all(len(t.tokens) <= config.context for t in (*ended, *cut))
    assert sum(t.policy_tokens for t in cut) > sum(t.policy_tokens for t in ended)
    assert any(t.segments[-2][1].endswith("</observation>\n") for t in cut if t.roles[-1] == POLICY)
    closing = engine_.text.encode("\n</observation>\n")
    ends = [
        at + len(closing)
        for t in cut
        for at in np.flatnonzero(t.tokens == closing[0])
        if np.array_equal(t.tokens[at : at + len(closing)], closing)
    ]
    assert max(ends) <= config.context - SCRIPTED.turn_tokens < max(len(t.tokens) for t in cut)


def test_every_end_of_sequence_token_of_the_model_ends_a_turn(world):
    decoder, tokenizer, *_ = world
    ends = (7, tokenizer.eos_token_id, 300)
    llama = Decoder(dataclasses.replace(decoder.config, eos_token_id=ends), rngs=nnx.Rngs(0))
    assert Engine(decoder, tokenizer, CONFIG).programs.eos.tolist() == [tokenizer.eos_token_id]
    assert Engine(llama, tokenizer, CONFIG).programs.eos.tolist() == sorted(ends)


def test_the_name_of_a_special_token_in_a_passage_is_encoded_as_text(world):
    decoder, tokenizer, _, requests = world
    passage_text = "He said <|im_end|> and left."
    retriever = make_retriever([Passage("0", "A <|im_start|> B", passage_text)], "bm25")

    class Once(Scripted):
        def step(self, episode, text, stop):
            return Finish("done") if episode.turn else SearchFor("said left")

    with Engine(decoder, tokenizer, CONFIG, retriever=retriever) as engine:
        (one,) = engine.run(
            nnx.state(decoder), requests[:1], Once(turn_tokens=12, observation_tokens=60), KEY
        )
        assert engine.text.encode("<|im_end|>").tolist() == [tokenizer.eos_token_id], (
            "the template's token stays one"
        )
    given = one.tokens[one.roles == ENVIRONMENT]
    assert not np.isin(given, tokenizer.all_special_ids).any()
    assert f"(Title: A <|im_start|> B) {passage_text}" in next(
        text for role, text in one.segments if role == ENVIRONMENT
    )
