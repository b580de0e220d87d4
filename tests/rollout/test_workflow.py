"""Workflows receive the results of their own requests, which do not depend on other workflows."""

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
COMPLETION = Completion(stop_sets=(("e",), ("e", "o")), turn_tokens=10)


@pytest.fixture(scope="module")
def engine():
    decoder, tokenizer, retriever, requests = make_world()
    return Engine(decoder, tokenizer, CONFIG, retriever=retriever), nnx.state(decoder), requests


def hops(question, temperature=1.0):
    """Retrieve, generate, retrieve with the generated text, and generate two continuations concurrently."""
    passages = yield Retrieve(question)
    thought = yield Generate(question, stops=("e",), temperature=temperature)
    both = yield [Retrieve(thought.text or "x"), Generate(question + thought.text, temperature=temperature)]
    nothing = yield []
    last = yield [Generate(question, tokens=3, temperature=temperature) for _ in range(2)]
    return passages, thought, both, nothing, last


def test_results_are_in_the_order_of_the_requests(engine):
    run, params, requests = engine
    texts = [request.question.text for request in requests[:6]]
    finished = {}
    results = run.run_workflows(
        params, [hops(text) for text in texts], COMPLETION, KEY, on_finish=finished.__setitem__
    )
    assert sorted(finished) == list(range(6)) and all(finished[at] is results[at] for at in finished)
    written = [part.trajectory for _, thought, both, _, last in results for part in (thought, both[1], *last)]
    assert run.stats.policy_tokens == sum(trajectory.policy_tokens for trajectory in written)
    assert len({trajectory.question.id for trajectory in written}) == len(written)
    for text, (passages, thought, both, nothing, last) in zip(texts, results, strict=True):
        assert [p.title for p in passages] == [h.passage.title for h in run.retriever.search([text], 2)[0]]
        assert thought.stop in ("e", "eos", "length") and "e" not in thought.text
        assert isinstance(both[0], list) and both[1].trajectory.policy_tokens >= 1
        assert nothing == []
        assert all((part.trajectory.roles == POLICY).sum() <= 3 for part in last)
        assert (
            not np.array_equal(last[0].trajectory.tokens, last[1].trajectory.tokens)
            or last[0].text == last[1].text
        )


def test_a_workflow_may_reuse_its_prompt_array(engine):
    run, params, requests = engine
    first, second = (request.prompt[:20] for request in requests[:2])

    def flow():
        prompt = first.copy()
        one = yield Generate(prompt)
        prompt[:] = second
        return one, (yield Generate(prompt))

    results = run.run_workflows(params, [flow()], COMPLETION, KEY)[0]
    for part, prompt in zip(results, (first, second), strict=True):
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
        run.run_workflows(params, [until(stops)], COMPLETION, KEY)[0] for stops in ((), ("e",), ("e", "o"))
    )
    whole = "".join(t for role, t in free.trajectory.segments if role == POLICY)
    assert free.stop in ("length", "eos")
    assert free.trajectory.policy_tokens <= 10
    assert at_e.text == whole.partition("e")[0]
    assert at_both.text == whole.partition("e")[0].partition("o")[0]
    assert "e" in whole or "o" in whole  # else the test would check nothing


def test_a_workflow_does_not_depend_on_other_workflows_or_the_kind_of_loop(engine):
    run, params, requests = engine
    texts = [request.question.text for request in requests[:3]]

    def tokens(results):
        return [[part.trajectory.tokens.tolist() for part in (f[1], f[2][1], *f[4])] for f in results]

    all_of_them = tokens(run.run_workflows(params, [hops(text) for text in texts], COMPLETION, KEY))
    alone = tokens(run.run_workflows(params, [hops(texts[0])], COMPLETION, KEY))
    reference = tokens(run.run_workflows(params, [hops(t) for t in texts], COMPLETION, KEY, reference=True))
    assert all_of_them[:1] == alone and all_of_them == reference


