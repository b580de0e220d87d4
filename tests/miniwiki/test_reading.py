"""Tests of pretraining text and reader examples: answers follow from the passages, and targets are marked."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from rrl.errors import UserError
from rrl.miniwiki import KINDS, MiniWiki, generate
from rrl.miniwiki.drills import drill_segments
from rrl.miniwiki.evidence import UNKNOWN, gather_evidence, reader_examples
from rrl.miniwiki.lookup import WikiLookup
from rrl.miniwiki.reading import passage_segments, reading_examples
from rrl.models.tokenizer import load_tokenizer

TEMPLATE = "Passages: {evidence}\n\nQuestion: {query}\n\nAnswer:"
STATED = re.compile(r"The [a-z ]+ of ([^.]+?) is ([^.]+)\.")
LOOK_UPS = (" director of", " author of", " spouse of", " country of", " birth year of")


@pytest.fixture(scope="module")
def wiki() -> MiniWiki:
    return generate("train", 0, 600, worlds=3)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return load_tokenizer(Path(__file__).parents[2] / "assets" / "miniwiki-tokenizer")


def _take(stream, n: int) -> list:
    return list(itertools.islice(stream, n))


def test_the_same_seed_gives_the_same_stream(wiki: MiniWiki, tokenizer: PreTrainedTokenizerFast) -> None:
    a, b, c = (_take(reading_examples(wiki, tokenizer, seed), 20) for seed in (0, 0, 1))
    assert all(
        np.array_equal(x.tokens, y.tokens) and np.array_equal(x.loss_mask, y.loss_mask)
        for x, y in zip(a, b, strict=True)
    )
    assert not all(np.array_equal(x.tokens, y.tokens) for x, y in zip(a, c, strict=True))


def test_tokens_of_segments_join_to_those_of_the_whole_text(
    wiki: MiniWiki, tokenizer: PreTrainedTokenizerFast
) -> None:
    for example in _take(reading_examples(wiki, tokenizer, 0, limit=4096), 200):
        assert tokenizer.encode(tokenizer.decode(example.tokens)) == example.tokens.tolist()


def test_examples_respect_the_limit_and_have_targets(
    wiki: MiniWiki, tokenizer: PreTrainedTokenizerFast
) -> None:
    examples = _take(reading_examples(wiki, tokenizer, 0, limit=300), 200)
    assert max(len(example.tokens) for example in examples) == 300
    assert all(
        example.tokens.dtype == np.int32 and example.loss_mask.any() and not example.loss_mask[0]
        for example in examples
    )
    whole = np.mean([example.loss_mask[1:].all() for example in examples])
    assert 0.03 < whole < 0.2


def test_reading_examples_contain_no_protocol(wiki: MiniWiki, tokenizer: PreTrainedTokenizerFast) -> None:
    for example in _take(reading_examples(wiki, tokenizer, 3), 200):
        text = tokenizer.decode(example.tokens)
        assert not any(sign in text for sign in ("<", ">", "search", "evidence", "Question"))


def test_questions_are_followed_by_required_facts_and_never_by_answers(
    wiki: MiniWiki, tokenizer: PreTrainedTokenizerFast
) -> None:
    lines = [
        line
        for example in _take(reading_examples(wiki, tokenizer, 3, questions=0.5, limit=4096), 100)
        for line in tokenizer.decode(example.tokens).splitlines()
        if "?" in line
    ]
    assert len(lines) > 200
    facts = {item.plan.facts_text for kind in KINDS for item in wiki.questions(kind, 30, 3)}
    assert all(line.split("? : ")[1] in facts for line in lines)


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [
        ("one_hop", r"[^,;]+ of [^,;]+"),
        ("two_hop", r"[^,;]+ of [^,;]+, [^,;]+"),
        ("three_hop", r"[^,;]+ of [^,;]+, [^,;]+, [^,;]+"),
        ("comparison", r"([^,;]+ of [^,;]+; ){2}(earlier|later|same)"),
        ("bridge_comparison", r"([^,;]+ of [^,;]+, [^,;]+; ){2}(earlier|later|same)"),
    ],
)
def test_facts_of_a_plan_have_the_form_of_its_kind(wiki: MiniWiki, kind: str, pattern: str) -> None:
    assert all(re.fullmatch(pattern, item.plan.facts_text) for item in wiki.questions(kind, 40, 0))


def test_answers_to_tasks_occur_in_the_passages_before_them(wiki: MiniWiki) -> None:
    lookup, rng = WikiLookup(wiki), np.random.default_rng(0)
    for _ in range(200):
        segments = passage_segments(lookup, rng, int(rng.integers(1, 10)))
        before = ""
        for (task, _), (answer, target) in itertools.pairwise(segments):
            before += task
            if target and task.startswith(LOOK_UPS) and not set(",;") & set(task):
                assert answer.strip() in before
            if target and set(",;") & set(task) and not task.startswith((" copy", "(Title")):
                assert all(value in before for _, value in STATED.findall(answer))
            if target and task.startswith(" copy"):
                for sentence in answer.strip().removesuffix(".").split(". "):
                    assert sentence in before


def test_conclusions_of_drills_follow_from_their_statements(wiki: MiniWiki) -> None:
    lookup, rng = WikiLookup(wiki), np.random.default_rng(0)
    segments = [segment for _ in range(60) for segment in drill_segments(lookup, rng)]
    kinds = {"earlier": 0, "later": 0, "same": 0, "bridge": 0}
    for (task, _), (answer, _) in itertools.pairwise(segments):
        word, stated = task.split(" :")[0].strip(), STATED.findall(task)
        if not stated:
            continue
        bridge = len(stated) == 4
        (one, x), (two, y) = stated[1::2] if bridge else stated
        kinds[word] += 1
        kinds["bridge"] += bridge
        assert f"{one} " in answer and x in answer and f" {two} " in answer and y in answer
        if word == "same":
            assert answer.endswith(", the same.\n" if x == y else ", not the same.\n")
        else:
            first = (int(x) < int(y)) == (word == "earlier")
            work = f" of {stated[0 if first else 2][0]}" if bridge else ""
            assert f", so {one if first else two} was " in answer and answer.endswith(f"{work}.\n")
    assert min(kinds.values()) > 30


@pytest.mark.parametrize("passages", range(1, 10))
def test_sample_entities_returns_n_different_entities_of_one_sub_world(wiki: MiniWiki, passages: int) -> None:
    lookup = WikiLookup(wiki)
    entities = lookup.sample_entities(np.random.default_rng(passages), passages).entities
    assert len(set(entities)) == passages
    assert len({lookup.subworld_of(entity) for entity in entities}) == 1


def test_evidence_is_complete_unless_the_answer_is_unknown(wiki: MiniWiki) -> None:
    lookup, rng = WikiLookup(wiki), np.random.default_rng(0)
    unknown = 0
    for item in wiki.questions("two_hop", 200, 0):
        evidence, answer = gather_evidence(item, lookup, rng, missing=0.2)
        complete = all(
            h.sentence in evidence or f"The {h.query} is {h.value}." in evidence for h in item.plan.hops
        )
        assert complete == (answer != UNKNOWN)
        assert evidence
        unknown += answer == UNKNOWN
    assert 0.1 < unknown / 200 < 0.3


@pytest.mark.parametrize("chat", [True, False])
def test_only_answer_and_eos_are_targets_of_the_reader(
    wiki: MiniWiki, tokenizer: PreTrainedTokenizerFast, chat: bool
) -> None:
    for example in _take(reader_examples(wiki, tokenizer, 0, TEMPLATE, chat=chat), 100):
        targets = example.tokens[example.loss_mask]
        assert targets[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(targets[:-1]).startswith(" ")
        assert example.loss_mask[-len(targets) :].all()
        assert "Question: " in tokenizer.decode(example.tokens)


def test_a_template_without_evidence_or_query_is_refused(
    wiki: MiniWiki, tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(UserError, match="query"):
        next(reader_examples(wiki, tokenizer, 0, "{evidence}"))
