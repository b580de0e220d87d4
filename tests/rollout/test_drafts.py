"""Draft tokens: a row writes what it would have written one by one, in fewer steps."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rrl.errors import UserError
from rrl.models.decoder import Decoder
from rrl.parallel.mesh import make_mesh
from rrl.parallel.rules import shard
from rrl.rollout import device
from rrl.rollout.cpu.shape_probe import configure_shapes
from rrl.rollout.drafts import NgramDrafts, following, windows
from rrl.rollout.engine import Engine
from rrl.rollout.exchange import NO_TOKEN, RECENT
from rrl.rollout.protocol import SingleTurn
from tests.rollout.test_engine import CONFIG, ENVIRONMENT_, KEY, across_sizes, same, world  # noqa: F401
from tests.rollout.world import alike

GUESSING = dataclasses.replace(CONFIG, draft_tokens=2)


def learned(*texts, drafts=None):
    """Drafts that have read these texts."""
    drafts = drafts or NgramDrafts.create(1)
    for text in texts:
        tokens = jnp.asarray([text])
        before = windows(jnp.full((1, RECENT), NO_TOKEN), tokens)
        drafts = drafts.update(before, tokens, jnp.ones(tokens.shape, bool))
    return drafts


def guessed(drafts, text, count):
    recent = [NO_TOKEN] * RECENT + list(text)
    return drafts.propose(jnp.asarray([recent[-RECENT:]]), count)[0].tolist()


def test_what_followed_the_last_tokens_is_guessed_by_the_longest_ngram():
    assert guessed(NgramDrafts.create(1), [5, 6, 7], 3) == [0, 0, 0]
    drafts = learned([5, 6, 7, 8, 9, 10])
    assert guessed(drafts, [5, 6], 4) == [7, 8, 9, 10]
    assert guessed(drafts, [3, 5, 6, 7, 8], 2) == [9, 10]
    drafts = learned([1, 2, 7, 8, 30], [4, 4, 7, 8, 40], drafts=drafts)
    # The last four say so; behind the last two, 40 was seen later.
    assert guessed(drafts, [1, 2, 7, 8], 1) == [30]
    assert guessed(drafts, [9, 9, 7, 8], 1) == [40]
    assert guessed(drafts, [8], 1) == [40]
    assert guessed(drafts, [99, 6], 1) == [7]  # of the last token alone
    assert guessed(drafts, [99], 2) == [0, 0]


def test_nothing_is_learned_of_what_is_not_valid_or_not_whole():
    tokens = jnp.asarray([[11, 12, 13]])
    before = windows(jnp.full((1, RECENT), NO_TOKEN), tokens)
    assert before[0].tolist() == [
        [NO_TOKEN] * 4,
        [NO_TOKEN] * 3 + [11],
        [NO_TOKEN] * 2 + [11, 12],
    ]
    drafts = NgramDrafts.create(1).update(before, tokens, jnp.asarray([[True, True, False]]))
    assert np.count_nonzero(drafts.table) == 1 and guessed(drafts, [11], 2) == [12, 0]
    assert following(before[0, 1], jnp.int32(12)).tolist() == before[0, 2].tolist()


def blind(drafts, recent, count):
    """Guesses that are nearly all wrong, each time others."""
    return (recent[:, -1:] * 7 + recent[:, :1] + 11 * jnp.arange(1, count + 1)) % 400


@pytest.fixture(scope="module")
def runs(world):  # noqa: F811
    """By whether anything is guessed: trajectories, stats, and those of samples that are alike."""
    decoder, tokenizer, retriever, requests = world
    found = {}
    for name, config in (("none", CONFIG), ("some", GUESSING)):
        engine, params = Engine(decoder, tokenizer, config, retriever=retriever), nnx.state(decoder)
        own = engine.run(params, requests, ENVIRONMENT_, KEY), engine.stats
        engine.run(params, alike(requests), ENVIRONMENT_, KEY)
        found[name] = *own, engine.stats
    return found


def test_trajectories_are_those_without_in_fewer_steps(runs, across_sizes):  # noqa: F811
    (none, _, slow), (some, _, fast) = runs.values()
    same(none, some, across_sizes)
    assert fast.row_steps < 0.9 * slow.row_steps and slow.tokens_per_step == 1 < fast.tokens_per_step
    assert fast.busy <= 1 and fast.policy_tokens == slow.policy_tokens
    assert {t.ended for t in some} == {t.ended for t in none}


def test_bits_do_not_depend_on_what_was_guessed(world, runs, monkeypatch):  # noqa: F811
    decoder, tokenizer, retriever, requests = world
    monkeypatch.setattr(NgramDrafts, "propose", blind)
    engine = Engine(decoder, tokenizer, GUESSING, retriever=retriever)
    found = engine.run(nnx.state(decoder), requests, ENVIRONMENT_, KEY)
    same(runs["some"][0], found, tolerance=0)
    assert engine.stats.tokens_per_step < runs["some"][1].tokens_per_step


def test_nor_on_the_batch_the_slot_or_the_loop(world, runs):  # noqa: F811
    decoder, tokenizer, retriever, requests = world
    engine = Engine(decoder, tokenizer, GUESSING, retriever=retriever)
    params = nnx.state(decoder)
    some = runs["some"][0]
    same(some[4:15][::-1], engine.run(params, requests[4:15][::-1], ENVIRONMENT_, KEY), tolerance=0)
    same(some, engine.run(params, requests, ENVIRONMENT_, KEY, reference=True), tolerance=0)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"draft_tokens": 7}, marks=pytest.mark.slow),
        {"workers": 2, "rows": 16},
        pytest.param({"oversubscribed_slots": 8}, marks=pytest.mark.slow),
    ],
)
def test_so_many_guesses_loops_or_spare_rows_give_the_same(world, runs, across_sizes, more):  # noqa: F811
    decoder, tokenizer, retriever, requests = world
    engine = Engine(decoder, tokenizer, dataclasses.replace(GUESSING, **more), retriever=retriever)
    same(runs["some"][0], engine.run(nnx.state(decoder), requests, ENVIRONMENT_, KEY), across_sizes)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((8, 1, 1), marks=pytest.mark.slow),
        (2, 2, 2),
        pytest.param((4, 1, 2), marks=pytest.mark.slow),
    ],
)
def test_eight_devices_guess_too(world, runs, shape):  # noqa: F811
    decoder, tokenizer, retriever, requests = world
    mesh = make_mesh(*shape)
    config = dataclasses.replace(GUESSING, oversubscribed_slots=8)
    engine = Engine(decoder, tokenizer, config, retriever=retriever, mesh=mesh)
    same(runs["some"][0], engine.run(shard(nnx.state(decoder), mesh), requests, ENVIRONMENT_, KEY))
    assert engine.stats.tokens_per_step > 1


@pytest.mark.parametrize("context", [192, pytest.param(56, marks=pytest.mark.slow)])
def test_a_turn_ends_where_it_would_have_ended(world, context):  # noqa: F811
    """By its limit, the end of its text, or the context, though more was guessed right."""
    decoder, tokenizer, _, requests = world
    # Greedy samples of four questions: what one has written, the next is guessed to write, and writes.
    asked = [
        dataclasses.replace(requests[seed % 4], seed=seed, temperature=0.0, turn_tokens=1 + seed)
        for seed in range(32)
    ]
    found = []
    for config in (CONFIG, dataclasses.replace(GUESSING, draft_tokens=5)):
        engine = Engine(decoder, tokenizer, dataclasses.replace(config, context=context))
        found.append(engine.run(nnx.state(decoder), asked, SingleTurn(turn_tokens=48), KEY))
    same(*found)
    assert engine.stats.tokens_per_step > 1.3
    assert {t.ended for t in found[1]} == ({"length"} if context == 192 else {"length", "context_limit"})


def test_where_bits_depend_on_guesses_nothing_is_guessed(world, monkeypatch, caplog):  # noqa: F811
    decoder, tokenizer, _, requests = world
    config = dataclasses.replace(GUESSING, rows=8, workers=1)
    engines = [Engine(decoder, tokenizer, config) for _ in range(2)]
    configure_shapes(engines[0].programs, nnx.state(decoder))
    assert engines[0].programs.step_tokens == 24 and "8 rows x 3 tokens" in engines[0].programs.describe()
    draw = device.sample_tokens

    def off(*given):
        drawn = draw(*given)
        lower = [jnp.where(one.ids % 25 == 0, jnp.nextafter(one.logps, -jnp.inf), one.logps) for one in drawn]
        return [
            *drawn[:2],
            *(one._replace(logps=logps) for one, logps in zip(drawn[2:], lower[2:], strict=True)),
        ]

    monkeypatch.setattr(device, "sample_tokens", off)
    with caplog.at_level("INFO", "rrl.rollout.engine"):
        engines[1].run(nnx.state(decoder), requests[:1], SingleTurn(turn_tokens=4), KEY)
    assert engines[1].programs.step_tokens == 0 and engines[1].stats.tokens_per_step == 1
    assert any("rollout.draft_tokens=2 is left out" in line for line in caplog.messages)
    assert any("steps of 8 rows;" in line for line in caplog.messages)


def test_fewer_rows_guess_more(world, monkeypatch):  # noqa: F811
    """A step computes as many tokens whatever its width."""
    decoder, tokenizer, *_ = world
    shapes, extend = set(), Decoder.extend

    def seen(model, tokens, **others):
        shapes.add(tokens.shape)
        return extend(model, tokens, **others)

    monkeypatch.setattr(Decoder, "extend", seen)
    engine = Engine(decoder, tokenizer, dataclasses.replace(CONFIG, rows=32, workers=1, draft_tokens=1))
    configure_shapes(engine.programs, nnx.state(decoder))
    assert shapes == {(32, 2), (16, 4), (8, 8)}


def test_more_guesses_than_a_step_has_room_for_are_refused():
    with pytest.raises(UserError, match="draft_tokens=8 must be at most 7"):
        dataclasses.replace(CONFIG, draft_tokens=8)
    with pytest.raises(UserError, match="draft_tokens=-1"):
        dataclasses.replace(CONFIG, draft_tokens=-1)