def test_a_workflow_depends_on_its_number_and_not_on_its_index(engine):
    run, params, requests = engine
    texts = [request.question.text for request in requests[:3]]
    whole = run.run_workflows(params, [hops(text) for text in texts], COMPLETION, KEY)
    rest = run.run_workflows(params, [hops(texts[2])], COMPLETION, KEY, numbers=[2])
    assert rest[0][1].trajectory.tokens.tolist() == whole[2][1].trajectory.tokens.tolist()
    other = run.run_workflows(params, [hops(texts[2])], COMPLETION, KEY)
    assert other[0][1].trajectory.tokens.tolist() != whole[2][1].trajectory.tokens.tolist()


def test_numbers_may_be_small_numpy_integers(engine):
    run, params, requests = engine
    text = requests[0].question.text

    def thoughts(numbers):
        results = run.run_workflows(params, [hops(text) for _ in range(2)], COMPLETION, KEY, numbers=numbers)
        return [thought.trajectory.tokens.tolist() for _, thought, *_ in results]

    assert thoughts(np.array([7, 5], np.int8)) == thoughts([7, 5])


def test_a_used_workflow_is_refused_and_an_iterator_of_workflows_is_accepted(engine):
    run, params, requests = engine
    flows = [hops(request.question.text) for request in requests[:2]]
    assert len(run.run_workflows(params, iter(flows), COMPLETION, KEY)) == 2
    with pytest.raises(UserError, match=r"workflows\[0\] has already started"):
        run.run_workflows(params, flows, COMPLETION, KEY)


def test_invalid_or_repeated_numbers_are_refused(engine):
    run, params, requests = engine
    flows = [hops(request.question.text) for request in requests[:3]]
    for numbers, message in (
        ([7, 1, 7], "7 is repeated"),
        ([0, 1], "2 for 3 workflows"),
        ([0, 1, 2**19], f"{2**19} must be a whole number, 0 to {2**19 - 1}"),
        ([0, 1, -1], "-1 must be a whole number, 0"),
        ([0, 1, 0.5], r"0\.5 must be a whole number, 0"),
    ):
        with pytest.raises(UserError, match=f"numbers: {message}"):
            run.run_workflows(params, flows, COMPLETION, KEY, numbers=numbers)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"turn_tokens": 0}, "turn_tokens"),
        ({"observation_tokens": float("nan")}, r"observation_tokens=nan must be a whole number"),
        ({"stop_sets": None}, r"stop_sets: None must be a tuple of tuples"),
        ({"stop_sets": (["e"],)}, r"stop_sets: \['e'\] must be a tuple"),
        ({"stop_sets": ((".", "<eos>"),)}, r"stop_sets: '<eos>' is reserved"),
        ({"stop_sets": (("length",),)}, r"stop_sets: 'length' is reserved"),
    ],
)
def test_an_invalid_completion_is_refused(fields, message):
    with pytest.raises(UserError, match=message):
        Completion(**fields)


def test_reserved_stops_are_the_end_reasons_of_a_completion():
    ended = {
        Completion().step(Episode(Question("", "", ())), "", pause).reason
        for pause in (EOS, TURN_TOKENS, CONTEXT)
    }
    assert ended | {NOT_FINITE} == set(RESERVED_STOPS)  # NOT_FINITE ends an episode without `step`


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stops": "e"}, r"generate\.stops: 'e' must be a tuple of strings"),
        ({"stops": ["e"]}, r"generate\.stops: \['e'\] must be a tuple of strings"),
        ({"tokens": 1.5}, r"generate\.tokens=1\.5 must be a whole number"),
        ({"tokens": -1}, r"generate\.tokens=-1 must be at least 0"),
        ({"temperature": "1"}, r"generate\.temperature='1' must be a number"),
        ({"temperature": float("nan")}, r"generate\.temperature=nan must be at least 0"),
        ({"temperature": float("inf")}, r"generate\.temperature=inf must be at most"),
    ],
)
def test_an_invalid_generate_is_refused_when_it_is_created(fields, message):
    with pytest.raises(UserError, match=message):
        Generate("a", **fields)


