"""Workflows: what they ask for comes back to them, whatever else runs, and does not depend on it."""

import jax
import numpy as np
import pytest
from flax import nnx

from rrl.data.questions import Question
from rrl.data.trajectory import NOT_FINITE, POLICY
from rrl.errors import UserError
from rrl.rollout.config import EngineConfig
from rrl.rollout.engine import Engine
from rrl.rollout.protocol import CONTEXT, EOS, TURN_TOKENS, Episode
from rrl.rollout.workflow import RESERVED_STOPS, Completion, Generate, PromptTooLong, Retrieve
from rrl.text.chat import Prompt
from tests.rollout.world import make_world

KEY = jax.random.key(5)
CONFIG = EngineConfig(rows=4, context=160, wake_threshold=2, prefill_tokens=48, max_wait_steps=4, top_k=2)
ASKS = Completion(stop_sets=(("e",), ("e", "o")), turn_tokens=10)


@pytest.fixture(scope="module")
def engine():
    decoder, tokenizer, retriever, requests = make_world()
    return Engine(decoder, tokenizer, CONFIG, retriever=retriever), nnx.state(decoder), requests


def hops(question, temperature=1.0):
    """Retrieves, writes, retrieves with what it wrote, and writes two continuations side by side."""
    passages = yield Retrieve(question)
    thought = yield Generate(question, stops=("e",), temperature=temperature)
    both = yield [Retrieve(thought.text or "x"), Generate(question + thought.text, temperature=temperature)]
    nothing = yield []
    last = yield [Generate(question, tokens=3, temperature=temperature) for _ in range(2)]
    return passages, thought, both, nothing, last


def test_results_come_back_in_their_places(engine):
    run, params, requests = engine
    texts = [request.question.text for request in requests[:6]]
    told = {}
    found = run.run_workflows(params, [hops(text) for text in texts], ASKS, KEY, on_finish=told.__setitem__)
    assert sorted(told) == list(range(6)) and all(told[at] is found[at] for at in told)
    written = [part.trajectory for _, thought, both, _, last in found for part in (thought, both[1], *last)]
    assert run.stats.policy_tokens == sum(trajectory.policy_tokens for trajectory in written)
    assert len({trajectory.question.id for trajectory in written}) == len(written)
    for text, (passages, thought, both, nothing, last) in zip(texts, found, strict=True):
        assert [p.title for p in passages] == [h.passage.title for h in run.retriever.search([text], 2)[0]]
        assert thought.stop in ("e", "eos", "length") and "e" not in thought.text
        assert isinstance(both[0], list) and both[1].trajectory.policy_tokens >= 1
        assert nothing == []
        assert all((part.trajectory.roles == POLICY).sum() <= 3 for part in last)
        assert (
            not np.array_equal(last[0].trajectory.tokens, last[1].trajectory.tokens)
            or last[0].text == last[1].text
        )


def test_a_workflow_may_write_into_its_prompt_again(engine):
    run, params, requests = engine
    first, second = (request.prompt[:20] for request in requests[:2])

    def flow():
        prompt = first.copy()
        one = yield Generate(prompt)
        prompt[:] = second
        return one, (yield Generate(prompt))

    found = run.run_workflows(params, [flow()], ASKS, KEY)[0]
    for part, prompt in zip(found, (first, second), strict=True):
        assert part.trajectory.tokens[:20].tolist() == prompt.tolist()
        assert part.trajectory.segments[0][1] == run.tokenizer.decode(prompt, skip_special_tokens=True)


def test_a_generation_ends_at_its_own_stop_strings_only(engine):
    run, params, requests = engine
    text = requests[0].question.text

    def until(stops):
        def flow():
            return (yield Generate(text, stops=stops, temperature=1.0))

        return flow()

    free, at_e, at_both = (
        run.run_workflows(params, [until(stops)], ASKS, KEY)[0] for stops in ((), ("e",), ("e", "o"))
    )
    whole = "".join(t for role, t in free.trajectory.segments if role == POLICY)
    assert free.stop in ("length", "eos")
    assert free.trajectory.policy_tokens <= 10
    assert at_e.text == whole.partition("e")[0]
    assert at_both.text == whole.partition("e")[0].partition("o")[0]
    assert "e" in whole or "o" in whole  # the test says something


