"""What prompted methods share: settings, text of passages, parsing of outputs, and a record of a method's requests."""

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
"""A method that runs on one question; it returns the answer."""

THOUGHT_END = "</think>"
"""Ends the thought of a reasoning model. Methods get only the text after it (`with_record`)."""

ANSWER_INSTRUCTION = (
    f'End with one line that begins with "{FINAL_ANSWER}" and gives the answer alone, as short as possible: a name, a date, a '
    "number, a few words, yes or no."
)
"""Tells a model that reasons first to mark its answer, so that `extract_answer` finds it."""


@dataclasses.dataclass(frozen=True)
class PromptedSettings:
    """Settings that all methods of a comparison share."""

    tokens: int = 256
    """Maximum number of tokens of one generation."""
    temperature: float = 0.0
    """0 is greedy."""
    most_passages: int = 15
    """Maximum number of passages in a prompt, the first ones that a method has collected. 15 is IRCoT's limit."""
    passage_chars: int = 0
    """Maximum number of characters of a passage in a prompt; 0: no limit."""
    token_bytes: Sequence[bytes] = ()
    """Bytes of each token id (`Engine.bytes`); FLARE needs them."""

    def __post_init__(self) -> None:
        at_least(1, self, "tokens", "most_passages")
        at_least(0, self, "temperature", "passage_chars")

    def generate(self, prompt: str, *stops: str) -> Generate:
        """Return a request for the model's text after a prompt, up to one of the stop strings."""
        return Generate(prompt, stops, self.tokens, self.temperature)

    def format_passages(self, passages: Sequence[Passage]) -> str:
        """Return the passages as text, truncated to the settings; "(nothing found)" if there are none."""
        truncated = [
            dataclasses.replace(passage, text=passage.text[: self.passage_chars or None])
            for passage in passages[: self.most_passages]
        ]
        return render(truncated) or "(nothing found)"


def merge_passages(passages: Sequence[Passage], new: Sequence[Passage] | None) -> list[Passage]:
    """Return `passages` followed by `new`, without duplicates. A failed search (None) adds nothing."""
    return list({(p.title, p.text): p for p in (*passages, *(new or ()))}.values())


def extract_answer(output: Generated) -> str:
    """Return the rest of the line after the last "The final answer:", or the whole text if it has none (`ANSWER_INSTRUCTION`)."""
    answer = final_answer(output.text)
    return first_line(answer) if FINAL_ANSWER in output.text else answer


def first_line(text: str) -> str:
    """Return the first line of a text, stripped."""
    return next(iter(text.splitlines()), "").strip()


def parse_list(text: str) -> list[str]:
    """Return the distinct lines of a list, without bullets, numbers, empty lines and a preface ("Here are two:")."""
    text = re.sub(r"\A\s*[^\n]*:[ \t]*\n", "", text)
    lines = (re.sub(r"^\s*(?:[-*•]|\(?\d{1,2}[.):])\s+", "", line).strip() for line in text.splitlines())
    return list(dict.fromkeys(filter(None, lines)))


@dataclasses.dataclass(frozen=True)
class PromptedResult:
    """The answer to one question, and all requests that led to it."""

    answer: str
    generations: tuple[Generated, ...]
    """All outputs of the model, in the order of the requests."""
    searches: tuple[tuple[str, tuple[Passage, ...] | None], ...]
    """Each query with its passages; None if the search failed."""
    ended: str = "answer"
    """Why the method ended: "answer", or without an answer "context_limit" (a prompt exceeds the context) or "not_finite"
    (logits were NaN or infinite)."""

    @property
    def titles(self) -> list[str]:
        """Titles of all passages found, in order."""
        return [passage.title for _, passages in self.searches for passage in passages or ()]

    @property
    def sampled_tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(output.trajectory.policy_tokens for output in self.generations)

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of all prompts."""
        return sum(len(output.trajectory.tokens) for output in self.generations) - self.sampled_tokens


def with_record(
    workflow: PromptedWorkflow,
) -> Generator[WorkflowRequest | Sequence[WorkflowRequest], Any, PromptedResult]:
    """Return a workflow that makes the same requests and returns a `PromptedResult`: the answer and a record of the requests.

    `workflow` receives the outputs of a reasoning model without the thought.
    """
    generations: list[Generated] = []
    searches: list[tuple[str, tuple[Passage, ...] | None]] = []
    reply: Any = None
    while True:
        try:
            request = workflow.send(reply)
        except StopIteration as end:
            return PromptedResult(str(end.value).strip(), tuple(generations), tuple(searches))
        try:
            reply = yield request
        except PromptTooLong:
            workflow.close()
            return PromptedResult("", tuple(generations), tuple(searches), "context_limit")
        is_single = isinstance(request, WorkflowRequest)
        for subrequest, result in _pairs(
            [request] if is_single else request, [reply] if is_single else reply
        ):
            if isinstance(subrequest, Retrieve):
                searches.append((subrequest.query, None if result is None else tuple(result)))
            else:
                generations.append(result)
        if any(output.stop == NOT_FINITE for output in generations):
            workflow.close()
            return PromptedResult("", tuple(generations), tuple(searches), NOT_FINITE)
        reply = _without_thought(reply) if is_single else [_without_thought(result) for result in reply]


def _without_thought(result: Any) -> Any:
    """Return a result, without the thought if it is an output of a reasoning model."""
    if isinstance(result, Generated) and (parts := result.text.rpartition(THOUGHT_END))[1]:
        return dataclasses.replace(result, text=parts[2].lstrip())
    return result


def _pairs(requests: Any, results: Any) -> Iterable[tuple[WorkflowRequest, Any]]:
    return zip(requests, results, strict=True)
