"""What prompted methods share: their settings, how questions and passages are shown, and a record of what a method did."""

import dataclasses
import re
from collections.abc import Generator, Iterable, Sequence
from typing import Any

from rrl.data.passages import Passage, render
from rrl.data.trajectory import NOT_FINITE
from rrl.errors import at_least
from rrl.rollout.workflow import Generate, Generated, PromptTooLong, Retrieve, WorkflowRequest
from rrl.text.short_answers import FINAL_ANSWER, final_answer

PromptedWorkflow = Generator[WorkflowRequest | Sequence[WorkflowRequest], Any, str]
"""A method at work on one question; it returns the answer."""

ANSWER_INSTRUCTION = (
    f'End with one line that begins with "{FINAL_ANSWER}" and gives the answer alone, as short as possible: a name, a date, a '
    "number, a few words, yes or no."
)
"""How methods that reason first are asked for an answer that can be found in what they write."""


@dataclasses.dataclass(frozen=True)
class PromptedSettings:
    """What is the same for all methods of one comparison."""

    tokens: int = 256
    """Most tokens of one generation."""
    temperature: float = 0.0
    most_passages: int = 15
    """Passages shown at a time, the first of those that a method has collected (15 is IRCoT's limit)."""
    passage_chars: int = 0
    """Characters shown of a passage; 0: all."""
    token_bytes: Sequence[bytes] = ()
    """Bytes of each token id (`Engine.bytes`), which FLARE needs."""

    def __post_init__(self) -> None:
        at_least(1, self, "tokens", "most_passages")
        at_least(0, self, "temperature", "passage_chars")

    def generate(self, prompt: str, *stops: str) -> Generate:
        """Asks the model to answer a prompt, up to one of the stop strings."""
        return Generate(prompt, stops, self.tokens, self.temperature)

    def format_passages(self, passages: Sequence[Passage]) -> str:
        """The passages as text, cut as the settings say; "(nothing found)" for none."""
        shown = [
            dataclasses.replace(passage, text=passage.text[: self.passage_chars or None])
            for passage in passages[: self.most_passages]
        ]
        return render(shown) or "(nothing found)"


def merge_passages(kept: Sequence[Passage], found: Sequence[Passage] | None) -> list[Passage]:
    """Passages in the order in which they came, each once; a failed search (None) adds nothing."""
    return list({(p.title, p.text): p for p in (*kept, *(found or ()))}.values())


def extract_answer(said: Generated) -> str:
    """What stands behind the last "The final answer:" of a text, to the end of its line, as `ANSWER_INSTRUCTION` asks for."""
    return first_line(final_answer(said.text)) if FINAL_ANSWER in said.text else final_answer(said.text)


def first_line(text: str) -> str:
    """The first line of a text."""
    return next(iter(text.splitlines()), "").strip()


def parse_list(text: str) -> list[str]:
    """The lines of a list without bullets and numbers, each once; empty ones and a preface ("Here are two:") left out."""
    text = re.sub(r"\A\s*[^\n]*:[ \t]*\n", "", text)
    lines = (re.sub(r"^\s*(?:[-*•]|\(?\d{1,2}[.):])\s+", "", line).strip() for line in text.splitlines())
    return list(dict.fromkeys(filter(None, lines)))


@dataclasses.dataclass(frozen=True)
class PromptedResult:
    """What came of one question."""

    answer: str
    generations: tuple[Generated, ...]
    """Everything that the model wrote, in the order in which it was asked for."""
    searches: tuple[tuple[str, tuple[Passage, ...] | None], ...]
    """Each query with what it found; None where the search failed."""
    ended: str = "answer"
    """Without an answer: "context_limit" (a prompt outgrew the context), "not_finite" (logits were NaN or infinite)."""

    @property
    def titles(self) -> list[str]:
        """Titles of all that was found, in order."""
        return [passage.title for _, found in self.searches for passage in found or ()]

    @property
    def sampled_tokens(self) -> int:
        """Sampled tokens."""
        return sum(said.trajectory.policy_tokens for said in self.generations)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(said.trajectory.tokens) for said in self.generations) - self.sampled_tokens


def with_record(
    flow: PromptedWorkflow,
) -> Generator[WorkflowRequest | Sequence[WorkflowRequest], Any, PromptedResult]:
    """The same flow, which returns an `PromptedResult`: the answer and all that was written and found on the way."""
    written: list[Generated] = []
    searches: list[tuple[str, tuple[Passage, ...] | None]] = []
    reply: Any = None
    while True:
        try:
            wanted = flow.send(reply)
        except StopIteration as end:
            return PromptedResult(str(end.value).strip(), tuple(written), tuple(searches))
        try:
            reply = yield wanted
        except PromptTooLong:
            flow.close()
            return PromptedResult("", tuple(written), tuple(searches), "context_limit")
        single = isinstance(wanted, WorkflowRequest)
        for ask, result in _pairs([wanted] if single else wanted, [reply] if single else reply):
            if isinstance(ask, Retrieve):
                searches.append((ask.query, None if result is None else tuple(result)))
            else:
                written.append(result)
        if any(said.stop == NOT_FINITE for said in written):
            flow.close()
            return PromptedResult("", tuple(written), tuple(searches), NOT_FINITE)
        reply = _heard(reply) if single else [_heard(result) for result in reply]


def _heard(result: Any) -> Any:
    """What a method reads of a result: of a text none of the thoughts that a reasoning model has brought to an end before it."""
    if isinstance(result, Generated) and (thought := result.text.rpartition("</think>"))[1]:
        return dataclasses.replace(result, text=thought[2].lstrip())
    return result


def _pairs(asks: Any, results: Any) -> Iterable[tuple[WorkflowRequest, Any]]:
    return zip(asks, results, strict=True)
