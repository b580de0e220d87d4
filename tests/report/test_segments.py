"""Splitting a trajectory into segments preserves the text, the meaning of tags and the tokens."""

import dataclasses

from rrl.data.trajectory import ENVIRONMENT, POLICY, PROMPT
from rrl.report.article import article
from rrl.report.segments import policy_segments, segments_of, stray_tags
from tests.eval.fakes import FakeTokens, direct, malformed, spouse, winter


def kinds(trajectory):
    return [segment.kind for segment in segments_of(trajectory)]


def test_segments_follow_the_order_of_the_paper():
    assert kinds(spouse()) == [
        *("prompt", "reasoning", "search", "observation", "reasoning", "search", "observation"),
        *("evidence", "answer"),
    ]


def test_malformed_tags_stay_reasoning_and_are_listed_as_stray():
    segments = segments_of(malformed())
    assert [segment.kind for segment in segments] == [
        "prompt",
        "reasoning",
        "message",
        "search",
        "observation",
        "reasoning",
    ]
    assert [segments[1].text[start:stop] for start, stop in stray_tags(segments[1].text)] == [
        "<search>",
        "<answer>",
    ]


def test_pairs_of_markers_are_handled_like_tags():
    query, documents = ((f"<|begin_of_{name}|>", f"<|end_of_{name}|>") for name in ("query", "documents"))
    segments = [
        (POLICY, f"why {query[1]} {query[0]}x{query[0]} y {query[1]}"),
        (ENVIRONMENT, f"\n{documents[0]}\nfound </answer>\n{documents[1]}\n"),
        (POLICY, "so </think><answer> z </answer>"),
        (ENVIRONMENT, "\nI write <answer> and </answer>.\n"),
    ]
    tags = {query: "search", "answer": "answer"}
    segments = segments_of(dataclasses.replace(direct(), segments=segments), tags)
    assert [(segment.kind, segment.text) for segment in segments] == [
        ("reasoning", f"why {query[1]} {query[0]}x"),
        ("search", "y"),
        ("observation", "found </answer>"),
        ("reasoning", "so </think>"),
        ("answer", "z"),
        ("message", "I write <answer> and </answer>."),
    ]
    text = segments[0].text
    assert [text[start:stop] for start, stop in stray_tags(text, tags)] == [query[1], query[0]]
    assert stray_tags(text, {}) == []


def test_tags_in_the_prompt_make_no_segments():
    segments = segments_of(direct())
    assert [segment.kind for segment in segments if segment.role == PROMPT] == ["prompt"]
    assert segments[0].text == direct().segments[0][1]


def test_tokens_join_to_the_text_of_each_policy_segment():
    tokens = FakeTokens()
    trajectory = winter(tokens=tokens)
    for segment in segments_of(trajectory, token_bytes=tokens.bytes):
        assert "".join(text for text, _ in segment.tokens) == (segment.text if segment.role == POLICY else "")


def test_a_character_of_several_tokens_belongs_to_the_last():
    trajectory = dataclasses.replace(direct(), segments=[(POLICY, "é!")])
    trajectory.tokens, trajectory.roles = trajectory.tokens[:3], trajectory.roles[:3] * 0 + POLICY
    trajectory.tokens[:] = [0, 1, 2]
    trajectory.logps = trajectory.logps[:3] * 0 - [1.0, 2.0, 3.0]
    (segment,) = segments_of(trajectory, token_bytes=[b"\xc3", b"\xa9", b"!"])
    assert segment.tokens == (("é", -2.0), ("!", -3.0))


def test_tokens_that_do_not_spell_the_text_are_left_out():
    trajectory = spouse()
    assert all(not segment.tokens for segment in segments_of(trajectory, token_bytes=[b"x"] * 1000))


def test_other_tags_can_be_given():
    trajectory = dataclasses.replace(
        direct(), segments=[(POLICY, "<think> why </think><search>x</search>"), (ENVIRONMENT, "y")]
    )
    segments = segments_of(trajectory, {"think": "reasoning", "search": "search"})
    assert [(segment.kind, segment.text) for segment in segments] == [
        ("reasoning", "why"),
        ("search", "x"),
        ("message", "y"),
    ]


STEPS = {("The retrieval query:", ""): "search", ("The final answer:", ""): "answer"}


def test_a_heading_contains_the_text_up_to_the_next_heading():
    text = "Step 1:\nWhy: so\nThe retrieval query: who <search>?\nThe final answer: A: b"
    segments = policy_segments(text, STEPS)
    assert [(segment.kind, segment.text) for segment in segments] == [
        ("reasoning", "Step 1:\nWhy: so"),
        ("search", "who <search>?"),
        ("answer", "A: b"),
    ]


def test_boxes_and_headings_can_be_mixed():
    segments = policy_segments("a<x>b</x>c Query: d", {"x": "search", ("Query:", ""): "answer"})
    assert [(segment.kind, segment.text) for segment in segments] == [
        ("reasoning", "a"),
        ("search", "b"),
        ("reasoning", "c"),
        ("answer", "d"),
    ]


def test_only_the_new_text_of_a_further_prompt_is_shown():
    opening = "user\nThe question: Who?{}\nassistant\n"
    policy_text = "Step 1:\nThe retrieval query: x"
    past = f"\n{policy_text}\nDocuments: (Title: T) t"
    more = "\nStep 2:\nThe retrieval query: y\nDocuments: (Title: U) u"
    segments = [
        (PROMPT, opening.format("")),
        (POLICY, policy_text),
        (PROMPT, opening.format(past)),
        (POLICY, " Step 2:\nThe retrieval query: y\n"),
        (PROMPT, opening.format(past + more)),
        (POLICY, "The final answer: z"),
    ]
    trajectory = dataclasses.replace(direct(), segments=segments)
    shown = [
        (segment.kind, segment.text) for segment in segments_of(trajectory, STEPS) if segment.role == PROMPT
    ]
    assert shown == [
        ("prompt", opening.format("")),
        ("observation", "Documents: (Title: T) t"),
        ("observation", "Documents: (Title: U) u"),
    ]
    page = article(trajectory, tags=STEPS)
    assert page.count("<summary>prompt</summary>") == 1 and page.count("(Title: T)") == 1
