"""The stream protocol: the result of a step after each kind of stop."""

import dataclasses

import numpy as np
import pytest

from rrl.data.passages import Passage
from rrl.data.questions import Question
from rrl.errors import UserError
from rrl.recipes.r2ag_forest import RetrievalTree
from rrl.rollout.protocol import (
    CONTEXT,
    EOS,
    TURN_TOKENS,
    Append,
    Episode,
    Finish,
    SearchFor,
    SingleTurn,
    Stream,
    message_ids,
)

STREAM = Stream(max_searches=2)
SEARCH = STREAM.stops[0]


@pytest.mark.parametrize(
    ("turn", "text", "stop", "result"),
    [
        (0, "I look. <search> Silver Harbour </search>", SEARCH, SearchFor("Silver Harbour")),
        (0, "<search>a</search><search>b</search>", SEARCH, SearchFor("b")),
        (2, "<search>a</search>", SEARCH, Finish("search_limit")),
        (0, "<answer>x</answer>", EOS, Finish("answer")),
        (2, "<answer>x</answer>", TURN_TOKENS, Finish("answer")),
        (2, "no answer", EOS, Finish("turn_limit")),
        (2, "no answer", TURN_TOKENS, Finish("length")),
        (1, "<search>a</search>", CONTEXT, Finish("context_limit")),
        (1, "<answer>a</answer>", CONTEXT, Finish("answer")),
    ],
)
def test_step_returns_the_result_for_text_and_stop(turn, text, stop, result):
    assert STREAM.step(Episode(Question("q", "q", ("a",)), turn), text, stop) == result


@pytest.mark.parametrize(
    ("text", "stop"),
    [("</search>", SEARCH), ("<search> </search>", SEARCH), ("hm", EOS), ("hm", TURN_TOKENS)],
)
def test_a_malformed_turn_is_corrected_and_costs_a_turn(text, stop):
    action = STREAM.step(Episode(Question("q", "q", ("a",)), 1), text, stop)
    assert isinstance(action, Append)
    assert "<search>" in action.prefix
    assert action.body == ""


@pytest.mark.parametrize(
    ("turn", "stop", "ended"),
    [(0, EOS, "no_action"), (2, EOS, "turn_limit"), (0, TURN_TOKENS, "length"), (0, SEARCH, "no_action")],
)
def test_without_a_correction_a_malformed_turn_ends_the_episode(turn, stop, ended):
    stream = dataclasses.replace(STREAM, correction="")
    assert stream.step(Episode(Question("q", "q", ("a",)), turn), "hm", stop) == Finish(ended)


@pytest.mark.parametrize(
    ("stop", "ended"), [(EOS, "answer"), (TURN_TOKENS, "length"), (CONTEXT, "context_limit")]
)
def test_a_single_turn_ends_with_the_reason_of_its_pause(stop, ended):
    assert SingleTurn().step(Episode(Question("q", "q", ("a",))), "hm", stop) == Finish(ended)


def test_an_observation_holds_the_passages_or_the_failure_message():
    episode = Episode(Question("q", "q", ("a",)))
    observation = STREAM.observe(
        episode, [Passage("0", "Lorn", "Lorn is a city."), Passage("1", "Ruddov", "A name.")]
    )
    assert observation.body == "(Title: Lorn) Lorn is a city.\n(Title: Ruddov) A name."
    assert (observation.prefix, observation.suffix) == ("\n<observation>\n", "\n</observation>\n")
    assert STREAM.observe(episode, None).body == STREAM.failure


def test_an_observation_that_does_not_fit_ends_the_episode_or_is_cut_to_leave_a_turn():
    episode, message = Episode(Question("q", "q", ("a",))), STREAM.observe(None, None)
    assert STREAM.overflow(episode, message, 900) == Finish("context_limit")
    cut = dataclasses.replace(STREAM, when_full="cut")
    assert cut.overflow(episode, message, 900) == dataclasses.replace(message, max_tokens=400)
    assert cut.overflow(episode, message, 500) == Finish("context_limit")
    with pytest.raises(UserError, match=r"environment\.when_full='drop' is unknown; choose one of end, cut"):
        dataclasses.replace(STREAM, when_full="drop")


