"""Methods with several searches, each on a two-hop question with a scripted model."""

import pytest

from rrl.errors import UserError
from rrl.recipes.prompted.base import PromptedSettings
from rrl.recipes.prompted.iterative import first_sentence, token_probabilities
from tests.recipes.prompted.scripted import FILM, PERSON, QUESTION, VOCABULARY, generated, play

LAST = (
    "Answer the question with the help of the passages; where they say nothing",
    "So.\nThe final answer: Oslo",
)
"""The final reasoning step of methods that end without an answer."""


def test_react_searches_reads_and_finishes() -> None:
    outcome, prompts = play(
        "react",
        [
            ("Finish[", "Thought: who directed it?\nAction: Search[Silver Harbour]\nObservation: made up"),
            ("Observation: (Title: Silver Harbour)", "Thought: and she?\nAction: Search[Ada Berg]\n"),
            (
                "Observation: (Title: Ada Berg) Ada Berg was born in Oslo.",
                "Thought: done\nAction: Finish[Oslo]",
            ),
        ],
    )
    assert outcome.answer == "Oslo"
    assert [query for query, _ in outcome.searches] == ["Silver Harbour", "Ada Berg"]
    assert "made up" not in prompts[1]


def test_react_uses_the_text_after_action() -> None:
    thought = "Thought: I could use Search[Silver Harbour] next.\nAction: Finish[Oslo]"
    outcome, _ = play("react", [("", thought)])
    assert outcome.answer == "Oslo" and not outcome.searches
    outcome, _ = play("react", [("", "action: search[Ada Berg]"), ("action: search", "finish[Oslo]")])
    assert outcome.answer == "Oslo" and outcome.titles == [PERSON.title]
    script = [("", "Thought: who?\nAction: Search[Silver Harbour]"), ("Thought: who?", "Action: Finish[x]")]
    assert play("react", script)[0].answer == "x"


def test_react_without_finish_answers_from_its_passages() -> None:
    step = ("", "Action: Search[Silver Harbour]")
    outcome, prompts = play("react", [step, step, LAST], steps=2)
    assert outcome.answer == "Oslo" and prompts[-1].count("(Title: Silver Harbour)") == 1
    assert play("react", [("", "I do not know"), LAST])[0].answer == "Oslo"


def test_self_ask_answers_follow_ups_from_their_own_passages() -> None:
    outcome, prompts = play(
        "self_ask",
        [
            ("Follow up:", "Yes.\nFollow up: Who directed Silver Harbour?\nIntermediate answer: x"),
            ("directed by Ada Berg", "Ada Berg."),
            ("Intermediate answer: Ada Berg.", "Follow up: Where was Ada Berg born?\nIntermediate answer:"),
            ("was born in Oslo", "In Oslo."),
            ("Intermediate answer: In Oslo.", "The final answer: Oslo"),
        ],
    )
    assert outcome.answer == "Oslo"
    assert [query for query, _ in outcome.searches] == [
        "Who directed Silver Harbour?",
        "Where was Ada Berg born?",
    ]
    assert "directed by" not in prompts[3]


def test_self_ask_answers_from_its_passages_after_its_last_step() -> None:
    script = [("", "Follow up: Silver Harbour?"), ("", "x"), LAST]
    assert play("self_ask", script, steps=1)[0].answer == "Oslo"
    assert play("self_ask", [("", "Follow up: "), LAST])[0].answer == "Oslo"


def test_ircot_searches_with_the_first_sentence_of_each_output() -> None:
    outcome, prompts = play(
        "ircot",
        [
            ("directed by Ada Berg", "The film was directed by Ada Berg. The final answer: Rome"),
            ("Ada Berg was born in Oslo", "Ada Berg was born in Oslo.\nThe final answer: Oslo"),
            (
                "Reasoning so far: The film was directed by Ada Berg. Ada Berg was born",
                "The final answer: Rome",
            ),
            LAST,
        ],
    )
    assert outcome.answer == "Oslo"
    assert [query for query, _ in outcome.searches] == [
        QUESTION.text,
        "The film was directed by Ada Berg.",
        "Ada Berg was born in Oslo.",
    ]
    assert prompts[-1].count("(Title:") == 2


