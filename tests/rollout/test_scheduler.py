"""The scheduler: what it sends in one exchange, and how it carries out what the environment returns."""

import collections
import dataclasses

import numpy as np
import pytest

from rrl.data.questions import Question
from rrl.errors import UserError
from rrl.rollout.automaton import compile_sets
from rrl.rollout.episodes import Request
from rrl.rollout.exchange import (
    ABORT,
    CHUNK_TOKENS,
    DECODING,
    HEADER_LENGTH,
    PAUSED,
    PREFILLS_PER_EXCHANGE,
    STOP_EOS,
    STOP_TURN,
    DeviceReport,
    ExchangeSizes,
    PrefillChunk,
)
from rrl.rollout.protocol import CONTEXT, Append, Finish, Restart, SearchFor, SingleTurn
from rrl.rollout.scheduler import Scheduler
from rrl.rollout.searches import SearchRunner
from tests.rollout.empty_text import EmptyText

SIZES = ExchangeSizes(slots=3, context=400, wake_threshold=2, prefill_tokens=2 * CHUNK_TOKENS, query_tokens=0)
NO_EMBEDDINGS = np.zeros((0, 0), np.float32)


def make_scheduler(*prompts, share_prompts=False):
    """A scheduler whose slots wait for these prompts."""
    requests = [Request(Question(str(i), "", ()), np.asarray(p, np.int32), i) for i, p in enumerate(prompts)]
    scheduler = Scheduler(
        collections.deque([list(enumerate(requests))]),
        SingleTurn(turn_tokens=4),
        compile_sets([()], [b"a"] * 500),
        SIZES,
        EmptyText(vocab_size=500),
        SearchRunner(None, top_k=3, time_limit=60.0),
        share_prompts=share_prompts,
    )
    scheduler.fill()
    return scheduler


def next_chunks(scheduler):
    """Headers and tokens of the chunks of the next exchange. Slots without a prefill request decode."""
    slots = SIZES.slots
    ids = np.zeros((slots, 4))
    status = np.array([PAUSED if slot in scheduler.prefills else DECODING for slot in range(slots)])
    report = DeviceReport(status, np.zeros(slots), ids, ids, ids, np.zeros(slots))
    message = scheduler.exchange(report, NO_EMBEDDINGS)
    assert scheduler.error is None
    rows = message[: SIZES.chunks * (HEADER_LENGTH + SIZES.chunk_tokens)].reshape(SIZES.chunks, -1)
    chunks = [(PrefillChunk(*map(int, row[:HEADER_LENGTH])), row[HEADER_LENGTH:]) for row in rows]
    return [(header, tokens[: header.length].tolist()) for header, tokens in chunks if header.slot < slots]


def test_a_text_is_sent_in_chunks_and_its_turn_begins_after_the_last():
    prompts = [np.arange(200), np.arange(100) + 200, np.arange(150) + 300]
    scheduler = make_scheduler(*prompts)
    assert SIZES.chunks == PREFILLS_PER_EXCHANGE * 2 == 12
    first, second = next_chunks(scheduler), next_chunks(scheduler)
    assert [header.slot for header, _ in first] == [0] * 7 + [1] * 4 + [2]  # no room for more of the third
    assert [header.slot for header, _ in second] == [2] * 4
    for slot, prompt in enumerate(prompts):
        chunks = [(header, tokens) for header, tokens in first + second if header.slot == slot]
        assert [token for _, tokens in chunks for token in tokens] == prompt[:-1].tolist()
        assert [header.start for header, _ in chunks] == list(range(0, len(prompt) - 1, CHUNK_TOKENS))
        assert [header.begins_turn for header, _ in chunks] == [0] * (len(chunks) - 1) + [1]
        assert chunks[-1][0].pending == prompt[-1]
    assert scheduler.prefills.prefilled_tokens == 199 + 99 + 149


def test_fill_takes_at_most_the_given_number_of_groups_and_finishes_a_group_first():
    scheduler = make_scheduler(np.arange(5))  # one request for three slots
    requests = [Request(Question(str(i), "", ()), np.arange(5, dtype=np.int32), i) for i in range(1, 8)]
    scheduler.groups.extend(
        [list(enumerate(requests[:1])), list(enumerate(requests[1:4])), list(enumerate(requests[4:]))]
    )
    slots = scheduler.slots
    assert scheduler.fill(0) == 0 and [state is None for state in slots] == [False, True, True]
    assert scheduler.fill(1) == 1 and slots[1].request.seed == 1 and slots[2] is None
    assert scheduler.fill(1) == 1 and slots[2].request.seed == 2 and len(scheduler.groups) == 1
    slots[0] = None
    assert scheduler.fill(1) == 0 and slots[0].request.seed == 3 and len(scheduler.groups) == 1


