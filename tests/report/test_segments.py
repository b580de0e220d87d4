"""Cutting a trajectory into pieces keeps the text, the tags' meaning and the tokens."""

import dataclasses

from rrl.data.trajectory import ENVIRONMENT, POLICY, PROMPT
from rrl.report.article import article
from rrl.report.segments import policy_segments, segments_of, stray_tags
from tests.eval.fakes import FakeTokens, direct, malformed, spouse, winter


def kinds(trajectory):
    return [piece.kind for piece in segments_of(trajectory)]


def test_pieces_follow_the_papers_order():
    assert kinds(spouse()) == [
        *("prompt", "reasoning", "search", "observation", "reasoning", "search", "observation"),
        *("evidence", "answer"),
    ]


def test_a_malformed_box_stays_reasoning_and_its_tags_are_found():
    cut = segments_of(malformed())
    assert [piece.kind for piece in cut] == [
        "prompt",
        "reasoning",
        "message",
        "search",
        "observation",
        "reasoning",
    ]
    assert [cut[1].text[start:stop] for start, stop in stray_tags(cut[1].text)] == ["<search>", "<answer>"]


def test_markers_of_another_form_are_cut_and_found_alike():
    query, documents = ((f"<|begin_of_{name}|>", f"<|end_of_{name}|>") for name in ("query", "documents"))
    segments = [
        (POLICY, f"why {query[1]} {query[0]}x{query[0]} y {query[1]}"),
        (ENVIRONMENT, f"\n{documents[0]}\nfound </answer>\n{documents[1]}\n"),
        (POLICY, "so </think><answer> z </answer>"),
        (ENVIRONMENT, "\nI write <answer> and </answer>.\n"),
    ]
    tags = {query: "search", "answer": "answer"}
    cut = segments_of(dataclasses.replace(direct(), segments=segments), tags)
    assert [(piece.kind, piece.text) for piece in cut] == [
        ("reasoning", f"why {query[1]} {query[0]}x"),
        ("search", "y"),
        ("observation", "found </answer>"),
        ("reasoning", "so </think>"),
        ("answer", "z"),
        ("message", "I write <answer> and </answer>."),
    ]
    text = cut[0].text
    assert [text[start:stop] for start, stop in stray_tags(text, tags)] == [query[1], query[0]]
    assert stray_tags(text, {}) == []


def test_tags_in_the_prompt_are_not_the_policys():
    cut = segments_of(direct())
    assert [piece.kind for piece in cut if piece.role == PROMPT] == ["prompt"]
    assert cut[0].text == direct().segments[0][1]


def test_tokens_join_to_the_text_of_each_policy_piece():
    tokens = FakeTokens()
    trajectory = winter(tokens=tokens)
    for piece in segments_of(trajectory, token_bytes=tokens.bytes):
        assert "".join(text for text, _ in piece.spans) == (piece.text if piece.role == POLICY else "")


def test_a_character_of_several_tokens_belongs_to_the_last():
    trajectory = dataclasses.replace(direct(), segments=[(POLICY, "é!")])
    trajectory.tokens, trajectory.roles = trajectory.tokens[:3], trajectory.roles[:3] * 0 + POLICY
    trajectory.tokens[:] = [0, 1, 2]
    trajectory.logps = trajectory.logps[:3] * 0 - [1.0, 2.0, 3.0]
    (piece,) = segments_of(trajectory, token_bytes=[b"\xc3", b"\xa9", b"!"])
    assert piece.spans == (("é", -2.0), ("!", -3.0))


def test_tokens_that_do_not_spell_the_text_are_left_out():
    trajectory = spouse()
    assert all(not piece.spans for piece in segments_of(trajectory, token_bytes=[b"x"] * 1000))


def test_other_tags_can_be_named():
    trajectory = dataclasses.replace(
        direct(), segments=[(POLICY, "<think> why </think><search>x</search>"), (ENVIRONMENT, "y")]
    )
    cut = segments_of(trajectory, {"think": "reasoning", "search": "search"})
    assert [(piece.kind, piece.text) for piece in cut] == [
        ("reasoning", "why"),
        ("search", "x"),
        ("message", "y"),
    ]


STEPS = {("The retrieval query:", ""): "search", ("The final answer:", ""): "answer"}


def test_a_heading_holds_what_follows_it_up_to_the_next():
    text = "Step 1:\nWhy: so\nThe retrieval query: who <search>?\nThe final answer: A: b"
    cut = policy_segments(text, STEPS)
    assert [(piece.kind, piece.text) for piece in cut] == [
        ("reasoning", "Step 1:\nWhy: so"),
        ("search", "who <search>?"),
        ("answer", "A: b"),
    ]


def test_boxes_and_headings_go_together():
    cut = policy_segments("a<x>b</x>c Query: d", {"x": "search", ("Query:", ""): "answer"})
    assert [(piece.kind, piece.text) for piece in cut] == [
        ("reasoning", "a"),
        ("search", "b"),
        ("reasoning", "c"),
        ("answer", "d"),
    ]


def test_of_a_further_contexts_prompt_only_what_is_new_is_shown():
    opening = "user\nThe question: Who?{}\nassistant\n"
    said = "Step 1:\nThe retrieval query: x"
    past = f"\n{said}\nDocuments: (Title: T) t"
    more = "\nStep 2:\nThe retrieval query: y\nDocuments: (Title: U) u"
    segments = [
        (PROMPT, opening.format("")),
        (POLICY, said),
        (PROMPT, opening.format(past)),
        (POLICY, " Step 2:\nThe retrieval query: y\n"),
        (PROMPT, opening.format(past + more)),
        (POLICY, "The final answer: z"),
    ]
    trajectory = dataclasses.replace(direct(), segments=segments)
    shown = [(piece.kind, piece.text) for piece in segments_of(trajectory, STEPS) if piece.role == PROMPT]
    assert shown == [
        ("prompt", opening.format("")),
        ("observation", "Documents: (Title: T) t"),
        ("observation", "Documents: (Title: U) u"),
    ]
    page = article(trajectory, tags=STEPS)
    assert page.count("<summary>prompt</summary>") == 1 and page.count("(Title: T)") == 1
