"""The reasoning and the documents of an episode, as judges read them. Read `transcript_of` first."""

import collections
import dataclasses
import itertools
from collections.abc import Sequence

from rrl.data.trajectory import ENVIRONMENT, POLICY, PROMPT, Search, Trajectory
from rrl.text.chat import trailing_think_tag
from rrl.text.spans import Tag, enclosed_content, without_tags


@dataclasses.dataclass(frozen=True)
class Transcript:
    """The reasoning and the documents of an episode, without its answers (called RD in TIRESRAG-R1, section 3.1)."""

    segments: tuple[tuple[int, str], ...]
    """(POLICY or ENVIRONMENT, text) pairs in order: reasoning and documents."""
    titles: tuple[str, ...] = ()
    """Titles of all passages shown."""

    @property
    def text(self) -> str:
        """The whole transcript."""
        return "".join(text for _, text in self.segments).strip()

    def text_of(self, role: int) -> str:
        """Return all text of one role, POLICY or ENVIRONMENT."""
        return "\n".join(text.strip() for segment_role, text in self.segments if segment_role == role)


def transcript_of(
    trajectory: Trajectory, answer: Tag, prefill: str = "", max_searches: int | None = None
) -> Transcript:
    """Return the reasoning and the documents of a trajectory without its answers, as in TIRESRAG-R1's released code.

    Some protocols start a new context after each search (R3-RAG). Each new prompt then repeats the previous prompt and adds the
    documents, so the documents are the text after the longest common prefix of the two prompts.

    Args:
      trajectory: the episode. Its first prompt is not part of the transcript.
      answer: the tag of answers; its contents are removed.
      prefill: text at the end of the first prompt, such as "<think>", that is put before the policy's first text. If it is empty
        and the chat template ends a prompt with `<think>`, that tag is used.
      max_searches: the transcript ends before the documents of the search that would exceed it. None: no limit.
    """
    segments: list[tuple[int, str]] = []
    prompts: list[str] = []
    searches_per_turn = collections.Counter(search.turn for search in trajectory.searches)
    shown = 0  # searches whose documents are in `segments`
    for role, text in trajectory.segments:
        if role == POLICY:
            segments.append((role, prefill + without_tags(text, answer)))
            prefill = ""
            continue
        if role == PROMPT:
            prompts.append(text)
            prefill = prefill or trailing_think_tag(text)
            if len(prompts) == 1:
                continue
            common_prefix = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*prompts[-2:]))
            text = text[len(list(common_prefix)) :]
            new_searches = searches_per_turn[
                len(prompts) - 2
            ]  # each context has one turn; turns count from 0
        else:
            # A correction, the environment's message after a turn without an action, has no observation tag.
            new_searches = int(enclosed_content(text) is not None)
        if max_searches is not None and shown + new_searches > max_searches:
            break
        shown += new_searches
        segments.append((ENVIRONMENT, text))
    titles = (title for search in shown_searches(trajectory)[:max_searches] for title in search.titles)
    return Transcript(tuple(segments), tuple(dict.fromkeys(titles)))


def shown_searches(trajectory: Trajectory) -> Sequence[Search]:
    """Return the searches whose passages the policy saw: all but those that did not fit the context."""
    if trajectory.ended != "context_limit":
        return trajectory.searches
    segments = trajectory.segments
    contexts_after_the_first = sum(role == PROMPT for role, _ in segments) - 1
    observations = sum(role == ENVIRONMENT and enclosed_content(text) is not None for role, text in segments)
    turns = list(dict.fromkeys(search.turn for search in trajectory.searches))
    # The documents of a turn's searches are shown together, in a new context or in an observation.
    shown_turns = turns[: contexts_after_the_first + observations]
    return [search for search in trajectory.searches if search.turn in shown_turns]
