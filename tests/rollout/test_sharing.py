"""Shared prefixes, restarts and oversubscribed slots change no trajectory."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rrl.data.trajectory import POLICY, PROMPT
from rrl.errors import UserError
from rrl.parallel.mesh import make_mesh
from rrl.parallel.rules import shard
from rrl.rl.logprobs import token_logprobs
from rrl.rl.packing import pack
from rrl.rollout.config import EngineConfig
from rrl.rollout.engine import Engine
from rrl.rollout.prefixes import PrefixIndex
from rrl.rollout.protocol import Append, Finish, Restart, SearchFor, SingleTurn, Stream
from rrl.text.chat import chat_ids
from tests.rollout.world import make_world

KEY = jax.random.key(3)
CONFIG = EngineConfig(rows=8, context=192, wake_threshold=4, prefill_tokens=16, max_wait_steps=8, top_k=2)
ONE_TURN = SingleTurn(turn_tokens=12)


@pytest.fixture(scope="module")
def world():
    return make_world()


def group(requests, samples=6):
    """Return `samples` requests for each of the first two questions."""
    return [
        dataclasses.replace(request, seed=10 * number + sample, group=number)
        for number, request in enumerate(requests[:2])
        for sample in range(samples)
    ]


def assert_same(first, second, tolerance=0.0):
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        for name in ("logps", "sampled_logps"):
            np.testing.assert_allclose(getattr(one, name), getattr(other, name), rtol=0, atol=tolerance)


@pytest.fixture(scope="module")
def grouped(world):
    decoder, tokenizer, _, requests = world
    engine = Engine(decoder, tokenizer, CONFIG)
    results = engine.run(nnx.state(decoder), group(requests), ONE_TURN, KEY)
    return results, engine.stats.prefilled_tokens


def test_the_prompt_of_a_group_is_prefilled_once(world, grouped):
    requests = world[3]
    head = 0
    while requests[0].prompt[head] == requests[1].prompt[head]:
        head += 1
    first, second = (len(request.prompt) - 1 for request in requests[:2])
    assert grouped[1] in (first + second, first + second - head)  # both may begin with the same tokens


def test_a_sample_of_a_group_is_bitwise_equal_to_one_alone(world, grouped):
    decoder, tokenizer, _, requests = world
    engine = Engine(decoder, tokenizer, CONFIG)
    batch = group(requests)
    for index in (0, 3, 9):
        assert_same(engine.run(nnx.state(decoder), [batch[index]], ONE_TURN, KEY), [grouped[0][index]])


@pytest.mark.slow
def test_the_reference_loop_and_a_mesh_share_prompts_too(world, grouped):
    decoder, tokenizer, _, requests = world
    engine = Engine(decoder, tokenizer, CONFIG)
    assert_same(engine.run(nnx.state(decoder), group(requests), ONE_TURN, KEY, reference=True), grouped[0])
    for sizes in ((2, 2, 2), (1, 2, 4)):
        mesh = make_mesh(*sizes)
        spread = Engine(decoder, tokenizer, CONFIG, mesh=mesh)
        assert_same(
            spread.run(shard(nnx.state(decoder), mesh), group(requests), ONE_TURN, KEY), grouped[0], 1e-5
        )


def test_sharing_prefixes_of_long_prompts_changes_no_bits(world):
    decoder, tokenizer, _, requests = world
    draw = np.random.default_rng(32)
    heads = [draw.integers(3, 400, 70) for _ in range(2)]
    tails = [draw.integers(3, 400, draw.integers(1, 130)) for _ in range(7)]
    prompts = [np.concatenate([heads[n % 2], tail]) for n, tail in enumerate(tails)]
    assert max(map(len, prompts)) > 130 > min(map(len, prompts))  # a block of the cache has 128 positions
    batch = [
        dataclasses.replace(requests[0], prompt=prompt.astype(np.int32), seed=2 * number + sample)
        for number, prompt in enumerate(prompts)
        for sample in range(2)
    ]
    results, prefilled = [], []
    for shared in (True, False):
        config = dataclasses.replace(CONFIG, rows=4, context=256, prefill_tokens=32, share_prompts=shared)
        engine = Engine(decoder, tokenizer, config)
        results.append(engine.run(nnx.state(decoder), batch, ONE_TURN, KEY))
        prefilled.append(engine.stats.prefilled_tokens)
    assert_same(*results)
    assert prefilled[0] < 0.7 * prefilled[1]


class Reads(Stream):
    """Appends texts with a common beginning; the third turn restarts with a prompt of the tokens so far."""

    def __init__(self, encode):
        super().__init__(turn_tokens=6, observation_tokens=100)
        object.__setattr__(self, "encode", encode)

    def step(self, episode, text, stop):
        if episode.turn == 3:
            return Finish("done")
        answer = f" what was read after turn {episode.turn}, of some length: {text}" + 10 * " and so on"
        if episode.turn == 2:
            return Restart(self.encode(episode.question.text + answer + "".join(episode.policy_texts)))
        return Append(body=answer)


@pytest.fixture(scope="module")
def diverging(world):
    """For each question three equal samples, and three that diverge from them at different points."""
    return [
        dataclasses.replace(
            request, seed=10 * number + sample, temperature=0.0 if sample < 3 else 0.5 * sample
        )
        for number, request in enumerate(world[3][:3])
        for sample in range(6)
    ]


@pytest.mark.parametrize("rows", [pytest.param(6, marks=pytest.mark.slow), 32])
def test_sharing_observations_between_equal_trajectories_changes_no_bits(world, diverging, rows, monkeypatch):
    decoder, tokenizer = world[:2]
    find_source, results, prefilled = PrefixIndex.find_source, [], []
    for share_prompts, share_observations in ((True, True), (True, False), (False, False)):
        config = dataclasses.replace(
            CONFIG, rows=rows, context=400, prefill_tokens=32, share_prompts=share_prompts
        )
        engine = Engine(decoder, tokenizer, config)

        def prompts_only(self, slot, tokens, held=0):
            return (slot, held, True) if held else find_source(self, slot, tokens)

        monkeypatch.setattr(PrefixIndex, "find_source", find_source if share_observations else prompts_only)
        results.append(engine.run(nnx.state(decoder), diverging, Reads(engine.text.encode), KEY))
        prefilled.append(engine.stats.prefilled_tokens)
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])
    assert all(len(t.contexts) == 2 for t in results[0])
    assert [t.tokens.tolist() for t in results[0][:3]] == [results[0][0].tokens.tolist()] * 3
    assert prefilled[0] < 0.85 * prefilled[1] < 0.7 * prefilled[2]


@pytest.mark.slow
def test_the_reference_loop_and_a_mesh_share_observations_too(world, diverging):
    decoder, tokenizer = world[:2]
    config = dataclasses.replace(CONFIG, rows=12, context=400)
    engine = Engine(decoder, tokenizer, config)
    reads = Reads(engine.text.encode)
    results = engine.run(nnx.state(decoder), diverging, reads, KEY)
    assert_same(engine.run(nnx.state(decoder), diverging, reads, KEY, reference=True), results)
    mesh = make_mesh(2, 2, 2)
    spread = Engine(decoder, tokenizer, config, mesh=mesh)
    assert_same(spread.run(shard(nnx.state(decoder), mesh), diverging, reads, KEY), results, 1e-5)


@pytest.mark.slow
def test_oversubscribed_slots_keep_the_rows_busy_and_change_no_bits(world, diverging):
    decoder, tokenizer = world[:2]
    config = dataclasses.replace(CONFIG, context=400)
    engine = Engine(decoder, tokenizer, config)
    reads = Reads(engine.text.encode)
    results = engine.run(nnx.state(decoder), diverging, reads, KEY)
    busy = engine.stats.busy
    config = dataclasses.replace(config, oversubscribed_slots=8)
    engine = Engine(decoder, tokenizer, config)
    for reference in (False, True):
        assert_same(engine.run(nnx.state(decoder), diverging, reads, KEY, reference=reference), results)
    assert busy < engine.stats.busy <= 1
    mesh = make_mesh(2, 2, 2)
    spread = Engine(decoder, tokenizer, config, mesh=mesh)
    assert_same(spread.run(shard(nnx.state(decoder), mesh), diverging, reads, KEY), results, 1e-5)


def test_oversubscribed_slots_are_divided_among_shards_and_workers(world):
    decoder, tokenizer = world[:2]
    spare = dataclasses.replace(CONFIG, oversubscribed_slots=6)
    with pytest.raises(
        UserError, match=r"rollout\.oversubscribed_slots=6 must be a multiple of data x fsdp = 4 shards"
    ):
        Engine(decoder, tokenizer, spare, mesh=make_mesh(2, 2, 2))
    split = Engine(
        decoder, tokenizer, dataclasses.replace(CONFIG, oversubscribed_slots=5, workers=2)
    ).programs
    assert (split.workers, split.decode_rows, split.slots) == (2, 4, 7)
    with pytest.raises(UserError, match=r"oversubscribed_slots=-1 must be at least 0"):
        dataclasses.replace(CONFIG, oversubscribed_slots=-1)


class Steps(Stream):
    """Every turn begins a new context, after a search if the turn ended at an e."""

    def step(self, episode, text, stop):
        assert len(episode.policy_texts) == episode.turn + 1 and episode.policy_texts[-1] == text
        if episode.turn == 3:
            return Finish("done")
        return SearchFor(episode.question.text) if stop == "e" else self.again(episode)

    def observe(self, episode, passages):
        return self.again(episode, "".join(passage.title for passage in passages or ()))

    def again(self, episode, titles=""):
        return Restart(f"{episode.question.text} {episode.turn} {titles}")

    @property
    def stops(self):
        return ("e",)


STEPS = Steps(turn_tokens=12)


@pytest.fixture(scope="module")
def stepped(world):
    decoder, tokenizer, retriever, requests = world
    engine = Engine(decoder, tokenizer, CONFIG, retriever=retriever)
    return engine.run(nnx.state(decoder), requests[:10], STEPS, KEY)


def test_a_restart_begins_a_context_with_its_own_prompt(world, stepped):
    tokenizer, requests = world[1], world[3]
    for trajectory, request in zip(stepped, requests, strict=False):
        assert len(trajectory.contexts) == 4 and trajectory.ended == "done"
        for turn, context in enumerate(trajectory.contexts):
            assert (trajectory.turns[context] == turn).all()
            roles = trajectory.roles[context]
            prompt = int((roles == PROMPT).sum())
            assert (roles[:prompt] == PROMPT).all() and (roles[prompt:] == POLICY).all()
            if turn and not any(search.turn == turn - 1 for search in trajectory.searches):
                again = chat_ids(tokenizer, f"{request.question.text} {turn - 1} ")
                np.testing.assert_array_equal(trajectory.tokens[context][:prompt], again)
    searches = [search for trajectory in stepped for search in trajectory.searches]
    assert searches and all(search.passages for search in searches)
    assert all(search.titles == tuple(p.title for p in search.passages) for search in searches)


def test_log_probabilities_of_each_context_equal_those_of_training(world, stepped):
    contexts = [(trajectory, part) for trajectory in stepped for part in trajectory.contexts]
    packed = pack([t.tokens[c] for t, c in contexts], [t.roles[c] == POLICY for t, c in contexts], 192)
    batch = jax.tree.map(jnp.asarray, packed.batch)
    scores = np.asarray(jax.jit(lambda b: token_logprobs(world[0], b).logp)(batch))
    for score, (trajectory, context) in zip(
        packed.unpack(scores, [c.stop - c.start for _, c in contexts]), contexts, strict=True
    ):
        np.testing.assert_allclose(score, trajectory.logps[context], atol=1e-5)


def test_a_repeated_prompt_is_sampled_with_other_random_numbers(world):
    class Again(Steps):
        def again(self, episode, titles=""):
            return Restart(episode.question.text)

    decoder, tokenizer, retriever, requests = world
    engine = Engine(decoder, tokenizer, CONFIG, retriever=retriever)
    results = engine.run(nnx.state(decoder), requests[:4], Again(turn_tokens=12), KEY)
    written = [t.tokens[c][t.roles[c] == POLICY].tolist() for t in results for c in t.contexts]
    assert len({tuple(tokens) for tokens in written}) > len(results)


@pytest.mark.parametrize("oversubscribed", [0, 8])
def test_slow_searches_change_no_bits(world, stepped, oversubscribed):
    decoder, tokenizer, retriever, requests = world

    class Slow:
        needs_embeddings = False

        def search(self, queries, k, embeddings=None):
            time.sleep(0.03)
            return retriever.search(queries, k)

    engine = Engine(
        decoder, tokenizer, dataclasses.replace(CONFIG, oversubscribed_slots=oversubscribed), retriever=Slow()
    )
    assert_same(engine.run(nnx.state(decoder), requests[:10], STEPS, KEY), stepped)


def test_turn_tokens_of_a_request_must_not_exceed_those_of_the_environment(world):
    decoder, tokenizer, _, requests = world
    engine = Engine(decoder, tokenizer, CONFIG)
    short = [dataclasses.replace(request, turn_tokens=5) for request in requests[:3]]
    assert all(t.policy_tokens <= 5 for t in engine.run(nnx.state(decoder), short, ONE_TURN, KEY))
    with pytest.raises(UserError, match=r"turn_tokens=13 .* must be 0 to 12"):
        engine.run(nnx.state(decoder), [dataclasses.replace(short[0], turn_tokens=13)], ONE_TURN, KEY)
