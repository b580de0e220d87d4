"""The engine: the jitted loop agrees with the reference loop and with the training forward pass, on one device and on eight."""

import contextlib
import dataclasses
import os
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rrl.data.passages import Passage
from rrl.data.trajectory import ENVIRONMENT, POLICY, PROMPT
from rrl.data.trajectory_files import load_trajectories, save_trajectories
from rrl.errors import UserError
from rrl.miniwiki import generate
from rrl.models.cpu.layers import can_attend
from rrl.models.decoder import Decoder
from rrl.parallel.mesh import make_mesh
from rrl.parallel.rules import shard
from rrl.retrieval.encoder_folder import load_text_encoder
from rrl.retrieval.index import make_retriever
from rrl.retrieval.retriever import Hit
from rrl.rl.logprobs import token_logprobs
from rrl.rl.packing import pack
from rrl.rollout.automaton import CACHED_STOP_TABLES
from rrl.rollout.config import EngineConfig
from rrl.rollout.engine import Engine, RolloutStats
from rrl.rollout.episodes import Request
from rrl.rollout.protocol import Append, Finish, Restart, SearchFor, SingleTurn, Stream
from rrl.rollout.sampling import truncate
from rrl.rollout.scheduler import Scheduler
from tests.rollout.world import make_world

KEY = jax.random.key(3)
SAMPLING = {"top_p": 0.99, "sample_top_k": 300}
CONFIG = EngineConfig(
    rows=8, context=192, wake_threshold=4, prefill_tokens=48, max_wait_steps=8, top_k=2, **SAMPLING
)
TEMPERATURES = (1.0, 0.7, 0.4, 0.1, 0.0)


class Scripted(Stream):
    """Searches after every turn, so that a random policy exercises every path of the loop."""

    def step(self, episode, text, stop):
        if episode.turn == 2:
            return Finish("done")
        return Append(prefix=" again ") if stop == "e" else SearchFor(f"{text} {episode.question.text}")

    @property
    def stops(self):
        return ("e",)


SCRIPTED = Scripted(turn_tokens=12, observation_tokens=60)


@pytest.fixture(scope="module")
def world():
    *others, requests = make_world()
    return *others, [dataclasses.replace(r, temperature=TEMPERATURES[r.seed % 5]) for r in requests]


@pytest.fixture(scope="session")
def size_tolerance():
    """Tolerance of log-probabilities between engines of different sizes: 0 with the CPU kernel, whose results do not depend on
    sizes."""
    return 0.0 if can_attend(jnp.float32, 16) else 1e-5


@pytest.fixture(scope="module")
def engine(world):
    decoder, tokenizer, retriever, _ = world
    return Engine(decoder, tokenizer, CONFIG, retriever=retriever)


@pytest.fixture(scope="module")
def trajectories(world, engine):
    return engine.run(nnx.state(world[0]), world[3], SCRIPTED, KEY)


@contextlib.contextmanager
def log_compiles():
    """Log compilations of all threads (jax.log_compiles covers only the calling thread)."""
    jax.config.update("jax_log_compiles", True)
    try:
        yield
    finally:
        jax.config.update("jax_log_compiles", False)