def test_ircot_stops_searching_when_it_has_enough_passages() -> None:
    script = [("", "Ada Berg did. "), ("", "Ada Berg was."), LAST]
    outcome, _ = play("ircot", script, steps=2, settings=PromptedSettings(most_passages=1))
    assert len(outcome.searches) == 1


def test_iter_retgen_searches_with_its_last_output() -> None:
    outcome, _ = play(
        "iter_retgen",
        [
            ("directed by Ada Berg", "By Ada Berg.\nThe final answer: Rome"),
            ("born in Oslo", "The final answer: Oslo\nI hope this helps!"),
        ],
        rounds=2,
    )
    assert outcome.answer == "Oslo"
    assert outcome.searches[1][0] == f"{QUESTION.text} By Ada Berg. The final answer: Rome"


def test_flare_rewrites_an_unlikely_sentence_and_masks_unlikely_tokens_in_the_query() -> None:
    unsure = {"Bergen.": 0.1, "born": 0.6}
    outcome, _ = play(
        "flare",
        [
            ("directed by Ada Berg", "Ada Berg made it. She lives."),
            ("Answer so far: Ada Berg made it.", "Ada Berg was born in Bergen. More", unsure),
            ("born in Oslo", "Ada Berg was born in Oslo. More"),
            ("Answer so far: Ada Berg made it. Ada Berg was born in Oslo.", "The final answer: Oslo\n"),
        ],
    )
    assert outcome.answer == "Oslo"
    assert [query for query, _ in outcome.searches] == [QUESTION.text, "Ada Berg was born in"]


def test_flare_ignores_unlikely_tokens_after_the_sentence() -> None:
    outcome, _ = play(
        "flare", [("", "Ada Berg made it. Perhaps", {"Perhaps": 0.1}), ("", "The final answer: Oslo")]
    )
    assert len(outcome.searches) == 1


def test_flare_thresholds_are_options_and_an_empty_query_becomes_the_question() -> None:
    script = [("", "Perhaps here. And", {"Perhaps": 0.5, "here.": 0.5}), ("", "The final answer: Oslo")]
    assert len(play("flare", script, look_below=0.4)[0].searches) == 1
    masked = [script[0], ("", "Here it is. And"), script[1]]
    outcome, _ = play("flare", masked, mask_below=0.9)
    assert [query for query, _ in outcome.searches] == [QUESTION.text, QUESTION.text]


def test_flare_answers_after_its_last_sentence_and_needs_token_bytes() -> None:
    assert play("flare", [("", "Well then. So"), LAST], sentences=1)[0].answer == "Oslo"
    with pytest.raises(UserError, match="flare needs the bytes of each token"):
        play("flare", [], settings=PromptedSettings())


def test_token_probabilities_cover_only_the_sentence() -> None:
    words = token_probabilities(
        generated("Ada Berg made it. Then", probabilities={"made": 0.25}),
        VOCABULARY,
        len("Ada Berg made it."),
    )
    assert [word for word, _ in words] == ["Ada", " Berg", " made", " it."]
    assert [chance for _, chance in words] == pytest.approx([1, 1, 0.25, 1])


def test_token_probabilities_skip_the_thought_of_a_reasoning_model() -> None:
    unsure = {"Perhaps": 0.1, "born": 0.25}
    output = generated("<think> Perhaps so. </think> She was born there. Then", probabilities=unsure)
    words = token_probabilities(output, VOCABULARY, len("She was born"))
    assert words == [(" She", 1.0), (" was", 1.0), (" born", pytest.approx(0.25))]


def test_flare_ignores_unlikely_tokens_in_the_thought_of_a_reasoning_model() -> None:
    thought = "<think> Perhaps so. </think> Ada Berg made it. Then"
    outcome, _ = play("flare", [("", thought, {"Perhaps": 0.1}), ("", "The final answer: Oslo")])
    assert len(outcome.searches) == 1


