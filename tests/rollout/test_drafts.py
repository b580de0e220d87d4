"""Draft tokens: the same trajectories in fewer decode steps."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rrl.errors import UserError
from rrl.models.decoder import Decoder
from rrl.parallel.mesh import make_mesh
from rrl.parallel.rules import shard
from rrl.rollout import decoding
from rrl.rollout.backends import find_shapes
from rrl.rollout.drafts import NgramDrafts, preceding_tokens, shift_in
from rrl.rollout.engine import Engine
from rrl.rollout.exchange import NO_TOKEN, RECENT_TOKENS
from rrl.rollout.protocol import SingleTurn
from tests.rollout.test_engine import CONFIG, KEY, SCRIPTED, assert_same, size_tolerance, world  # noqa: F401
from tests.rollout.world import greedy_groups

DRAFTING = dataclasses.replace(CONFIG, draft_tokens=2)


def learned(*texts, drafts=None):
    """Draft tables with the n-grams of these texts."""
    drafts = drafts or NgramDrafts.create(1)
    for text in texts:
        tokens = jnp.asarray([text])
        before = preceding_tokens(jnp.full((1, RECENT_TOKENS), NO_TOKEN), tokens)
        drafts = drafts.update(before, tokens, jnp.ones(tokens.shape, bool))
    return drafts


def proposed(drafts, text, count):
    recent = [NO_TOKEN] * RECENT_TOKENS + list(text)
    return drafts.propose(jnp.asarray([recent[-RECENT_TOKENS:]]), count)[0].tolist()


def test_drafts_are_what_followed_the_longest_known_ngram():
    assert proposed(NgramDrafts.create(1), [5, 6, 7], 3) == [0, 0, 0]
    drafts = learned([5, 6, 7, 8, 9, 10])
    assert proposed(drafts, [5, 6], 4) == [7, 8, 9, 10]
    assert proposed(drafts, [3, 5, 6, 7, 8], 2) == [9, 10]
    drafts = learned([1, 2, 7, 8, 30], [4, 4, 7, 8, 40], drafts=drafts)
    # 30 followed the last four tokens; 40 followed the last two, later.
    assert proposed(drafts, [1, 2, 7, 8], 1) == [30]
    assert proposed(drafts, [9, 9, 7, 8], 1) == [40]
    assert proposed(drafts, [8], 1) == [40]
    assert proposed(drafts, [99, 6], 1) == [7]  # by the last token alone
    assert proposed(drafts, [99], 2) == [0, 0]


def test_invalid_tokens_and_incomplete_ngrams_are_not_learned():
    tokens = jnp.asarray([[11, 12, 13]])
    before = preceding_tokens(jnp.full((1, RECENT_TOKENS), NO_TOKEN), tokens)
    assert before[0].tolist() == [
        [NO_TOKEN] * 4,
        [NO_TOKEN] * 3 + [11],
        [NO_TOKEN] * 2 + [11, 12],
    ]
    drafts = NgramDrafts.create(1).update(before, tokens, jnp.asarray([[True, True, False]]))
    assert np.count_nonzero(drafts.table) == 1 and proposed(drafts, [11], 2) == [12, 0]
    assert shift_in(before[0, 1], jnp.int32(12)).tolist() == before[0, 2].tolist()


def wrong_drafts(drafts, recent, count):
    """Draft tokens that are almost always wrong."""
    return (recent[:, -1:] * 7 + recent[:, :1] + 11 * jnp.arange(1, count + 1)) % 400


@pytest.fixture(scope="module")
def runs(world):  # noqa: F811
    """(trajectories, stats, stats of greedy groups) without draft tokens ("none") and with them ("some")."""
    decoder, tokenizer, retriever, requests = world
    results = {}
    for name, config in (("none", CONFIG), ("some", DRAFTING)):
        engine, params = Engine(decoder, tokenizer, config, retriever=retriever), nnx.state(decoder)
        own = engine.run(params, requests, SCRIPTED, KEY), engine.stats
        engine.run(params, greedy_groups(requests), SCRIPTED, KEY)
        results[name] = *own, engine.stats
    return results


def test_drafts_change_no_trajectory_and_need_fewer_steps(runs, size_tolerance):  # noqa: F811
    (none, _, slow), (some, _, fast) = runs.values()
    assert_same(none, some, size_tolerance)
    assert fast.row_steps < 0.9 * slow.row_steps and slow.tokens_per_step == 1 < fast.tokens_per_step
    assert fast.busy <= 1 and fast.policy_tokens == slow.policy_tokens
    assert {t.ended for t in some} == {t.ended for t in none}


def test_wrong_drafts_change_no_bits(world, runs, monkeypatch):  # noqa: F811
    decoder, tokenizer, retriever, requests = world
    monkeypatch.setattr(NgramDrafts, "propose", wrong_drafts)
    engine = Engine(decoder, tokenizer, DRAFTING, retriever=retriever)
    results = engine.run(nnx.state(decoder), requests, SCRIPTED, KEY)
    assert_same(runs["some"][0], results, tolerance=0)
    assert engine.stats.tokens_per_step < runs["some"][1].tokens_per_step


def test_with_drafts_bits_do_not_depend_on_the_batch_the_slot_or_the_kind_of_loop(world, runs):  # noqa: F811
    decoder, tokenizer, retriever, requests = world
    engine = Engine(decoder, tokenizer, DRAFTING, retriever=retriever)
    params = nnx.state(decoder)
    some = runs["some"][0]
    assert_same(some[4:15][::-1], engine.run(params, requests[4:15][::-1], SCRIPTED, KEY), tolerance=0)
    assert_same(some, engine.run(params, requests, SCRIPTED, KEY, reference=True), tolerance=0)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"draft_tokens": 7}, marks=pytest.mark.slow),
        {"workers": 2, "rows": 16},
        pytest.param({"oversubscribed_slots": 8}, marks=pytest.mark.slow),
    ],
)
def test_more_drafts_workers_or_slots_give_the_same_trajectories(world, runs, size_tolerance, more):  # noqa: F811
    decoder, tokenizer, retriever, requests = world
    engine = Engine(decoder, tokenizer, dataclasses.replace(DRAFTING, **more), retriever=retriever)
    assert_same(runs["some"][0], engine.run(nnx.state(decoder), requests, SCRIPTED, KEY), size_tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((8, 1, 1), marks=pytest.mark.slow),
        (2, 2, 2),
        pytest.param((4, 1, 2), marks=pytest.mark.slow),
    ],
)
def test_eight_devices_draft_too(world, runs, shape):  # noqa: F811
    decoder, tokenizer, retriever, requests = world
    mesh = make_mesh(*shape)
    config = dataclasses.replace(DRAFTING, oversubscribed_slots=8)
    engine = Engine(decoder, tokenizer, config, retriever=retriever, mesh=mesh)
    assert_same(runs["some"][0], engine.run(shard(nnx.state(decoder), mesh), requests, SCRIPTED, KEY))
    assert engine.stats.tokens_per_step > 1


@pytest.mark.parametrize("context", [192, pytest.param(56, marks=pytest.mark.slow)])
def test_correct_drafts_beyond_the_end_of_a_turn_are_dropped(world, context):  # noqa: F811
    """The turn ends at its token limit, an end-of-sequence token, or the end of the context."""
    decoder, tokenizer, _, requests = world
    # Greedy samples of four questions: the drafts of a sample come from the samples before it, and are correct.
    batch = [
        dataclasses.replace(requests[seed % 4], seed=seed, temperature=0.0, turn_tokens=1 + seed)
        for seed in range(32)
    ]
    results = []
    for config in (CONFIG, dataclasses.replace(DRAFTING, draft_tokens=5)):
        engine = Engine(decoder, tokenizer, dataclasses.replace(config, context=context))
        results.append(engine.run(nnx.state(decoder), batch, SingleTurn(turn_tokens=48), KEY))
    assert_same(*results)
    assert engine.stats.tokens_per_step > 1.3
    assert {t.ended for t in results[1]} == ({"length"} if context == 192 else {"length", "context_limit"})


def test_drafts_are_disabled_if_they_change_bits(world, monkeypatch, caplog):  # noqa: F811
    decoder, tokenizer, _, requests = world
    config = dataclasses.replace(DRAFTING, rows=8, workers=1)
    engines = [Engine(decoder, tokenizer, config) for _ in range(2)]
    assert find_shapes(engines[0].programs, nnx.state(decoder)).step_tokens == 24
    assert "8 rows x 3 tokens" in engines[0].programs.describe()
    sample_tokens = decoding.sample_tokens

    def changed_bits(*arguments):
        drawn = sample_tokens(*arguments)
        lower = [jnp.where(one.ids % 25 == 0, jnp.nextafter(one.logps, -jnp.inf), one.logps) for one in drawn]
        return [
            *drawn[:2],
            *(one._replace(logps=logps) for one, logps in zip(drawn[2:], lower[2:], strict=True)),
        ]

    monkeypatch.setattr(decoding, "sample_tokens", changed_bits)
    with caplog.at_level("INFO", "rrl.rollout.loop_runner"):
        engines[1].run(nnx.state(decoder), requests[:1], SingleTurn(turn_tokens=4), KEY)
    assert engines[1].programs.shapes.step_tokens == 0 and engines[1].stats.tokens_per_step == 1
    assert any("rollout.draft_tokens=2 is ignored" in line for line in caplog.messages)
    assert any("steps of 8 rows;" in line for line in caplog.messages)


def test_a_step_of_fewer_rows_drafts_more_per_row(world, monkeypatch):  # noqa: F811
    """All steps compute the same number of tokens."""
    decoder, tokenizer, *_ = world
    shapes, extend = set(), Decoder.extend

    def recorded(model, tokens, **others):
        shapes.add(tokens.shape)
        return extend(model, tokens, **others)

    monkeypatch.setattr(Decoder, "extend", recorded)
    engine = Engine(decoder, tokenizer, dataclasses.replace(CONFIG, rows=32, workers=1, draft_tokens=1))
    find_shapes(engine.programs, nnx.state(decoder))
    assert shapes == {(32, 2), (16, 4), (8, 8)}


def test_too_many_draft_tokens_are_refused():
    with pytest.raises(UserError, match="draft_tokens=8 must be at most 7"):
        dataclasses.replace(CONFIG, draft_tokens=8)
    with pytest.raises(UserError, match="draft_tokens=-1"):
        dataclasses.replace(CONFIG, draft_tokens=-1)
