"""Over-, good and underthinking and the five kinds of error, each on a matching episode (TIRESRAG-R1, section 3)."""

import numpy as np
import pytest

from rrl.data.questions import Question
from rrl.data.trajectory import ENVIRONMENT, POLICY, PROMPT, Search, Trajectory
from rrl.eval.diagnose import ERRORS, GOOD, OVER, UNDER, Diagnosis, diagnose, report
from rrl.rewards.judge_prompts import ErrorAnalysis, Sufficiency
from rrl.rewards.oracle import Oracle
from rrl.rewards.transcript import transcript_of

QUESTION = Question(
    "q", "Who is the spouse of the director of Silver Harbour?", ("Ivo Danes",), gold=("Film", "Director")
)
FILM = ("Film", "Silver Harbour was directed by Marta Velikov.")
DIRECTOR = ("Director", "Marta Velikov is married to Ivo Danes.")
OTHER = ("Other", "Marta Danes was born in Oslo.")


def episode(answer, closing, *found):
    """Return an episode that retrieved these passages, one per search, then wrote `closing` and answered."""
    segments, searches = [(PROMPT, "q <think>")], []
    for place, (title, text) in enumerate(found):
        segments.append((POLICY, "so</think><search>s</search>"))
        segments.append((ENVIRONMENT, f"\n<information>\n(Title: {title}) {text}\n</information>\n"))
        searches.append(Search(place, "s", (title,)))
    segments.append((POLICY, f"<think> {closing} </think><answer> {answer} </answer>"))
    none = np.zeros(0)
    arrays = (none, none, none, none, none)
    return Trajectory(QUESTION, 0, 0, *arrays, segments, searches, "answer", answer=answer)


@pytest.mark.parametrize(
    ("found", "thinking"),
    [((FILM, DIRECTOR), GOOD), ((FILM, DIRECTOR, OTHER), OVER), ((FILM, OTHER), UNDER), ((), UNDER)],
)
def test_thinking_depends_on_the_search_after_which_the_context_suffices(found, thinking):
    (diagnosis,) = diagnose([episode("Ivo Danes", "It is Ivo Danes.", *found)], Oracle())
    assert diagnosis == Diagnosis(thinking, right=True)


def test_documents_between_other_markers_are_recognised():
    one = episode("Ivo Danes", "It is Ivo Danes.", FILM, DIRECTOR, OTHER)
    markers = {"<information>": "<|begin_of_documents|>", "</information>": "<|end_of_documents|>"}
    for old, new in markers.items():
        one.segments = [(role, text.replace(old, new)) for role, text in one.segments]
    correction = (ENVIRONMENT, "\nI write <search> and </search>.\n")
    one.segments[1:1] = [(POLICY, "hm"), correction]
    assert diagnose([one], Oracle()) == [Diagnosis(OVER, right=True)]


def test_passages_that_were_cut_off_do_not_count_as_found():
    one = episode("", "", FILM, DIRECTOR)
    del one.segments[-2:]  # the second search ended the episode before its passages were shown
    one.ended = "context_limit"
    assert transcript_of(one, "answer").titles == ("Film",)
    assert diagnose([one], Oracle())[0].thinking == UNDER
    one.segments += episode("", "", FILM, DIRECTOR).segments[-2:]  # shown, and no room for an answer
    assert transcript_of(one, "answer").titles == ("Film", "Director")


def test_documents_in_a_further_context_are_recognised():
    # R3-RAG: each step reads the question and all steps before it
    one, head = episode("Oslo", "x", FILM, OTHER), "<user>The question: q"
    first, second = "\nStep 1: ask\n(Title: Film) by Marta", "\nStep 2: ask again\n(Title: Other) of Oslo"
    one.segments = [
        (PROMPT, f"{head}<bot>"),
        (POLICY, "first thought"),
        (PROMPT, f"{head}{first}<bot>"),
        (POLICY, "second thought"),
        (PROMPT, f"{head}{first}{second}<bot>"),
        (POLICY, "third thought\nThe final answer: Bergen"),
    ]
    judged = []

    class Says:
        def grade(self, cases):
            judged.extend(cases)
            return [0.0] * len(cases)

    diagnose([one], Says(), ("The final answer:", ""))
    transcripts = [case.transcript.text for case in judged[:3]]
    assert transcripts[0] == "first thought"
    assert transcripts[1] == f"first thought{first}<bot>second thought"
    assert transcripts[2] == f"first thought{first}<bot>second thought{second}<bot>third thought"