def test_a_prompt_in_parts_equals_its_text(engine):
    run, params, _ = engine

    def flow():
        text = yield Generate("who was it?")
        parts = yield Generate(Prompt("who ", "was ", "it?"))
        bare = yield Generate(Prompt("who", prefill=" is", chat=False))
        return text.trajectory, parts.trajectory, bare.trajectory

    text, parts, bare = run.run_workflows(params, [flow()], COMPLETION, KEY)[0]
    assert parts.tokens.tolist() == text.tokens.tolist()
    assert bare.segments[0][1] == "who is"


def test_repeated_workflows_and_other_objects_are_refused(engine):
    run, params, _ = engine
    flow = hops("a")
    for flows, message in (
        ([hops("a"), flow, flow], r"workflows\[1\] and \[2\] are the same generator"),
        ([flow, hops], r"workflows\[1\] is a function; it must be a generator"),
    ):
        with pytest.raises(UserError, match=message):
            run.run_workflows(params, flows, COMPLETION, KEY)


def test_a_workflow_may_catch_prompt_too_long_and_continue(engine):
    run, params, _ = engine

    def flow():
        try:
            yield [Generate("short", tokens=2), Generate(np.zeros(200, np.int32))]
        except PromptTooLong as error:
            return str(error), (yield Generate("short", tokens=2)).trajectory.policy_tokens

    assert run.run_workflows(params, [flow()], COMPLETION, KEY) == [
        (
            "workflow 0: the prompt has 200 tokens; the context holds 160, two of which are for the policy: raise "
            "rollout.context or shorten the prompt",
            2,
        )
    ]


def test_run_workflows_raises_what_a_workflow_raises(engine):
    run, params, _ = engine

    def faulty():
        yield Generate("a question")
        raise RuntimeError("no such step")

    with pytest.raises(RuntimeError, match="no such step"):
        run.run_workflows(params, [faulty()], COMPLETION, KEY)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Generate("a", stops=("z",)), r"stops at \('z',\), which is not in .*: list all sets"),
        (Generate("a", tokens=11), r"requests 11 tokens; the maximum is Completion.turn_tokens=10"),
        (Generate(np.zeros(200, np.int32)), r"the prompt has 200 tokens; the context holds 160"),
        ("text", r"yields a str; it may yield Generate, Retrieve"),
        (None, r"yields a NoneType; it may yield Generate, Retrieve"),
        (Retrieve(None), r"workflow 0 searches for None; a query must be a string"),
        (
            Generate(np.array([1, 9999])),
            r"the prompt of workflow 0 has token 9999; the model's token ids are 0 to 415",
        ),
        (Generate(np.array([-5, 2])), r"the prompt of workflow 0 has token -5"),
        (Generate(np.zeros(0, np.int32)), r"the prompt of workflow 0 is empty: give at least one token"),
        (Generate(Prompt(chat=False)), r"the prompt of workflow 0 is empty"),
        (
            Generate(np.ones((1, 3), np.int32)),
            r"must be a 1-D array of token ids, found int32 of shape \(1, 3\)",
        ),
        (Generate([1.0, 2.0]), r"must be a 1-D array of token ids, found float64 of shape \(2,\)"),
        (Generate([[1, 2], [3]]), r"must be a 1-D array of token ids, found sequences of several lengths"),
        (Generate(7), r"must be a 1-D array of token ids, found int"),
    ],
)
def test_an_invalid_request_is_an_error_that_names_the_workflow(engine, request_, message):
    run, params, _ = engine

    def flow():
        yield request_

    with pytest.raises(UserError, match=message):
        run.run_workflows(params, [flow()], COMPLETION, KEY)
