"""What the host sends in one exchange: texts in pieces, first come, first served, as far as there is room."""

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
    HEADER,
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

SIZES = ExchangeSizes(rows=3, context=400, wake_threshold=2, prefill_tokens=2 * CHUNK_TOKENS, query_tokens=0)
NONE = np.zeros((0, 0), np.float32)


def host(*prompts, share_prompts=False):
    """A host whose rows wait for these prompts."""
    requests = [Request(Question(str(i), "", ()), np.asarray(p, np.int32), i) for i, p in enumerate(prompts)]
    made = Scheduler(
        collections.deque([list(enumerate(requests))]),
        SingleTurn(turn_tokens=4),
        compile_sets([()], [b"a"] * 500),
        SIZES,
        encode=lambda text: np.zeros(0, np.int32),
        decode=lambda ids: "",
        encode_prompt=lambda text: np.zeros(0, np.int32),
        vocab_size=500,
        share_prompts=share_prompts,
    )
    made.fill()
    return made


def pieces(made):
    """The pieces of the next exchange, with their tokens; rows that have been fed decode."""
    rows = SIZES.rows
    ids = np.zeros((rows, 4))
    status = np.array([PAUSED if row in made.todo else DECODING for row in range(rows)])
    turns = DeviceReport(status, np.zeros(rows), ids, ids, ids, np.zeros(rows))
    words = made.exchange(turns, NONE)
    assert made.error is None
    sent = words[: SIZES.pieces * (HEADER + SIZES.piece)].reshape(SIZES.pieces, -1)
    found = [(PrefillChunk(*map(int, line[:HEADER])), line[HEADER:]) for line in sent]
    return [(feed, tokens[: feed.length].tolist()) for feed, tokens in found if feed.row < rows]


def test_a_text_travels_in_pieces_and_its_turn_begins_with_the_last():
    prompts = [np.arange(200), np.arange(100) + 200, np.arange(150) + 300]
    made = host(*prompts)
    assert SIZES.pieces == PREFILLS_PER_EXCHANGE * 2 == 12
    first, second = pieces(made), pieces(made)
    assert [feed.row for feed, _ in first] == [0] * 7 + [1] * 4 + [2]  # no room for more of the third
    assert [feed.row for feed, _ in second] == [2] * 4
    for row, prompt in enumerate(prompts):
        of_row = [(feed, tokens) for feed, tokens in first + second if feed.row == row]
        assert [token for _, tokens in of_row for token in tokens] == prompt[:-1].tolist()
        assert [feed.start for feed, _ in of_row] == list(range(0, len(prompt) - 1, CHUNK_TOKENS))
        assert [feed.begin for feed, _ in of_row] == [0] * (len(of_row) - 1) + [1]
        assert of_row[-1][0].pending == prompt[-1]
    assert made.prefilled == 199 + 99 + 149


def test_a_host_takes_as_many_groups_as_it_is_told_and_what_is_left_of_one_comes_first():
    made = host(np.arange(5))  # one request of three rows
    requests = [Request(Question(str(i), "", ()), np.arange(5, dtype=np.int32), i) for i in range(1, 8)]
    made.groups.extend(
        [list(enumerate(requests[:1])), list(enumerate(requests[1:4])), list(enumerate(requests[4:]))]
    )
    assert made.fill(0) == 0 and [live is None for live in made.rows] == [False, True, True]
    assert made.fill(1) == 1 and made.rows[1].request.seed == 1 and made.rows[2] is None
    assert made.fill(1) == 1 and made.rows[2].request.seed == 2 and len(made.groups) == 1
    made.rows[0] = None
    assert made.fill(1) == 0 and made.rows[0].request.seed == 3 and len(made.groups) == 1


def copied(made):
    return [(feed.row, feed.source, feed.copied) for feed, _ in pieces(made)]


def test_samples_of_a_prompt_copy_it_in_the_exchange_that_prefills_it():
    prompt = np.arange(70)
    made = host(prompt, prompt, prompt, share_prompts=True)
    assert copied(made) == [(0, 0, 0)] * 3 + [(1, 0, -69), (2, 0, -69)]
    assert not made.todo and not copied(made)


def test_a_prompt_that_takes_two_exchanges_is_copied_in_the_second_and_one_that_goes_on_after_it():
    prompt, longer = np.arange(390), np.arange(398)
    made = host(prompt, prompt, longer, share_prompts=True)
    assert copied(made) == [(0, 0, 0)] * SIZES.pieces
    assert copied(made) == [(0, 0, 0), (1, 0, -389)]
    assert copied(made) == [(2, 0, 389)]  # what follows is prefilled, and reads what is copied


@pytest.mark.parametrize(("copies", "served"), [(1, [[1], [2]]), (2, [[1, 2], []])])
def test_no_more_rows_copy_a_prefix_than_the_device_takes(monkeypatch, copies, served):
    monkeypatch.setattr(ExchangeSizes, "copies", copies)
    prompt = np.arange(70)
    made = host(prompt, prompt, prompt, share_prompts=True)
    for rows in served:
        assert [row for row, _, slots in copied(made) if slots] == rows


class Answers(SingleTurn):
    """Answers a turn with whatever it is told to."""

    def react(self, episode, text, stop):
        return self.action


