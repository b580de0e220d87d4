"""R3-RAG's protocol (3.1): one step a context, which shows the question and all steps before it with what they found."""

import dataclasses
import functools
import importlib.resources
import re
from collections.abc import Sequence

from rrl.data.passages import Passage, render
from rrl.data.questions import Question
from rrl.data.trajectory import Search
from rrl.errors import at_least, one_of
from rrl.rollout.protocol import (
    CONTEXT,
    TURN_TOKENS,
    Action,
    Append,
    Episode,
    Finish,
    Restart,
    SearchFor,
    Stream,
)
from rrl.text.short_answers import FINAL_ANSWER

ANALYSIS, QUERY, ANSWER = "The problem analysis:", "The retrieval query:", FINAL_ANSWER
"""Open the sections of a step (Figures 6 and 7)."""
DOCUMENTS = "The retrieval documents:"
"""Opens what the environment adds to a step (released)."""

OPENINGS = ("steps", "paper")
CUTS = ("document", "block")

_STEP = re.compile(r"\s*(?:Step \d+:\s*)?")
_HEADINGS = re.compile("|".join(map(re.escape, (ANALYSIS, QUERY, ANSWER, DOCUMENTS))))
_DECORATED = re.compile(
    rf"(?:[*#]|(?i:\b(?:either|or):))\s*(?:{_HEADINGS.pattern})|(?:{_HEADINGS.pattern})\*\*"
)
"""A heading after "**", "###" or "Either:", or before "**"."""


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """A well-formed step (Eq. 1): an analysis, and a query or an answer."""

    analysis: str
    query: str = ""
    answer: str = ""

    def to_text(self, number: int) -> str:
        """The step as the policy writes it, counted from 1."""
        end = f"{QUERY} {self.query}" if self.query else f"{ANSWER} {self.answer}"
        return f"Step {number}:\n{ANALYSIS} {self.analysis}\n{end}"


def parse_step(text: str) -> Step | None:
    """The step that a policy's text holds; None for a malformed one (Eq. 4).

    Well-formed is: nothing but "Step k:" before the one analysis; then one query or one answer, and no heading more; none of
    the two empty; headings as plain as the prompts show them: of what decorates one, half would stand in the analysis and half
    in the query. Documents are the environment's to write.
    """
    headings = [match.group() for match in _HEADINGS.finditer(text)]
    if headings not in ([ANALYSIS, QUERY], [ANALYSIS, ANSWER]):
        return None
    before, analysis, end = (part.strip() for part in _HEADINGS.split(text))
    if not _STEP.fullmatch(before) or not analysis or not end or _DECORATED.search(text):
        return None
    return Step(analysis, query=end) if headings[1] == QUERY else Step(analysis, answer=end)


@dataclasses.dataclass(frozen=True)
class R3RagEnvironment:
    """At most five steps, each answered in a context of its own; a malformed one ends the episode.

    A query of the last step is searched too (Algorithm 1), though no further step can read what it finds. A step that reaches
    `turn_tokens` has no form (Eq. 4; the released parser reads whatever stands there by then); one that the context ends has
    met a limit, as one whose prompt does not fit.
    """

    max_steps: int = 5
    turn_tokens: int = 512
    """Most tokens of a step (released)."""
    opening: str = "steps"
    """What a step reads: "steps", the question and the steps before, which is what the policy is trained on; or "paper", the
    instructions of Figures 6 and 7, for a model that was not."""
    document_characters: int = 512
    """Of a document's text (appendix C); 0: all of it, as in the paper's evaluation."""
    cut: str = "document"
    """Whether so many characters are those of each "document", or of the whole "block" (released)."""
    drop_seen: bool = True
    """Documents that an earlier step showed are left out (released)."""

    def __post_init__(self) -> None:
        one_of(OPENINGS, self, "opening", where="environment.")
        one_of(CUTS, self, "cut", where="environment.")
        at_least(1, self, "max_steps", "turn_tokens", where="environment.")
        at_least(0, self, "document_characters", where="environment.")

    @property
    def stops(self) -> tuple[str, ...]:
        return ()

    @property
    def observation_tokens(self) -> int:
        """Nothing is appended to a context."""
        return 0

    def react(self, episode: Episode, text: str, stop: str) -> Action:
        if stop == TURN_TOKENS:
            return Finish("length")
        if stop == CONTEXT:
            return Finish("context_limit")
        step = parse_step(text)
        if step is None:
            return Finish("malformed")
        return SearchFor(step.query) if step.query else Finish("answer")

    def observe(self, episode: Episode, passages: Sequence[Passage] | None) -> Action:
        return Finish("turn_limit") if episode.turn + 1 >= self.max_steps else self.next_context(episode)

    def overflow(self, episode: Episode, message: Append | Restart, room: int) -> Action:
        return Finish("context_limit")

    def next_context(self, episode: Episode) -> Restart:
        """The next step's context, after all that was said and found."""
        steps = [step for step in map(parse_step, episode.policy_texts) if step is not None]
        shown = [
            None if search.failed else passages
            for search, passages in zip(episode.searches, self.documents(episode.searches), strict=True)
        ]
        return Restart(self.prompt(episode.question, list(zip(steps, shown, strict=True))))

    def prompt(self, question: Question, past: Sequence[tuple[Step, Sequence[Passage] | None]]) -> str:
        """What the step after `past` reads, as the user's turn; the steps in one form, whatever the policy's own spacing. Of a
        search that failed (None) it reads that."""
        steps = "".join(
            f"\n{step.to_text(number)}\n{DOCUMENTS} {Stream.failure if passages is None else render(passages)}"
            for number, (step, passages) in enumerate(past, start=1)
        )
        if self.opening == "steps":
            return f"The question: {question.text}{steps}"
        if not past:
            return _figure("first").format(question=question.text)
        return _figure("next").format(question=question.text, steps=steps)

    def documents(self, searches: Sequence[Search]) -> list[tuple[Passage, ...]]:
        """What each search showed: passages without those that an earlier one had shown, cut."""
        seen: set[tuple[str, str]] = set()
        shown = []
        for search in searches:
            new = {(p.title, p.text): p for p in search.passages}  # an index may hold a passage twice
            left = {key: p for key, p in new.items() if not (self.drop_seen and key in seen)}
            cut = self._cut(list(left.values()))  # the first of them, as many as there is room for
            seen.update(list(left)[: len(cut)])
            shown.append(tuple(cut))
        return shown

    def _cut(self, passages: Sequence[Passage]) -> list[Passage]:
        most = self.document_characters
        if not most:
            return list(passages)
        if self.cut == "document":
            return [dataclasses.replace(p, text=p.text[:most]) for p in passages]
        kept: list[Passage] = []
        for passage in passages:
            over = len(render([*kept, passage])) - most
            if over >= len(passage.text):
                break
            kept.append(dataclasses.replace(passage, text=passage.text[: len(passage.text) - max(over, 0)]))
        return kept


@functools.cache
def _figure(name: str) -> str:
    """The prompt of Figure 6 ("first") or 7 ("next")."""
    file = importlib.resources.files("rrl.recipes").joinpath(f"prompts/r3rag_{name}.txt")
    return file.read_text(encoding="utf-8")