def test_a_workflow_does_not_depend_on_the_others_nor_on_the_loop(engine):
    run, params, requests = engine
    texts = [request.question.text for request in requests[:3]]

    def tokens(found):
        return [[part.trajectory.tokens.tolist() for part in (f[1], f[2][1], *f[4])] for f in found]

    all_of_them = tokens(run.run_workflows(params, [hops(text) for text in texts], ASKS, KEY))
    alone = tokens(run.run_workflows(params, [hops(texts[0])], ASKS, KEY))
    driven = tokens(run.run_workflows(params, [hops(t) for t in texts], ASKS, KEY, reference=True))
    assert all_of_them[:1] == alone and all_of_them == driven


def test_a_workflow_depends_on_its_number_and_not_on_its_place(engine):
    run, params, requests = engine
    texts = [request.question.text for request in requests[:3]]
    whole = run.run_workflows(params, [hops(text) for text in texts], ASKS, KEY)
    rest = run.run_workflows(params, [hops(texts[2])], ASKS, KEY, numbers=[2])
    assert rest[0][1].trajectory.tokens.tolist() == whole[2][1].trajectory.tokens.tolist()
    other = run.run_workflows(params, [hops(texts[2])], ASKS, KEY)
    assert other[0][1].trajectory.tokens.tolist() != whole[2][1].trajectory.tokens.tolist()


def test_small_integers_of_numpy_are_numbers_of_workflows(engine):
    run, params, requests = engine
    text = requests[0].question.text

    def thoughts(numbers):
        found = run.run_workflows(params, [hops(text) for _ in range(2)], ASKS, KEY, numbers=numbers)
        return [thought.trajectory.tokens.tolist() for _, thought, *_ in found]

    assert thoughts(np.array([7, 5], np.int8)) == thoughts([7, 5])


def test_a_workflow_that_an_earlier_run_used_is_refused_and_an_iterator_of_them_is_not(engine):
    run, params, requests = engine
    flows = [hops(request.question.text) for request in requests[:2]]
    assert len(run.run_workflows(params, iter(flows), ASKS, KEY)) == 2
    with pytest.raises(UserError, match=r"workflows\[0\] has begun already"):
        run.run_workflows(params, flows, ASKS, KEY)


def test_workflows_without_a_number_of_their_own_are_refused(engine):
    run, params, requests = engine
    flows = [hops(request.question.text) for request in requests[:3]]
    for numbers, words in (
        ([7, 1, 7], "7 is there twice"),
        ([0, 1], "2 for 3 workflows"),
        ([0, 1, 2**19], f"{2**19} must be a whole number, 0 to {2**19 - 1}"),
        ([0, 1, -1], "-1 must be a whole number, 0"),
        ([0, 1, 0.5], r"0\.5 must be a whole number, 0"),
    ):
        with pytest.raises(UserError, match=f"numbers: {words}"):
            run.run_workflows(params, flows, ASKS, KEY, numbers=numbers)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"turn_tokens": 0}, "turn_tokens"),
        ({"observation_tokens": float("nan")}, r"observation_tokens=nan must be a whole number"),
        ({"stop_sets": None}, r"stop_sets: None must be a tuple of tuples"),
        ({"stop_sets": (["e"],)}, r"stop_sets: \['e'\] must be a tuple"),
        ({"stop_sets": ((".", "<eos>"),)}, r"stop_sets: '<eos>' stands for a pause at no stop string"),
        ({"stop_sets": (("length",),)}, r"stop_sets: 'length' stands for an end at no stop string"),
    ],
)
def test_a_completion_that_cannot_be_is_refused(fields, words):
    with pytest.raises(UserError, match=words):
        Completion(**fields)