def test_search_o1_reasons_over_condensed_passages() -> None:
    outcome, prompts = play(
        "search_o1",
        [
            (
                "begin_search_query",
                "Who made it? <|begin_search_query|>Silver Harbour<|end_search_query|> and on",
            ),
            ("Reasoning:  Who made it? \n\nQuery: Silver Harbour", "Ada Berg directed it."),
            (
                "<|begin_search_result|>Ada Berg directed it.<|end_search_result|>",
                "Then Oslo.\nThe final answer: Oslo",
            ),
        ],
    )
    assert outcome.answer == "Oslo"
    assert "(Title:" in prompts[1] and "(Title:" not in prompts[2]
    assert "Who made it?" in prompts[2] and "and on" not in prompts[2]


def test_search_o1_answers_after_its_last_search() -> None:
    script = [("", "<|begin_search_query|>Ada Berg<|end_search_query|>"), ("", "born in Oslo"), LAST]
    outcome, _ = play("search_o1", script, searches=1)
    assert outcome.answer == "Oslo" and outcome.titles == [PERSON.title]
    assert play("search_o1", [("", "I can't say."), LAST])[0].answer == "Oslo"


def test_decomposition_answers_independent_parts_in_parallel_and_then_dependent_ones() -> None:
    outcome, prompts = play(
        "decomposition",
        [
            (
                "at most 4",
                "1. Who directed Silver Harbour?\n2. Where was #1 born?\n3. What is Silver Harbour?",
            ),
            ("Question: Who directed Silver Harbour?", "Ada Berg"),
            ("Question: What is Silver Harbour?", "a film"),
            ("Question: Where was Ada Berg born?", "Oslo"),
            ("Where was Ada Berg born? Oslo", "The final answer: Oslo"),
        ],
    )
    assert outcome.answer == "Oslo"
    assert [query for query, _ in outcome.searches] == [
        "Who directed Silver Harbour?",
        "What is Silver Harbour?",
        "Where was Ada Berg born?",
    ]
    assert prompts[-1].count("(Title:") == 2


def test_decomposition_ends_for_no_parts_and_for_circular_parts() -> None:
    assert (
        play("decomposition", [("", " "), ("", "Oslo"), ("", "The final answer: Oslo")])[0].answer == "Oslo"
    )
    circle = [
        ("", "Who is #2?\nWho is #1?"),
        ("Who is ?", "a"),
        ("Who is a?", "b"),
        ("", "The final answer: Oslo"),
    ]
    assert play("decomposition", circle)[0].answer == "Oslo"


@pytest.mark.parametrize(
    ("reply", "searches"),
    [
        ("A", 0),
        ("B.", 1),
        ("(B) one search", 1),
        ("**B**", 1),
        ("A single search is enough here, so B.", 1),
        ("A: I know it. B is not needed", 0),
    ],
)
def test_adaptive_rag_uses_the_method_that_the_model_chooses(reply: str, searches: int) -> None:
    outcome, _ = play("adaptive_rag", [("one letter", reply), ("step by step", "The final answer: Oslo")])
    assert outcome.answer == "Oslo" and len(outcome.searches) == searches


@pytest.mark.parametrize("reply", ["C", "hard to say", "A single search is not enough here, so C."])
def test_adaptive_rag_uses_ircot_for_hard_or_unparsed_replies(reply: str) -> None:
    outcome, _ = play("adaptive_rag", [("", reply), ("next sentence", "The final answer: Rome"), LAST])
    assert outcome.answer == "Oslo" and outcome.titles == [FILM.title]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("J. R. R. Tolkien wrote it. Then he left.", "J. R. R. Tolkien wrote it."),
        ("Dr. No is a film. It is old.", "Dr. No is a film."),
        ('He said "no." Then he left.', 'He said "no."'),
        ("It was 1990. Then", "It was 1990."),
        ("It costs 3.50 there\nand here", "It costs 3.50 there"),
        ("The final answer: St. Olaf. It is.", "The final answer: St. Olaf. It is."),
        (" ", ""),
    ],
)
def test_first_sentence_handles_initials_and_titles(text: str, sentence: str) -> None:
    assert first_sentence(text) == sentence