@pytest.mark.parametrize("wrong", [{"max_searches": -1}, {"turn_tokens": 0}, {"observation_tokens": 0}])
def test_sizes_out_of_range_are_refused(wrong):
    with pytest.raises(UserError, match=rf"environment\.{next(iter(wrong))}=.* must be at least"):
        Stream(**wrong)


@pytest.mark.parametrize("wrong", [{"search": ""}, {"answer": "<answer>"}, {"observation": "search"}])
def test_tags_must_be_names_and_differ(wrong):
    with pytest.raises(UserError, match=r"environment\.(search|answer|observation)=.* must be a tag's name"):
        Stream(**wrong)


QUERYING = Stream(
    search=("<|begin_of_query|>", "<|end_of_query|>"),
    observation=("<|begin_of_documents|>", "<|end_of_documents|>"),
)


def test_tags_may_be_pairs_of_other_markers():
    episode = Episode(Question("q", "q", ("a",)))
    (stop,) = QUERYING.stops
    text = "I look. <|begin_of_query|> Silver Harbour <|end_of_query|>"
    assert QUERYING.step(episode, text, stop) == SearchFor("Silver Harbour")
    assert isinstance(QUERYING.step(episode, "<query>Silver Harbour<|end_of_query|>", stop), Append)
    observation = QUERYING.observe(episode, [Passage("0", "Lorn", "Lorn is a city.")])
    assert (observation.prefix, observation.suffix) == (
        "\n<|begin_of_documents|>\n",
        "\n<|end_of_documents|>\n",
    )
    correction = QUERYING.step(episode, "hm", EOS).prefix
    assert "between <|begin_of_query|> and <|end_of_query|>." in correction
    assert "between <answer> and </answer>." in correction


@pytest.mark.parametrize(
    "wrong",
    [
        {"search": ("<a>", "<a>")},
        {"search": ("<a>",)},
        {"search": ("<a>", "b")},
        {"search": ("<a >", "</a>")},
        {"answer": ("<x>", "</search>")},
        {"answer": ("<answer>", "</x>"), "observation": "answer"},
        {"observation": 3},
    ],
)
def test_markers_must_be_a_pair_and_belong_to_one_tag(wrong):
    with pytest.raises(
        UserError, match=r"environment\.(search|answer|observation)=.* the pair of its markers"
    ):
        Stream(**wrong)


def test_a_pair_of_markers_may_be_a_list_as_in_json():
    assert Stream(search=["<a>", "</a>"]) == Stream(search=("<a>", "</a>"))


def test_with_stop_at_answer_a_closing_answer_tag_ends_the_episode():
    stopping = dataclasses.replace(STREAM, stop_at_answer=True)
    assert STREAM.stops == ("</search>",) and stopping.stops == ("</search>", "</answer>")
    episode = Episode(Question("q", "q", ("a",)))
    assert stopping.step(episode, "<answer>x</answer>", "</answer>") == Finish("answer")
    assert isinstance(stopping.step(episode, "x</answer>", "</answer>"), Append)
    episode.turn = 2
    assert stopping.step(episode, "x</answer>", "</answer>") == Finish("turn_limit")


def test_an_environment_sees_a_question_with_its_choices():
    asked = RetrievalTree.of(Question("q", "Which?", ("B",), choices=("red", "blue")), tree=3)
    text = "Which?\n(A) red\n(B) blue\nAnswer with the letter of the right choice."
    assert Episode(asked).question == dataclasses.replace(asked, text=text, choices=())
    plain = Question("q", "Which?", ("B",))
    assert Episode(plain).question is plain


def test_only_the_body_of_a_message_is_cut():
    def bytes_of(message: Append) -> tuple[bytes, bool]:
        ids, cut = message_ids(message, lambda text: np.frombuffer(text.encode(), np.uint8), 7)
        return bytes(ids.astype(np.uint8)), cut

    assert bytes_of(Append("<a>", "x" * 50, "</a>")) == (b"<a>xxxxxxx</a>", True)
    assert bytes_of(Append("<a>", "x" * 50, "</a>", 9)) == (b"<a>xx</a>", True)
    assert bytes_of(Append("<a>", "x" * 7, "</a>")) == (b"<a>xxxxxxx</a>", False)
