"""Searches overlap with the decoding of other slots, on one device or several. A stalled rollout is logged, an interrupted one
ends."""

import concurrent.futures
import dataclasses
import os
import signal
import threading
import time

import jax
import pytest
from flax import nnx

from rrl.errors import UserError
from rrl.parallel.mesh import make_mesh
from rrl.parallel.rules import shard
from rrl.rollout.config import EngineConfig
from rrl.rollout.engine import Engine
from rrl.rollout.episodes import Request
from rrl.rollout.protocol import Append, Finish, SearchFor, SingleTurn
from rrl.rollout.searches import SearchRunner
from tests.rollout.world import make_world

KEY = jax.random.key(3)
CONFIG = EngineConfig(rows=2, context=192, wake_threshold=1, prefill_tokens=32, max_wait_steps=8)


@pytest.fixture(scope="module")
def world():
    return make_world()


class FirstSearches(SingleTurn):
    """The first question searches after one token, the others write until their token limit."""

    def step(self, episode, text, stop):
        if episode.question.id != FIRST or episode.searches:
            return Finish("done")
        return SearchFor("a")

    def observe(self, episode, passages):
        return Append("found")


class AnswersOnGo:
    """A retriever that answers once `go` is set."""

    needs_embeddings = False

    def __init__(self):
        self.go, self.in_time = threading.Event(), []

    def search(self, queries, k, vectors=None):
        self.in_time.append(self.go.wait(120))
        return [[] for _ in queries]


FIRST = "first"


@pytest.mark.parametrize("sizes", [None, (2, 1, 1)])
def test_a_slot_decodes_while_another_waits_for_its_search(world, sizes, monkeypatch):
    decoder, tokenizer, _, requests = world
    mesh = None if sizes is None else make_mesh(*sizes, devices=jax.devices()[:2])
    retriever = AnswersOnGo()
    engine = Engine(
        decoder, tokenizer, dataclasses.replace(CONFIG, workers=1), retriever=retriever, mesh=mesh
    )
    params = nnx.state(decoder) if mesh is None else shard(nnx.state(decoder), mesh)
    batch = [
        dataclasses.replace(
            requests[0], question=dataclasses.replace(requests[0].question, id=FIRST), turn_tokens=1
        ),
        dataclasses.replace(requests[1], turn_tokens=100),
    ]
    waits, poll = [], SearchRunner.poll

    def recorded(searches, *, wait=0.0):
        waits.append(0.0 if retriever.go.is_set() or not len(searches) else wait)
        return poll(searches, wait=wait)

    monkeypatch.setattr(SearchRunner, "poll", recorded)
    first, _ = engine.run(
        params,
        batch,
        FirstSearches(turn_tokens=100),
        KEY,
        on_finish=lambda place, trajectory: retriever.go.set() if place else None,
    )
    assert retriever.in_time == [True] and not first.searches[0].failed
    assert not any(waits)  # a scheduler that waits stops the slots of all data shards


def test_a_user_error_of_the_retriever_ends_the_run(world):
    class Wrong(AnswersOnGo):
        def search(self, queries, k, vectors=None):
            raise UserError("k: got 0")

    decoder, tokenizer, _, requests = world
    first = Request(dataclasses.replace(requests[0].question, id=FIRST), requests[0].prompt, 0)
    engine = Engine(decoder, tokenizer, CONFIG, retriever=Wrong())
    with pytest.raises(UserError, match="k: got 0"):
        engine.run(nnx.state(decoder), [first], FirstSearches(turn_tokens=4), KEY)


