"""Split a trajectory's text into segments: reasoning, search, observation, evidence, answer. Read `segments_of` first."""

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
"""Tag written by the policy → kind of segment (R-Search, section 3.2.1)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive text of one role and one kind."""

    role: int
    """PROMPT, POLICY or ENVIRONMENT."""
    kind: str
    """"prompt", "reasoning", "observation", "message" (text of the environment without tags, such as a correction),
    or a kind given by the tags. An episode may continue in another context with a new prompt; what is new in that prompt is an
    "observation"."""
    text: str
    """The text without enclosing tags and outer white space; a prompt is unchanged."""
    tokens: tuple[tuple[str, float], ...] = ()
    """(text, log-probability) of each sampled token, if `token_bytes` was given. The texts join to `text`."""


def segments_of(
    trajectory: Trajectory,
    tags: Mapping[Tag, str] = RSEARCH_TAGS,
    token_bytes: Sequence[bytes] | None = None,
) -> list[Segment]:
    """Split a trajectory into segments of one role and kind; blank ones are dropped.

    Text of the policy outside of well-formed tags is reasoning. A tag without a closing marker is a heading, such as "Query:".
    Its text ends at the next heading.

    Args:
      trajectory: its `segments` are read; with `token_bytes` its tokens and log-probabilities too.
      tags: tag → kind.
      token_bytes: the exact bytes of each token id. With them, segments of the policy have `tokens`.
    """
    segments: list[Segment] = []
    texts = _token_texts(trajectory, token_bytes) if token_bytes is not None else None
    prompt = policy_text = ""
    for index, (role, text) in enumerate(trajectory.segments):
        if role == POLICY:
            segments += policy_segments(text, tags, texts[index] if texts else [])
            policy_text = text
        elif role == PROMPT:
            new = _new_text(prompt, policy_text, text)
            segments.append(Segment(role, "observation", new) if prompt else Segment(role, "prompt", text))
            prompt = text
        elif text.strip():
            # Pages show the kind instead of the tags. A text of the environment without tags is a message, such as a correction.
            inner = enclosed_content(text)
            kind, shown = ("message", text) if inner is None else ("observation", inner)
            segments.append(Segment(role, kind, shown.strip()))
    return segments


def _new_text(previous_prompt: str, policy_text: str, prompt: str) -> str:
    """Return what is new in the prompt of an episode's next context.

    The prefix and the suffix that it shares with the previous prompt are removed. If the rest repeats the policy's last text,
    only what follows that text is returned.
    """
    start = _common_prefix(previous_prompt, prompt)
    end = len(prompt) - _common_prefix(previous_prompt[start:][::-1], prompt[start:][::-1])
    added = prompt[start:end]
    return (added.rpartition(policy_text.strip())[2] if policy_text.strip() else added).strip()


def _common_prefix(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    pairs = enumerate(zip(one, other))
    return next((position for position, (a, b) in pairs if a != b), min(len(one), len(other)))


def stray_tags(text: str, tags: Mapping[Tag, str] = RSEARCH_TAGS) -> list[tuple[int, int]]:
    """Return (start, end) of each stray tag, which is one that is not part of a well-formed pair.

    `text` is a segment of reasoning. `policy_segments` has removed the well-formed pairs from it, so all its tags are stray.
    """
    known = "|".join(re.escape(marker) for tag in tags for marker in markers(tag) if all(markers(tag)))
    return [match.span() for match in re.finditer(known or "(?!)", text)]


def policy_segments(
    text: str, tags: Mapping[Tag, str], tokens: Sequence[tuple[str, float]] = ()
) -> list[Segment]:
    """Split a text of the policy into segments.

    `tokens` are (text, log-probability) pairs. If their texts do not join to `text`, the segments have no tokens.
    """
    ranges: list[tuple[str, int, int]] = []
    end = 0
    for match in re.finditer(_pattern(tuple(tags)), text, re.DOTALL):
        assert match.lastindex is not None
        ranges.append(("reasoning", end, match.start()))
        ranges.append((list(tags.values())[match.lastindex - 1], *match.span(match.lastindex)))
        end = match.end()
    ranges.append(("reasoning", end, len(text)))
    if "".join(token for token, _ in tokens) != text:
        tokens = ()
    segments = []
    for kind, start, stop in ranges:
        inner = text[start:stop].strip()
        if inner or kind != "reasoning":
            start += len(text[start:stop]) - len(text[start:stop].lstrip())
            segments.append(Segment(POLICY, kind, inner, _cut_tokens(tokens, start, start + len(inner))))
    return segments


@functools.cache
def _pattern(tags: tuple[Tag, ...]) -> str:
    """Return a regular expression that matches any of the tags with its content. The content of the n-th tag is group n."""
    headings = "|".join(re.escape(opening) for opening, closing in map(markers, tags) if not closing)
    parts = [
        _enclosed_pattern(tag) if markers(tag)[1] else f"{re.escape(markers(tag)[0])}((?:(?!{headings}).)*)"
        for tag in tags
    ]
    return "|".join(parts) or "(?!)"


def _enclosed_pattern(tag: Tag) -> str:
    """Return a regular expression for an opening tag, the content (a group), and the nearest closing tag.

    The content has no other opening tag of that name.
    """
    opening, closing = map(re.escape, markers(tag))
    return f"{opening}((?:(?!{opening}).)*?){closing}"


def _cut_tokens(tokens: Sequence[tuple[str, float]], start: int, stop: int) -> tuple[tuple[str, float], ...]:
    """Return the tokens of characters start..stop. A token that crosses a bound is cut there."""
    tokens_inside: list[tuple[str, float]] = []
    position = 0
    for text, logp in tokens:
        inside = text[max(start - position, 0) : max(stop - position, 0)]
        if inside:
            tokens_inside.append((inside, logp))
        position += len(text)
    return tuple(tokens_inside)


def _token_texts(trajectory: Trajectory, token_bytes: Sequence[bytes]) -> list[list[tuple[str, float]]]:
    """Return (text, log-probability) of the tokens of each segment.

    A character whose bytes are spread over several tokens belongs to the last of them.
    """
    roles = np.asarray(trajectory.roles)
    starts = [0, *(np.flatnonzero(np.diff(roles)) + 1).tolist(), len(roles)]
    token_texts: list[list[tuple[str, float]]] = []
    for start, stop in itertools.pairwise(starts):
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        texts = []
        for position in range(start, stop):
            text = decoder.decode(token_bytes[trajectory.tokens[position]], final=position == stop - 1)
            texts.append((text, float(trajectory.logps[position])))
        token_texts.append(texts)
    # If some segments have no tokens, segments and tokens cannot be aligned, and the text is shown without tokens.
    return token_texts if len(token_texts) == len(trajectory.segments) else [[] for _ in trajectory.segments]