def copies(scheduler):
    return [(header.slot, header.source, header.copied) for header, _ in next_chunks(scheduler)]


def test_samples_of_a_prompt_copy_it_in_the_exchange_that_prefills_it():
    prompt = np.arange(70)
    scheduler = make_scheduler(prompt, prompt, prompt, share_prompts=True)
    assert copies(scheduler) == [(0, 0, 0)] * 3 + [(1, 0, -69), (2, 0, -69)]
    assert not scheduler.prefills and not copies(scheduler)


def test_a_prompt_of_two_exchanges_is_copied_in_the_second_and_extended_in_the_third():
    prompt, longer = np.arange(390), np.arange(398)
    scheduler = make_scheduler(prompt, prompt, longer, share_prompts=True)
    assert copies(scheduler) == [(0, 0, 0)] * SIZES.chunks
    assert copies(scheduler) == [(0, 0, 0), (1, 0, -389)]
    assert copies(scheduler) == [(2, 0, 389)]  # the chunk after the copy attends to it


@pytest.mark.parametrize(("most", "expected"), [(1, [[1], [2]]), (2, [[1, 2], []])])
def test_the_number_of_copies_per_exchange_is_limited(monkeypatch, most, expected):
    monkeypatch.setattr(ExchangeSizes, "max_copies", most)
    prompt = np.arange(70)
    scheduler = make_scheduler(prompt, prompt, prompt, share_prompts=True)
    for slots in expected:
        assert [slot for slot, _, copied in copies(scheduler) if copied] == slots


class FixedAction(SingleTurn):
    """Reacts to every turn with `action`, which a test sets."""

    def step(self, episode, text, stop):
        return self.action


def set_action(scheduler, action, environment=FixedAction):
    """Give the scheduler an environment that reacts with `action`; return the environment."""
    scheduler.environment = made = environment(turn_tokens=4)
    object.__setattr__(made, "action", action)
    return made


def pause_all(scheduler, stop=STOP_EOS):
    """Return the reply to slots that all wrote one token and paused."""
    ids = np.zeros((SIZES.slots, 4), np.int32)
    ones = np.ones(SIZES.slots, np.int64)
    return scheduler.exchange(DeviceReport(ones * PAUSED, ones * stop, ids, ids, ids, ones), NO_EMBEDDINGS)


def encode_characters(scheduler):
    """Let each character of an observation be one token."""
    scheduler.text.encode = lambda text: np.zeros(len(text), np.int32)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (
            None,
            r"environment FixedAction returned None in turn 0 of question '0'; it must be SearchFor, Append",
        ),
        (Restart(np.zeros(0, np.int32)), r"the prompt of a Restart of question '0' is empty"),
        (
            Restart(np.array([1, 500])),
            r"a Restart of question '0' has token 500; the model's token ids are 0 to 499",
        ),
        (Restart(np.array([1, -7])), r"a Restart of question '0' has token -7"),
        (
            Restart(np.ones(2)),
            r"a Restart of question '0' must be a 1-D array of token ids, found float64 of shape",
        ),
        (
            SearchFor(None),
            r"environment FixedAction searches for None in turn 0 of question '0'; a query must be a string",
        ),
        (SearchFor("a", (7,)), r"searches for 7 in turn 0"),
    ],
)
def test_an_invalid_action_is_an_error_that_names_it_and_ends_all_schedulers(action, message):
    scheduler, other = make_scheduler([1, 2]), make_scheduler([3, 4], [5, 6])
    for one in (scheduler, other):
        next_chunks(one)
    other.aborted = scheduler.aborted
    set_action(scheduler, action)
    assert pause_all(scheduler)[-1] == ABORT
    assert isinstance(scheduler.error, UserError)
    with pytest.raises(UserError, match=message):
        raise scheduler.error
    assert pause_all(other)[-1] == ABORT and other.error is None


@pytest.mark.parametrize(
    ("action", "ended"),
    [
        (Append("x" * 397), []),  # the message of `overflow` leaves one token for the policy
        (Append("x" * 398), ["context_limit"]),
        (Restart(np.zeros(399, np.int32)), []),
        (Restart(np.zeros(400, np.int32)), ["context_limit"]),
    ],
)
def test_an_episode_ends_if_the_message_of_overflow_does_not_fit_either(action, ended):
    class Shortens(FixedAction):
        def overflow(self, episode, message, room):
            if isinstance(message, Restart):
                # The last token of the prompt stays pending, and the policy writes at least one token.
                assert room == SIZES.context - 2
                return Restart(message.prompt[1:])
            assert room == SIZES.context - 2 - 1  # two tokens of the prompt, one token of the policy
            return dataclasses.replace(message, prefix=message.prefix[1:])

    scheduler, trajectories = make_scheduler([1, 2]), []
    encode_characters(scheduler)
    scheduler.on_finish = lambda _, trajectory: trajectories.append(trajectory)
    set_action(scheduler, action, Shortens)
    next_chunks(scheduler)
    pause_all(scheduler)
    assert scheduler.error is None and [trajectory.ended for trajectory in trajectories] == ended
    assert all(trajectory.cuts == ((0, "room"),) for trajectory in trajectories)


