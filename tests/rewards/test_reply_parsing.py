"""Scores and verdicts are read from the replies of judges, however they are worded."""

import pytest

from rrl.rewards.reply_parsing import parse_tenths, parse_verdict


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("0.7", 0.7),
        (" 1.0 \n", 1.0),
        ("0", 0.0),
        ("1", 1.0),
        (".3", 0.3),
        ("Score: 0.4.", 0.4),
        ("0.85", 0.8),
        ("0.8/1", 0.8),
        ("Score: 0.4 / 1.0", 0.4),
        ("1/1.", 1.0),
        ("0.6 out of 1.", 0.6),
        ("0.95001", 1.0),
        ("I thought 0.2, but 0.6", 0.6),
        ("<think>0.1</think>0.9", 0.9),
        ("<think>0.1", None),
        ("1.5", None),
        ("-0.5", None),
        ("7", None),
        ("7/10", None),
        ("1/10", None),
        ("70%", None),
        ("0,7", None),
        ("0.8 out of 1", 0.8),
        ("0.3 (on a scale from 0 to 1)", 0.3),
        ("0.3, between 0 and 1.0", 0.3),
        ("Score: 0.3 (0 = irrelevant, 1 = relevant)", 0.3),
        ("On a scale of 0-1: 1", 1.0),
        ("from 0 to 1", None),
        ("0.3. Only 1 of the 5 documents is relevant.", 0.3),
        ("0.2 - only 1 document helps", 0.2),
        ("**0.2**\n1 document helps", 0.2),
        ("0.2 because 1 document helps", 0.2),
        ("Score: 0.4\nReason: 1 passage names the year", 0.4),
        ("One of two is relevant.\n**Score:** 0.5 (1 document)", 0.5),
        ("Score: 0.4 at first; no, score: 1", 1.0),
        ("1 (one document states it, 0 others)", 1.0),
        ("1 of the documents helps: 0.2", 0.2),
        ("1. The first says nothing.\n2. The second does: 0.6", 0.6),
        ("They are relevant: 1", 1.0),
        ("Nothing in them helps, so the relevance is **0**.", 0.0),
        ("Both tell the year.\n1", 1.0),
        ("Document 1 is irrelevant.", None),
        ("[1] is irrelevant", None),
        ("Documents 1 and 2 do not help.", None),
        ("Nothing helps but document 1", None),
        ("I count 1 relevant and 4 irrelevant", None),
        ("1. The first document is off-topic.\n2. The second is too.\nNothing in them helps.", None),
        ("very good", None),
        ("", None),
    ],
)
def test_scores_are_parsed_in_tenths(text, score):
    assert parse_tenths(text) == score


@pytest.mark.parametrize(
    "text",
    [
        "I'm sorry, I can't assist with that. True",
        "I cannot determine whether the prediction is true or false.",
        "As an AI language model, I am not able to say whether it is true.",
        "Unfortunately, I\u2019m unable to verify this: false",
        "<think>True?</think>\n\nSorry, but I can't rate this 1.0.",
        "I apologize, but I cannot say whether this is True or False.",
        "My apologies, I can't rate this 0.5: true",
        "I must decline to answer whether it is true.",
        "I'm not comfortable with a score of 0.7, true or false.",
        "I don't have enough information to judge if it is true (0.0).",
        "We cannot determine if the statement is true",
        "Unfortunately, it is not possible to determine whether the answer is true.",
        "I cannot in good conscience say True",
    ],
)
def test_a_refusal_has_neither_verdict_nor_score(text):
    assert parse_verdict(text) is parse_tenths(text) is None


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("I cannot find a mistake: True", 1.0),
        ("I can say it is true", 1.0),
        ("Sorry, no.", 0.0),
        ("No, I can't", 0.0),
        ("It is not possible to infer the answer from these documents: false", 0.0),
        ("We cannot determine the year from the context. False.", 0.0),
        ("I do not have doubts. True", 1.0),
    ],
)
def test_a_verdict_that_resembles_a_refusal_is_parsed(text, verdict):
    assert parse_verdict(text) == verdict