def test_a_search_without_hits_is_not_a_mistaken_document():
    one = episode("Oslo", "", FILM, OTHER)
    none = episode("Oslo", "It is Oslo.")
    failed = episode("Oslo", "It is Oslo.", FILM)
    failed.searches[0] = Search(0, "s", (), failed=True)
    unseen = episode("Oslo", "It is Oslo.", FILM, OTHER)
    del unseen.segments[-2:]
    unseen.ended = "context_limit"
    assert [found.error for found in diagnose([one, none, failed, unseen], Oracle())] == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("case", "error"),
    [
        (("Oslo", "So it is Oslo.", FILM, OTHER), 0),
        (("Marta Velikov", "It is Marta Velikov.", FILM), 1),
        (("Edda Tolvik", "She married Edda Tolvik.", FILM, DIRECTOR), 2),
        (("Marta Velikov", "The spouse is Ivo Danes.", FILM, DIRECTOR), 3),
        (("Marta Velikov", "The spouse is Marta Velikov.", FILM, DIRECTOR), 4),
    ],
)
def test_each_kind_of_error_is_recognised(case, error):
    (diagnosis,) = diagnose([episode(*case)], Oracle())
    assert diagnosis.error == error and not diagnosis.right
    assert (diagnosis.thinking == UNDER) == (ERRORS[error][0] == "insufficient")


def test_the_judge_sees_each_search_without_answers_and_error_prompts_only_for_wrong_answers():
    calls = []

    class Says:
        def grade(self, cases):
            calls.append(cases)
            return [None] * len(cases)

    wrong, right = episode("Oslo", "x", FILM, OTHER), episode("Ivo Danes", "x", FILM)
    wrong.segments.insert(2, (ENVIRONMENT, "\nMy action is not correct.\n"))  # a correction is not a search
    found = diagnose([wrong, right], Says())
    first, second = calls
    assert [type(case) for case in first] == [Sufficiency] * 5 and len(second) == 1
    assert [case.transcript.titles for case in first] == [(), ("Film",), ("Film", "Other"), (), ("Film",)]
    assert not any("<answer>" in case.prompt.user_message for case in (*first, *second))
    assert "Marta Velikov" not in first[0].prompt.body and "not correct" in first[0].prompt.body
    assert "Marta Velikov" in first[1].prompt.body and "Oslo" not in first[1].prompt.body
    assert isinstance(second[0], ErrorAnalysis) and second[0].last_titles == ("Other",)
    # a reply that cannot be parsed counts as no, and is counted
    assert [(d.thinking, d.error, d.unparsed) for d in found] == [(UNDER, 1, 4), (UNDER, None, 2)]


def test_the_tables_show_counts_and_shares():
    found = [
        Diagnosis(GOOD, True),
        Diagnosis(GOOD, False, 3),
        Diagnosis(UNDER, False, 0),
        Diagnosis(UNDER, False, 0, unparsed=2),
    ]
    text = report(found)
    assert "4 trajectories" in text and "3 wrong answers" in text and "2 replies of the judge" in text
    lines = {line.rsplit(None, 2)[0].strip(): line.split()[-2:] for line in text.splitlines() if line.split()}
    assert lines["good thinking"] == ["1", "1"] and lines["underthinking"] == ["0", "2"]
    assert "knowledge retrieved incorrect" in text and "66.7 %" in text and "33.3 %" in text
    assert "0 wrong answers" in report([Diagnosis(GOOD, True)])
