"""R3-RAG's protocol (3.1): each step has a new context, which shows the question and all earlier steps with their documents."""

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
    Append,
    Environment,
    Episode,
    Finish,
    Restart,
    SearchFor,
    StepResult,
    Stream,
)
from rrl.text.short_answers import FINAL_ANSWER

ANALYSIS, QUERY, ANSWER = "The problem analysis:", "The retrieval query:", FINAL_ANSWER
"""The headings of a step (Figures 6 and 7)."""
DOCUMENTS = "The retrieval documents:"
"""The heading of the documents that the environment adds to a step (released)."""

OPENINGS = ("steps", "paper")
"""Values of `R3RagEnvironment.opening`."""
CUTS = ("document", "block")
"""Values of `R3RagEnvironment.cut`."""

_STEP = re.compile(r"\s*(?:Step \d+:\s*)?")
_HEADINGS = re.compile("|".join(map(re.escape, (ANALYSIS, QUERY, ANSWER, DOCUMENTS))))
_DECORATED = re.compile(
    rf"(?:[*#]|(?i:\b(?:either|or):))\s*(?:{_HEADINGS.pattern})|(?:{_HEADINGS.pattern})\*\*"
)
"""A heading with Markdown decoration, or after "Either:" or "Or:"."""


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """A well-formed step (Eq. 1): an analysis, and either a query or an answer."""

    analysis: str
    query: str = ""
    answer: str = ""

    def to_text(self, number: int) -> str:
        """Return the step as the policy writes it. `number` counts from 1."""
        end = f"{QUERY} {self.query}" if self.query else f"{ANSWER} {self.answer}"
        return f"Step {number}:\n{ANALYSIS} {self.analysis}\n{end}"


def parse_step(text: str) -> Step | None:
    """Parse a step; None if it is malformed (Eq. 4).

    A step is well-formed if it has one analysis and then one query or one answer, both are non-empty, only "Step k:" precedes
    the analysis, there is no other heading (the environment writes the documents), and no heading is decorated. Decoration is
    malformed because its opening and closing marks would become part of the analysis and of the query.
    """
    headings = [match.group() for match in _HEADINGS.finditer(text)]
    if headings not in ([ANALYSIS, QUERY], [ANALYSIS, ANSWER]):
        return None
    before, analysis, end = (part.strip() for part in _HEADINGS.split(text))
    if not _STEP.fullmatch(before) or not analysis or not end or _DECORATED.search(text):
        return None
    return Step(analysis, query=end) if headings[1] == QUERY else Step(analysis, answer=end)


@dataclasses.dataclass(frozen=True)
class R3RagEnvironment(Environment):
    """At most five steps, each in a new context. A malformed step ends the episode.

    A query of the last step is searched too (Algorithm 1), although no later step reads its documents. A step that reaches
    `turn_tokens` is malformed (Eq. 4); the released parser reads the text written so far. A step that reaches the end of the
    context, or whose prompt does not fit it, ends the episode as "context_limit".
    """

    max_steps: int = 5
    """Maximum number of steps of an episode, in training and evaluation."""
    turn_tokens: int = 512
    """Maximum number of tokens of a step (released)."""
    opening: str = "steps"
    """The prompt. "steps": the question and the earlier steps, without an instruction; the policy is trained on this form.
    "paper": the instructions of Figures 6 and 7, for a model that was not trained on "steps"."""
    document_characters: int = 512
    """Maximum number of characters of a document's text (appendix C); 0: no limit, as in the paper's evaluation."""
    cut: str = "document"
    """Whether `document_characters` limits each "document" or all documents of a step together, the "block" (released)."""
    drop_seen: bool = True
    """Whether a step omits documents that an earlier step showed (released)."""

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
        """0: nothing is appended to a context."""
        return 0

    def step(self, episode: Episode, text: str, stop: str) -> StepResult:
        if stop == TURN_TOKENS:
            return Finish("length")
        if stop == CONTEXT:
            return Finish("context_limit")
        step = parse_step(text)
        if step is None:
            return Finish("malformed")
        return SearchFor(step.query) if step.query else Finish("answer")

    def observe(self, episode: Episode, passages: Sequence[Passage] | None) -> StepResult:
        return Finish("turn_limit") if episode.turn + 1 >= self.max_steps else self.next_context(episode)

    def overflow(self, episode: Episode, message: Append | Restart, room: int) -> StepResult:
        return Finish("context_limit")

    def next_context(self, episode: Episode) -> Restart:
        """Return the context of the next step: the question, and all steps and documents so far."""
        steps = [step for step in map(parse_step, episode.policy_texts) if step is not None]
        documents = [
            None if search.failed else passages
            for search, passages in zip(episode.searches, self.documents(episode.searches), strict=True)
        ]
        return Restart(self.prompt(episode.question, list(zip(steps, documents, strict=True))))

    def prompt(self, question: Question, past: Sequence[tuple[Step, Sequence[Passage] | None]]) -> str:
        """Return the prompt of a step, as the user's turn. The white space in earlier steps is normalised.

        Args:
          question: the question.
          past: the earlier steps with their documents. For None the prompt says that the search failed.
        """
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
        """Return the documents that each search shows: truncated, and without those that an earlier search showed."""
        seen: set[tuple[str, str]] = set()
        documents = []
        for search in searches:
            unique = {(p.title, p.text): p for p in search.passages}  # an index may hold a passage twice
            new = {key: p for key, p in unique.items() if not (self.drop_seen and key in seen)}
            truncated = self._truncate(list(new.values()))  # may omit the last ones
            seen.update(list(new)[: len(truncated)])
            documents.append(tuple(truncated))
        return documents

    def _truncate(self, passages: Sequence[Passage]) -> list[Passage]:
        limit = self.document_characters
        if not limit:
            return list(passages)
        if self.cut == "document":
            return [dataclasses.replace(p, text=p.text[:limit]) for p in passages]
        block: list[Passage] = []
        for passage in passages:
            excess = len(render([*block, passage])) - limit
            if excess >= len(passage.text):
                break
            block.append(
                dataclasses.replace(passage, text=passage.text[: len(passage.text) - max(excess, 0)])
            )
        return block


@functools.cache
def _figure(name: str) -> str:
    """Return the prompt of Figure 6 ("first") or Figure 7 ("next")."""
    file = importlib.resources.files("rrl.recipes").joinpath(f"prompts/r3rag_{name}.txt")
    return file.read_text(encoding="utf-8")