def test_ends_are_what_a_generation_says_that_ended_at_no_stop_string():
    ended = {
        Completion().react(Episode(Question("", "", ())), "", pause).reason
        for pause in (EOS, TURN_TOKENS, CONTEXT)
    }
    assert ended | {NOT_FINITE} == set(RESERVED_STOPS)  # at which no environment is asked


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stops": "e"}, r"generate\.stops: 'e' must be a tuple of texts"),
        ({"stops": ["e"]}, r"generate\.stops: \['e'\] must be a tuple of texts"),
        ({"tokens": 1.5}, r"generate\.tokens=1\.5 must be a whole number"),
        ({"tokens": -1}, r"generate\.tokens=-1 must be at least 0"),
        ({"temperature": "1"}, r"generate\.temperature='1' must be a number"),
        ({"temperature": float("nan")}, r"generate\.temperature=nan must be at least 0"),
        ({"temperature": float("inf")}, r"generate\.temperature=inf must be at most"),
    ],
)
def test_a_generation_that_cannot_be_is_refused_where_it_is_made(fields, words):
    with pytest.raises(UserError, match=words):
        Generate("a", **fields)


def test_a_prompt_in_parts_is_asked_as_its_text_is(engine):
    run, params, _ = engine

    def flow():
        text = yield Generate("who was it?")
        parts = yield Generate(Prompt("who ", "was ", "it?"))
        bare = yield Generate(Prompt("who", prefill=" is", chat=False))
        return text.trajectory, parts.trajectory, bare.trajectory

    text, parts, bare = run.run_workflows(params, [flow()], ASKS, KEY)[0]
    assert parts.tokens.tolist() == text.tokens.tolist()
    assert bare.segments[0][1] == "who is"


def test_workflows_that_are_none_or_there_twice_are_refused(engine):
    run, params, _ = engine
    flow = hops("a")
    for flows, words in (
        ([hops("a"), flow, flow], r"workflows\[1\] and \[2\] are the same generator"),
        ([flow, hops], r"workflows\[1\] is a function; it must be a generator"),
    ):
        with pytest.raises(UserError, match=words):
            run.run_workflows(params, flows, ASKS, KEY)


def test_a_workflow_may_go_on_after_a_prompt_that_does_not_fit(engine):
    run, params, _ = engine

    def flow():
        try:
            yield [Generate("short", tokens=2), Generate(np.zeros(200, np.int32))]
        except PromptTooLong as error:
            return str(error), (yield Generate("short", tokens=2)).trajectory.policy_tokens

    assert run.run_workflows(params, [flow()], ASKS, KEY) == [
        (
            "workflow 0: a prompt of 200 tokens; the context holds 160, two of which are the policy's: raise rollout.context "
            "or shorten it",
            2,
        )
    ]


def test_what_a_workflow_raises_comes_out(engine):
    run, params, _ = engine

    def faulty():
        yield Generate("a question")
        raise RuntimeError("no such step")

    with pytest.raises(RuntimeError, match="no such step"):
        run.run_workflows(params, [faulty()], ASKS, KEY)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (Generate("a", stops=("z",)), r"stops at \('z',\), which is none of .*: name all sets"),
        (Generate("a", tokens=11), r"asks for 11 tokens; Completion.turn_tokens=10"),
        (Generate(np.zeros(200, np.int32)), r"a prompt of 200 tokens; the context holds 160"),
        ("text", r"yields a str; it may yield Generate, Retrieve"),
        (None, r"yields a NoneType; it may yield Generate, Retrieve"),
        (Retrieve(None), r"workflow 0 searches for None; a query is a text"),
        (
            Generate(np.array([1, 9999])),
            r"the prompt of workflow 0 has token 9999; the model's tokens are 0 to 415",
        ),
        (Generate(np.array([-5, 2])), r"the prompt of workflow 0 has token -5"),
        (Generate(np.zeros(0, np.int32)), r"the prompt of workflow 0 is empty: give at least one token"),
        (Generate(Prompt(chat=False)), r"the prompt of workflow 0 is empty"),
        (Generate(np.ones((1, 3), np.int32)), r"must be one row of token ids, found int32 of shape \(1, 3\)"),
        (Generate([1.0, 2.0]), r"must be one row of token ids, found float64 of shape \(2,\)"),
        (Generate([[1, 2], [3]]), r"must be one row of token ids, found rows of several lengths"),
        (Generate(7), r"must be one row of token ids, found int"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(engine, asked, words):
    run, params, _ = engine

    def flow():
        yield asked

    with pytest.raises(UserError, match=words):
        run.run_workflows(params, [flow()], ASKS, KEY)