@pytest.fixture
def interruptible():
    """Handle Ctrl-C, which a shell disables for background processes."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_all_workers_before_their_episodes_end(world, workers):
    decoder, tokenizer, _, requests = world
    engine = Engine(decoder, tokenizer, dataclasses.replace(CONFIG, workers=workers))
    finished = []

    def finish(place, trajectory):
        if not finished:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)  # the other worker waits too: the main thread may get its core late
        finished.append(place)

    class Slow(SingleTurn):
        def step(self, episode, text, stop):
            time.sleep(0.2)
            return Finish("done")

    with pytest.raises(KeyboardInterrupt):
        engine.run(nnx.state(decoder), requests, Slow(turn_tokens=4), KEY, on_finish=finish)
    assert 0 < len(finished) < len(requests)


def test_an_interrupt_between_the_starts_of_two_workers_ends_the_first(world, monkeypatch):
    decoder, tokenizer, _, requests = world
    engine = Engine(decoder, tokenizer, dataclasses.replace(CONFIG, workers=2))
    submit, begun, finished = concurrent.futures.ThreadPoolExecutor.submit, [], []

    def interrupted(pool, *arguments):
        if pool._thread_name_prefix == "rrl-rollout" and begun:
            raise KeyboardInterrupt
        begun.append(submit(pool, *arguments))
        return begun[-1]

    monkeypatch.setattr(concurrent.futures.ThreadPoolExecutor, "submit", interrupted)

    class Slow(SingleTurn):
        def step(self, episode, text, stop):
            time.sleep(0.05)
            return Finish("done")

    with pytest.raises(KeyboardInterrupt):
        engine.run(
            nnx.state(decoder), requests, Slow(turn_tokens=4), KEY, on_finish=lambda *a: finished.append(a)
        )
    assert len(finished) < len(requests) / 2


def test_a_stalled_rollout_logs_the_scheduler_and_its_stage(world, caplog):
    class Stuck(SingleTurn):
        def step(self, episode, text, stop):
            time.sleep(1.0)
            return Finish("done")

    decoder, tokenizer, _, requests = world
    engine = Engine(decoder, tokenizer, dataclasses.replace(CONFIG, workers=1, stall_seconds=0.3))
    engine.run(nnx.state(decoder), requests[:1], Stuck(turn_tokens=4), KEY)
    assert "made no progress for 0.3 s: scheduler 0 reading what the policy wrote, after" in caplog.text


def test_workers_run_concurrently_in_the_first_run_too(world):
    meet = threading.Barrier(2, timeout=120)

    class Meets(SingleTurn):
        def step(self, episode, text, stop):
            meet.wait()
            return Finish("done")

    decoder, tokenizer, _, requests = world
    engine = Engine(decoder, tokenizer, dataclasses.replace(CONFIG, workers=2))
    assert len(engine.run(nnx.state(decoder), requests[:2], Meets(turn_tokens=4), KEY)) == 2


class AllSearch(SingleTurn):
    """Every question searches for the same query after one token."""

    def step(self, episode, text, stop):
        return Finish("done") if episode.searches else SearchFor("the same")

    def observe(self, episode, passages):
        return Append("found")


@pytest.mark.parametrize("sizes", [None, (2, 1, 1)])
def test_workers_and_data_shards_share_one_search_of_equal_queries(world, sizes):
    class AnswersOnceAllSearch:
        needs_embeddings = False

        def __init__(self):
            self.searched = []

        def search(self, queries, k, vectors=None):
            self.searched.append(list(queries))
            until = time.perf_counter() + 120
            while (
                sum(scheduler.policy_tokens for scheduler in engine.loops.schedulers) < 8
                and time.perf_counter() < until
            ):
                time.sleep(0.01)
            time.sleep(0.1)
            return [[] for _ in queries]

    decoder, tokenizer, _, requests = world
    mesh = None if sizes is None else make_mesh(*sizes, devices=jax.devices()[:2])
    config = dataclasses.replace(CONFIG, rows=16, wake_threshold=8, workers=2)
    engine = Engine(decoder, tokenizer, config, retriever=(retriever := AnswersOnceAllSearch()), mesh=mesh)
    params = nnx.state(decoder) if mesh is None else shard(nnx.state(decoder), mesh)
    results = engine.run(params, requests[:8], AllSearch(turn_tokens=1), KEY)
    assert len(engine.loops.schedulers) == 2 and all(
        scheduler.policy_tokens for scheduler in engine.loops.schedulers
    )
    assert retriever.searched == [["the same"]] and all(len(t.searches) == 1 for t in results)