def paused(made, stop=STOP_EOS):
    """What a host says to rows that have all written a token and paused."""
    ids = np.zeros((SIZES.rows, 4), np.int32)
    ones = np.ones(SIZES.rows, np.int64)
    return made.exchange(DeviceReport(ones * PAUSED, ones * stop, ids, ids, ids, ones), NONE)


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (None, r"environment Answers answers turn 0 of question '0' with None; it must be SearchFor, Append"),
        (Restart(np.zeros(0, np.int32)), r"the prompt of a Restart of question '0' is empty"),
        (
            Restart(np.array([1, 500])),
            r"a Restart of question '0' has token 500; the model's tokens are 0 to 499",
        ),
        (Restart(np.array([1, -7])), r"a Restart of question '0' has token -7"),
        (
            Restart(np.ones(2)),
            r"a Restart of question '0' must be one row of token ids, found float64 of shape",
        ),
        (
            SearchFor(None),
            r"environment Answers searches for None in turn 0 of question '0'; a query is a text",
        ),
        (SearchFor("a", (7,)), r"searches for 7 in turn 0"),
    ],
)
def test_what_an_environment_cannot_answer_is_named_and_ends_all_hosts(action, words):
    made, other = host([1, 2]), host([3, 4], [5, 6])
    for one in (made, other):
        pieces(one)
    other.over = made.over
    made.environment = environment = Answers(turn_tokens=4)
    object.__setattr__(environment, "action", action)
    assert paused(made)[-1] == ABORT
    assert isinstance(made.error, UserError)
    with pytest.raises(UserError, match=words):
        raise made.error
    assert paused(other)[-1] == ABORT and other.error is None


@pytest.mark.parametrize(
    ("action", "ended"),
    [
        (Append("x" * 397), []),  # what stands in place of it leaves the policy one token
        (Append("x" * 398), ["context_limit"]),
        (Restart(np.zeros(399, np.int32)), []),
        (Restart(np.zeros(400, np.int32)), ["context_limit"]),
    ],
)
def test_what_does_not_fit_even_so_ends_the_episode_at_the_limit_of_its_context(action, ended):
    class Shortens(Answers):
        def overflow(self, episode, message, room):
            if isinstance(message, Restart):
                assert room == SIZES.context - 2  # the last of the prompt is left pending, and one is written
                return Restart(message.prompt[1:])
            assert room == SIZES.context - 2 - 1  # two tokens of the prompt, and one that was written
            return dataclasses.replace(message, prefix=message.prefix[1:])

    made, found = host([1, 2]), []
    made.encode, made.on_finish = lambda text: np.zeros(len(text), np.int32), lambda _, t: found.append(t)
    made.environment = environment = Shortens(turn_tokens=4)
    object.__setattr__(environment, "action", action)
    pieces(made)
    paused(made)
    assert made.error is None and [trajectory.ended for trajectory in found] == ended
    assert all(trajectory.cuts == ((0, "room"),) for trajectory in found)


def test_limits_that_end_nothing_are_told_too():
    """A turn that broke off and was answered, with an answer that was cut."""
    made, found = host([1, 2]), []
    made.encode, made.on_finish = lambda text: np.zeros(len(text), np.int32), lambda _, t: found.append(t)
    made.environment = environment = Answers(turn_tokens=4)
    object.__setattr__(environment, "observation_tokens", 8)
    for action, stop in (
        (Append("", "x" * 9), STOP_TURN),
        (Append("", "x" * 8), STOP_TURN),
        (Finish("answer"), STOP_EOS),
    ):
        object.__setattr__(environment, "action", action)
        pieces(made)
        paused(made, stop)
    (trajectory,) = found
    assert trajectory.cuts == ((0, "turn_tokens"), (0, "observation_tokens"), (1, "turn_tokens"))


@pytest.mark.parametrize(
    ("wrong", "words"),
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
            r"the prompt of question 'q' must be one row of token ids, found str; .*chat_ids",
        ),
        (
            {"prompt": np.ones((1, 3), np.int32)},
            r"must be one row of token ids, found int32 of shape \(1, 3\)",
        ),
        ({"prompt": np.ones(3)}, r"must be one row of token ids, found float64 of shape \(3,\)"),
        ({"stops": "e"}, r"request\.stops of question 'q': 'e' must be a tuple of texts"),
        ({"stops": (CONTEXT,)}, r"'<context>' stands for a pause at no stop string"),
    ],
)
def test_what_cannot_be_asked_is_refused_by_name(wrong, words):
    fields = {"prompt": np.zeros(3, np.int32), "seed": 0} | wrong
    with pytest.raises(UserError, match=words):
        Request(Question("q", "", ()), **fields)


@pytest.mark.parametrize(
    ("tokens", "leaves", "shortened"),
    [(396, 1, False), (397, 1, True), (397, 0, True), (297, 100, False), (298, 100, True)],
)
def test_a_message_leaves_the_policy_one_token_of_the_context_or_as_many_as_it_says(
    tokens, leaves, shortened
):
    class Watches(Answers):
        def overflow(self, episode, message, room):
            asked.append(room)
            return Append()

    made, asked = host([1, 2]), []
    made.encode = lambda text: np.zeros(len(text), np.int32)
    made.environment = environment = Watches(turn_tokens=4)
    object.__setattr__(environment, "action", Append("x" * tokens, reserve_tokens=leaves))
    pieces(made)
    paused(made)
    assert made.error is None and asked == [397] * shortened


def test_rows_that_ask_the_same_wait_for_one_search():
    class Library:
        needs_embeddings = False

        def search(self, queries, k, vectors=None):
            asked.append(queries)
            raise LookupError("gone")

    class Observes(Answers):
        def observe(self, episode, passages):
            return Append("found" if passages else "nothing")

    asked, made = [], host([1, 2], [3, 4], [5, 6])
    made.encode = lambda text: np.zeros(len(text), np.int32)
    made.searches.retriever = Library()
    made.environment = environment = Observes(turn_tokens=4)
    object.__setattr__(environment, "action", SearchFor("a"))
    pieces(made)
    paused(made)
    while made.requesters:
        pieces(made)
    assert made.error is None and asked == [["a"]] and made.failed == 3
    assert [live.episode.searches[0].failed for live in made.rows] == [True] * 3