def test_limits_that_do_not_end_the_episode_are_recorded():
    """A turn that reached its token limit and was answered, and an observation that was cut."""
    scheduler, trajectories = make_scheduler([1, 2]), []
    encode_characters(scheduler)
    scheduler.on_finish = lambda _, trajectory: trajectories.append(trajectory)
    environment = set_action(scheduler, None)
    object.__setattr__(environment, "observation_tokens", 8)
    for action, stop in (
        (Append("", "x" * 9), STOP_TURN),
        (Append("", "x" * 8), STOP_TURN),
        (Finish("answer"), STOP_EOS),
    ):
        object.__setattr__(environment, "action", action)
        next_chunks(scheduler)
        pause_all(scheduler, stop)
    (trajectory,) = trajectories
    assert trajectory.cuts == ((0, "turn_tokens"), (0, "observation_tokens"), (1, "turn_tokens"))


@pytest.mark.parametrize(
    ("invalid", "message"),
    [
        ({"temperature": -0.1}, r"request\.temperature=-0\.1 must be at least 0"),
        ({"temperature": float("nan")}, r"request\.temperature=nan must be at least 0"),
        ({"turn_tokens": -1}, r"request\.turn_tokens=-1 must be at least 0"),
        ({"seed": -1}, r"request\.seed=-1 must be at least 0"),
        ({"seed": 2**31}, r"request\.seed=2147483648 must be at most 2147483647"),
        ({"temperature": float("inf")}, r"request\.temperature=inf must be at most 3\.4"),
        ({"seed": 1.5}, r"request\.seed=1\.5 must be a whole number"),
        ({"group": float("nan")}, r"request\.group=nan must be a whole number"),
        ({"turn_tokens": "1"}, r"request\.turn_tokens='1' must be a whole number"),
        ({"prompt": np.zeros(0, np.int32)}, r"the prompt of question 'q' is empty: give at least one token"),
        (
            {"prompt": "who?"},
            r"the prompt of question 'q' must be a 1-D array of token ids, found str; .*chat_ids",
        ),
        (
            {"prompt": np.ones((1, 3), np.int32)},
            r"must be a 1-D array of token ids, found int32 of shape \(1, 3\)",
        ),
        ({"prompt": np.ones(3)}, r"must be a 1-D array of token ids, found float64 of shape \(3,\)"),
        ({"stops": "e"}, r"request\.stops of question 'q': 'e' must be a tuple of strings"),
        ({"stops": (CONTEXT,)}, r"'<context>' is reserved; choose another stop string"),
    ],
)
def test_an_invalid_request_is_refused_with_the_name_of_its_field(invalid, message):
    fields = {"prompt": np.zeros(3, np.int32), "seed": 0} | invalid
    with pytest.raises(UserError, match=message):
        Request(Question("q", "", ()), **fields)


@pytest.mark.parametrize(
    ("tokens", "reserve_tokens", "shortened"),
    [(396, 1, False), (397, 1, True), (397, 0, True), (297, 100, False), (298, 100, True)],
)
def test_a_message_must_leave_its_reserve_tokens_and_at_least_one(tokens, reserve_tokens, shortened):
    class RecordsRoom(FixedAction):
        def overflow(self, episode, message, room):
            rooms.append(room)
            return Append()

    scheduler, rooms = make_scheduler([1, 2]), []
    encode_characters(scheduler)
    set_action(scheduler, Append("x" * tokens, reserve_tokens=reserve_tokens), RecordsRoom)
    next_chunks(scheduler)
    pause_all(scheduler)
    assert scheduler.error is None and rooms == [397] * shortened


def test_slots_with_equal_queries_share_one_search():
    class Broken:
        needs_embeddings = False

        def search(self, queries, k, vectors=None):
            searched.append(queries)
            raise LookupError("gone")

    class Observes(FixedAction):
        def observe(self, episode, passages):
            return Append("found" if passages else "nothing")

    searched, scheduler = [], make_scheduler([1, 2], [3, 4], [5, 6])
    encode_characters(scheduler)
    scheduler.search_requests.runner.retriever = Broken()
    set_action(scheduler, SearchFor("a"), Observes)
    next_chunks(scheduler)
    pause_all(scheduler)
    while scheduler.search_requests.requesters:
        next_chunks(scheduler)
    assert scheduler.error is None and searched == [["a"]] and scheduler.search_requests.failed == 3
    assert [state.episode.searches[0].failed for state in scheduler.slots] == [True] * 3