def assert_same(first, second, tolerance=1e-5):
    for one, other in zip(first, second, strict=True):
        for name in ("tokens", "roles", "turns"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        for name in ("logps", "sampled_logps"):
            np.testing.assert_allclose(getattr(one, name), getattr(other, name), rtol=0, atol=tolerance)
        for name in ("starts", "segments", "searches", "ended"):
            assert getattr(one, name) == getattr(other, name)


def test_paused_slots_wait_fewer_steps_while_a_query_is_embedded(world, monkeypatch):
    decoder, tokenizer, _, requests = world
    passages = generate("train", seed=0, passages=60).passages
    retriever = make_retriever(passages, "exact", load_text_encoder("assets/miniwiki-encoder"))
    config = dataclasses.replace(CONFIG, wake_threshold=8)
    engine, pack_reply, runs = (
        Engine(decoder, tokenizer, config, retriever=retriever),
        Scheduler._pack_reply,
        [],
    )

    def pack_with_full_wait(scheduler, *parts):
        message = pack_reply(scheduler, *parts)
        message[-1] = config.max_wait_steps
        return message

    for change in (pack_reply, pack_with_full_wait):
        monkeypatch.setattr(Scheduler, "_pack_reply", change)
        runs.append(engine.run(nnx.state(decoder), requests, SCRIPTED, KEY))
        runs.append(engine.stats.row_steps)
    early, early_steps, late, late_steps = runs
    assert_same(early, late, 0)
    assert early_steps < late_steps and any(search.titles for t in early for search in t.searches)


def test_trajectories_are_in_the_order_of_the_requests_with_consistent_arrays(world, trajectories):
    assert [t.request for t in trajectories] == list(range(20))
    for trajectory, request in zip(trajectories, world[3], strict=True):
        count = len(trajectory.tokens)
        assert {len(trajectory.roles), len(trajectory.logps), len(trajectory.turns)} == {count}
        prompt = len(request.prompt)
        np.testing.assert_array_equal(trajectory.tokens[:prompt], request.prompt)
        assert (trajectory.roles[:prompt] == PROMPT).all()
        assert (trajectory.roles[prompt:] != PROMPT).all()
        assert ((trajectory.logps < 0) == (trajectory.roles == POLICY)).all()
        assert (np.diff(trajectory.turns) >= 0).all()
        assert count <= CONFIG.context


def test_observations_are_cut_between_their_tags(trajectories):
    observed = [
        text for t in trajectories for role, text in t.segments if role == ENVIRONMENT and "(Title" in text
    ]
    assert observed
    whole = re.compile(
        r"( again |\n<observation>\n[^<]*\n</observation>\n)+"
    )  # several if the policy wrote no text between them
    assert all(whole.fullmatch(text) for text in observed)


def test_the_jitted_loop_is_bitwise_equal_to_the_reference_loop(world, trajectories):
    decoder, tokenizer, retriever, requests = world
    engine = Engine(decoder, tokenizer, CONFIG, retriever=retriever)
    assert_same(
        trajectories, engine.run(nnx.state(decoder), requests, SCRIPTED, KEY, reference=True), tolerance=0
    )


def test_a_trajectory_does_not_depend_on_its_batch_or_slot(world, engine, trajectories):
    params, requests = nnx.state(world[0]), world[3]
    assert_same(
        trajectories[4:15][::-1], engine.run(params, requests[4:15][::-1], SCRIPTED, KEY), tolerance=0
    )
    assert_same([trajectories[17]], engine.run(params, [requests[17]], SCRIPTED, KEY), tolerance=0)


@pytest.mark.parametrize(
    "sizes",
    [
        {"rows": 3, "wake_threshold": 1, "prefill_tokens": 17, "max_wait_steps": 2},
        pytest.param({"rows": 1, "wake_threshold": 1}, marks=pytest.mark.slow),
        pytest.param(
            {"rows": 64, "workers": 2, "oversubscribed_slots": 8, "draft_tokens": 1}, marks=pytest.mark.slow
        ),
    ],
)
def test_a_trajectory_does_not_depend_on_slots_workers_chunks_or_drafts(
    world, trajectories, size_tolerance, sizes
):
    decoder, tokenizer, retriever, requests = world
    engine = Engine(decoder, tokenizer, dataclasses.replace(CONFIG, **sizes), retriever=retriever)
    results = engine.run(nnx.state(decoder), requests[4:15][::-1], SCRIPTED, KEY)
    assert_same(trajectories[4:15][::-1], results, size_tolerance)


@pytest.mark.parametrize("reference", [False, True])
def test_workers_share_the_requests_and_are_bitwise_equal_to_one_worker_of_as_many_rows(
    world, trajectories, reference
):
    decoder, tokenizer, retriever, requests = world
    engine = Engine(decoder, tokenizer, dataclasses.replace(CONFIG, rows=16, workers=2), retriever=retriever)
    params, ended = nnx.state(decoder), []
    results = engine.run(
        params, requests, SCRIPTED, KEY, reference=reference, on_finish=lambda i, t: ended.append(i)
    )
    assert_same(trajectories, results, tolerance=0)
    assert sorted(ended) == list(range(20))
    assert [scheduler.sizes.slots for scheduler in engine.loops.schedulers] == [8, 8] and all(
        scheduler.prefills.prefilled_tokens for scheduler in engine.loops.schedulers
    )
    assert sum(t.policy_tokens for t in results) == engine.stats.policy_tokens <= engine.stats.row_steps


def test_the_loop_of_all_workers_is_compiled_once(world, caplog):
    decoder, tokenizer, retriever, requests = world
    engine = Engine(decoder, tokenizer, dataclasses.replace(CONFIG, workers=2, rows=10), retriever=retriever)
    with log_compiles(), caplog.at_level("WARNING"):
        engine.run(nnx.state(decoder), requests, SCRIPTED, KEY)
    assert sum("Finished XLA compilation of jit(episode_loop)" in line for line in caplog.messages) == 1


def test_workers_must_divide_the_rows_and_exist_on_one_cpu_only(world):
    decoder, tokenizer, *_ = world
    cores = len(os.sched_getaffinity(0))
    for workers in (3, 4 * cores):
        with pytest.raises(
            UserError, match=rf"rollout\.workers={workers} must divide rollout\.rows=8, and be at most"
        ):
            Engine(decoder, tokenizer, dataclasses.replace(CONFIG, workers=workers))
    mesh = make_mesh(2, 1, 1, devices=jax.devices()[:2])
    assert Engine(decoder, tokenizer, dataclasses.replace(CONFIG, workers=3), mesh=mesh).programs.workers == 1
    assert Engine(decoder, tokenizer, dataclasses.replace(CONFIG, rows=24)).programs.workers == min(3, cores)


@pytest.mark.parametrize("shape", [(8, 1, 1), (2, 2, 2), (4, 1, 2)])
def test_eight_devices_give_the_same_trajectories(world, trajectories, shape):
    decoder, tokenizer, retriever, requests = world
    mesh = make_mesh(*shape)
    engine = Engine(decoder, tokenizer, CONFIG, retriever=retriever, mesh=mesh)
    assert_same(trajectories, engine.run(shard(nnx.state(decoder), mesh), requests, SCRIPTED, KEY))


def test_parameters_on_another_device_are_an_error(world):
    decoder, tokenizer, _, requests = world
    engine = Engine(decoder, tokenizer, CONFIG, mesh=make_mesh(2, devices=jax.devices()[:2]))
    with pytest.raises(Exception, match="Disallowed device-to-device transfer"):
        engine.run(nnx.state(decoder), requests[:1], SingleTurn(turn_tokens=4), KEY)


def test_busy_is_the_share_of_rows_that_write(world, engine):
    start = RolloutStats()
    assert (start.busy, start.tokens_per_second) == (0, 0)
    results = engine.run(nnx.state(world[0]), world[3][4:5], SCRIPTED, KEY)
    one = engine.stats
    assert one.policy_tokens == results[0].policy_tokens and one.row_steps == 8 * one.policy_tokens
    assert one.busy == 1 / 8 and one.tokens_per_second == one.policy_tokens / one.seconds
    engine.run(nnx.state(world[0]), world[3][4:8], SCRIPTED, KEY)
    both = one + engine.stats
    assert 1 / 8 < both.busy < engine.stats.busy <= 4 / 8


def test_rollout_log_probabilities_equal_those_of_training(world, trajectories):
    decoder = world[0]
    packed = pack([t.tokens for t in trajectories], [t.roles == POLICY for t in trajectories], 192)
    batch = jax.tree.map(jnp.asarray, packed.batch)
    scores = np.asarray(jax.jit(lambda b: token_logprobs(decoder, b).logp)(batch))
    for logps, t in zip(
        packed.unpack(scores, [len(t.tokens) for t in trajectories]), trajectories, strict=True
    ):
        np.testing.assert_allclose(logps, t.logps, atol=1e-5)


def test_sampled_log_probabilities_follow_temperature_and_truncation_of_each_request(world, trajectories):
    tokens = np.zeros((20, CONFIG.context), np.int32)
    for row, t in enumerate(trajectories):
        tokens[row, : len(t.tokens)] = t.tokens
    temperatures = np.array([max(TEMPERATURES[t.request % 5], 1e-9) for t in trajectories])

    @jax.jit
    def sampled(tokens, temperatures):
        hidden = world[0](tokens, positions=jnp.broadcast_to(jnp.arange(CONFIG.context), tokens.shape))
        logits = (world[0].unembed(hidden) / temperatures[:, None, None]).reshape(tokens.size, -1)
        logps = jax.nn.log_softmax(truncate(logits, top_p=CONFIG.top_p, top_k=CONFIG.sample_top_k))
        drawn = jnp.roll(tokens, -1, axis=1).reshape(-1, 1)
        return jnp.take_along_axis(logps, drawn, axis=-1).reshape(tokens.shape)

    wanted = np.asarray(sampled(tokens, temperatures))
    for row, t in enumerate(trajectories):
        own = np.flatnonzero(t.roles == POLICY)
        np.testing.assert_allclose(t.sampled_logps[own], wanted[row, own - 1], atol=1e-4)


class TwoContexts(SingleTurn):
    """Repeats the prompt in a second context."""

    def step(self, episode, text, stop):
        return Finish("done") if episode.turn else Restart(np.asarray([5, 6, 7], np.int32))


def test_each_token_of_a_trajectory_has_its_own_random_number(world, engine):
    """With equally likely tokens, the sampled token shows the random number."""
    uniform = jax.tree.map(jnp.zeros_like, nnx.state(world[0]))
    batch = [Request(request.question, np.asarray([5, 6, 7]), request.seed) for request in world[3][:4]]
    results = engine.run(uniform, batch, TwoContexts(turn_tokens=40), KEY)
    drawn = [t.tokens[t.roles == POLICY] for t in results]
    for tokens in drawn:  # 80 draws from 300 tokens give about 70 different tokens
        assert len(tokens) > 60 and len(set(tokens.tolist())) > 0.7 * len(tokens)
    assert len({tokens.tobytes() for tokens in drawn}) == 4


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


@pytest.mark.parametrize("token", [-1, 416])
def test_a_prompt_with_a_token_outside_the_vocabulary_is_refused(world, token):
    strange = Request(world[3][0].question, np.array([1, token, 2], np.int32), 0)
    with pytest.raises(UserError, match=rf"has token {token}; the model's token ids are 0 to 415"):
        Engine(*world[:2], CONFIG).run(nnx.state(world[0]), [strange], SingleTurn(), KEY)


def test_a_second_run_compiles_nothing(world, caplog):
    decoder, tokenizer, retriever, requests = world
    engine, params = Engine(decoder, tokenizer, CONFIG, retriever=retriever), nnx.state(decoder)

    def compiled(batch, key):
        caplog.clear()
        with log_compiles():
            engine.run(params, batch, SCRIPTED, key)
        return [line for line in caplog.messages if "Finished XLA compilation" in line]

    with caplog.at_level("INFO", "rrl.rollout.loop_runner"):
        assert compiled([dataclasses.replace(requests[0], stops=("o",)), *requests[1:]], jax.random.key(0))
    assert (
        "compiling 1 rollout workers, each with 8 slots x 192 tokens: decode steps of 8 rows; prefills of 1 chunks x 32 tokens "
        "on each of 1 data shards, turns of 12 tokens, 2 stop strings"
    ) in caplog.messages
    # Fewer and other questions, other temperatures, turn lengths and stop strings: only array values change.
    others = [
        dataclasses.replace(r, seed=r.seed + 50, temperature=0.3, turn_tokens=7) for r in requests[3:14]
    ]
    assert compiled(others, jax.random.key(1)) == []


def test_another_number_of_stop_strings_needs_another_compilation_which_is_logged(world, caplog):
    decoder, tokenizer, _, requests = world
    engine = Engine(decoder, tokenizer, CONFIG)
    with caplog.at_level("INFO", "rrl.rollout.loop_runner"):
        for stops in (("qx",), ("qx", "qy")):  # both have the same first accepting state
            engine.run(
                nnx.state(decoder), [dataclasses.replace(requests[0], stops=stops)], SingleTurn(4), KEY
            )
    assert (
        len([line for line in caplog.messages if line.startswith("compiling")])
        == len(engine.loops.compiled)
        == 2
    )


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


@pytest.mark.parametrize("tied", [False, True])
def test_both_loops_compute_in_float32_with_bfloat16_weights(world, tied):
    config = dataclasses.replace(world[0].config, tie_embeddings=tied)
    decoder = Decoder(config, rngs=nnx.Rngs(1), dtype=jnp.float32, param_dtype=jnp.bfloat16)
    engine = Engine(decoder, world[1], CONFIG)
    given = nnx.state(decoder), world[3][:3], SingleTurn(turn_tokens=8), KEY
    assert_same(engine.run(*given), engine.run(*given, reference=True), tolerance=0)


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


def test_a_cached_stop_table_serves_subsets_and_the_cache_is_bounded(world):
    engine = Engine(*world[:2], CONFIG)
    both = engine._stop_tables.get([("e",), ("o",), ()])
    assert engine._stop_tables.get([("o",), ("e",)]) is both
    tables = [engine._stop_tables.get([(letter,)]) for letter in "abcdfgh"]
    assert engine._stop_tables.get([()]) is both and all(table is not both for table in tables)
    engine._stop_tables.get([("i",)])
    assert len(engine._stop_tables) == CACHED_STOP_TABLES and engine._stop_tables.get([()]) is not both


def test_a_stop_string_with_a_special_token_is_refused(world):
    decoder, tokenizer, _, requests = world
    engine = Engine(decoder, tokenizer, CONFIG)
    for strings in (("<|im_end|>",), ("e", "x<|im_start|>")):
        with pytest.raises(
            UserError, match=r"the stop string '.*' would never match: '<\|im_\w+\|>' is a special token"
        ):
            engine.run(nnx.state(decoder), [dataclasses.replace(requests[0], stops=strings)], SCRIPTED, KEY)


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


@pytest.mark.parametrize(
    ("invalid", "message"),
    [
        ({"sample_top_k": 417}, r"rollout\.sample_top_k=417 must be at most 416, the model's vocab_size"),
        ({"rows": 3}, r"rollout\.rows=3 must be a multiple of data x fsdp = 2 shards"),
        ({"search_seconds": None}, r"search_seconds=None must be a number"),
        ({"top_p": "0.9"}, r"top_p='0\.9' must be a number"),
        ({"search_seconds": 0}, r"search_seconds=0 must be above 0"),
        ({"search_seconds": float("nan")}, r"search_seconds=nan must be above 0"),
        ({"stall_seconds": float("nan")}, r"stall_seconds=nan must be at least 0"),
        ({"context": float("nan")}, r"context=nan must be a whole number"),
        ({"rows": 8.0}, r"rows=8\.0 must be a whole number"),
    ],
)
def test_an_invalid_size_is_refused_with_the_name_of_its_field(world, invalid, message):
    with pytest.raises(UserError, match=message):
        Engine(
            *world[:2], dataclasses.replace(CONFIG, **invalid), mesh=make_mesh(2, devices=jax.devices()[:2])
        )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"turn_tokens": 0}, r"SimpleNamespace\.turn_tokens=0 must be at least 1"),
        (
            {"observation_tokens": float("nan")},
            r"SimpleNamespace\.observation_tokens=nan must be a whole number",
        ),
        ({"stops": ["e"]}, r"SimpleNamespace\.stops: \['e'\] must be a tuple of strings"),
        (
            {"stops": ("e", "<eos>")},
            r"SimpleNamespace\.stops: '<eos>' is reserved",
        ),
    ],
)
def test_an_invalid_environment_is_refused_with_the_name_of_its_field(world, engine, fields, message):
    environment = SimpleNamespace(**{"turn_tokens": 1, "observation_tokens": 0, "stops": ()} | fields)
    with pytest.raises(UserError, match=message):
        engine.run(nnx.state(world[0]), world[3], environment, KEY)


def test_a_retriever_with_another_query_encoder_is_refused(world, engine):
    other = SimpleNamespace(needs_embeddings=True, text_encoder=SimpleNamespace(dim=24), kind="exact")
    with pytest.raises(
        UserError, match=r"retriever: its exact index needs queries of 24 .* encoder gives none"
    ):
        engine.run(nnx.state(world[0]), world[3], SCRIPTED, KEY, retriever=other)


def test_a_tokenizer_larger_than_the_model_is_refused(world):
    decoder, tokenizer, _, _ = world
    small = Decoder(dataclasses.replace(decoder.config, vocab_size=100), rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match="vocab_size is 100"):
        Engine(small, tokenizer, CONFIG)
