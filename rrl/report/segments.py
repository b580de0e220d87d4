"""A trajectory's text cut into pieces: reasoning, search, observation, evidence, answer."""

import codecs
import dataclasses
import functools
import itertools
import re
from collections.abc import Mapping, Sequence

import numpy as np

from rrl.data.trajectory import POLICY, PROMPT, Trajectory
from rrl.text.spans import Tag, enclosed_content, markers

RSEARCH_TAGS: Mapping[Tag, str] = {"search": "search", "original_evidence": "evidence", "answer": "answer"}
"""Tag written by the policy → kind of piece (R-Search, section 3.2.1)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """A run of text of one role and one kind."""

    role: int
    """PROMPT, POLICY or ENVIRONMENT."""
    kind: str
    """"prompt", "reasoning", "observation", "message" (of the environment), or a kind named by the tags. What is new
    in the prompt of a further context is an observation."""
    text: str
    """Without the enclosing tags and the white space at both ends (a prompt is kept as it is)."""
    spans: tuple[tuple[str, float], ...] = ()
    """(text, log-probability) of each sampled token, if the tokens' bytes were given; their texts join to `text`."""


def segments_of(
    trajectory: Trajectory,
    tags: Mapping[Tag, str] = RSEARCH_TAGS,
    token_bytes: Sequence[bytes] | None = None,
) -> list[Segment]:
    """Cuts every segment; text that is in no well-formed box and under no heading is reasoning, blank stretches are dropped.

    `token_bytes` holds the exact bytes of each token id; with it, policy pieces carry their tokens.
    """
    found: list[Segment] = []
    texts = _token_texts(trajectory, token_bytes) if token_bytes is not None else None
    prompt = said = ""
    for index, (role, text) in enumerate(trajectory.segments):
        if role == POLICY:
            found += policy_segments(text, tags, texts[index] if texts else [])
            said = text
        elif role == PROMPT:
            new = _new(prompt, said, text)
            found.append(Segment(role, "observation", new) if prompt else Segment(role, "prompt", text))
            prompt = text
        elif text.strip():
            # The label takes the place of the tags; a message without tags is a correction.
            inner = enclosed_content(text)
            kind, shown = ("message", text) if inner is None else ("observation", inner)
            found.append(Segment(role, kind, shown.strip()))
    return found


def _new(before: str, said: str, prompt: str) -> str:
    """What a context's prompt tells beside the last one's and what the policy had said there."""
    start = _alike(before, prompt)
    end = len(prompt) - _alike(before[start:][::-1], prompt[start:][::-1])
    told = prompt[start:end]
    return (told.rpartition(said.strip())[2] if said.strip() else told).strip()


def _alike(one: str, other: str) -> int:
    """Length of what two texts begin with alike."""
    pairs = enumerate(zip(one, other))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def stray_tags(text: str, tags: Mapping[Tag, str] = RSEARCH_TAGS) -> list[tuple[int, int]]:
    """(start, end) of the tags in a piece of reasoning: the box they should have made was malformed."""
    known = "|".join(re.escape(marker) for tag in tags for marker in markers(tag) if all(markers(tag)))
    return [match.span() for match in re.finditer(known or "(?!)", text)]


def policy_segments(
    text: str, tags: Mapping[Tag, str], tokens: Sequence[tuple[str, float]] = ()
) -> list[Segment]:
    """The pieces of a text that the policy wrote."""
    cuts: list[tuple[str, int, int]] = []
    end = 0
    for match in re.finditer(_marked(tuple(tags)), text, re.DOTALL):
        assert match.lastindex is not None
        cuts.append(("reasoning", end, match.start()))
        cuts.append((list(tags.values())[match.lastindex - 1], *match.span(match.lastindex)))
        end = match.end()
    cuts.append(("reasoning", end, len(text)))
    if "".join(token for token, _ in tokens) != text:
        tokens = ()
    found = []
    for kind, start, stop in cuts:
        inner = text[start:stop].strip()
        if inner or kind != "reasoning":
            start += len(text[start:stop]) - len(text[start:stop].lstrip())
            found.append(Segment(POLICY, kind, inner, _cut_tokens(tokens, start, start + len(inner))))
    return found


@functools.cache
def _marked(tags: tuple[Tag, ...]) -> str:
    """What is in a box or under a heading, its content a group."""
    headings = "|".join(re.escape(opening) for opening, closing in map(markers, tags) if not closing)
    parts = [
        _box(tag) if markers(tag)[1] else f"{re.escape(markers(tag)[0])}((?:(?!{headings}).)*)"
        for tag in tags
    ]
    return "|".join(parts) or "(?!)"


def _box(tag: Tag) -> str:
    """A box of the tag, its content a group: as everywhere, the nearest closing, with no other opening of it between."""
    opening, closing = map(re.escape, markers(tag))
    return f"{opening}((?:(?!{opening}).)*?){closing}"


def _cut_tokens(tokens: Sequence[tuple[str, float]], start: int, stop: int) -> tuple[tuple[str, float], ...]:
    """The tokens of characters start..stop; a token that crosses an edge (`> ` glued to a word) is cut there."""
    spans: list[tuple[str, float]] = []
    at = 0
    for text, logp in tokens:
        inside = text[max(start - at, 0) : max(stop - at, 0)]
        if inside:
            spans.append((inside, logp))
        at += len(text)
    return tuple(spans)


def _token_texts(trajectory: Trajectory, token_bytes: Sequence[bytes]) -> list[list[tuple[str, float]]]:
    """For each segment, (text, log-probability) of its tokens; a character of several tokens belongs to the last."""
    roles = np.asarray(trajectory.roles)
    starts = [0, *(np.flatnonzero(np.diff(roles)) + 1).tolist(), len(roles)]
    runs: list[list[tuple[str, float]]] = []
    for start, stop in itertools.pairwise(starts):
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        run = []
        for at in range(start, stop):
            text = decoder.decode(token_bytes[trajectory.tokens[at]], final=at == stop - 1)
            run.append((text, float(trajectory.logps[at])))
        runs.append(run)
    # Segments without tokens of their own cannot be lined up; then the text is shown without tokens.
    return runs if len(runs) == len(trajectory.segments) else [[] for _ in trajectory.segments]
