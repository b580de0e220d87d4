"""A scripted model and a scripted retriever, to test prompted methods without an engine."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rrl.data.passages import Passage
from rrl.data.questions import Question
from rrl.data.trajectory import POLICY, PROMPT, Trajectory
from rrl.recipes.prompted.base import PromptedResult, PromptedSettings
from rrl.recipes.prompted.catalogue import make_prompted_method
from rrl.rollout.workflow import Generate, Generated, Retrieve

QUESTION = Question("q", "Where was the director of Silver Harbour born?", ("Oslo",))
FILM = Passage("0", "Silver Harbour", "Silver Harbour is a film directed by Ada Berg.")
PERSON = Passage("1", "Ada Berg", "Ada Berg was born in Oslo.")
WORLD = {"Silver Harbour": [FILM], "Ada Berg": [PERSON]}

VOCABULARY: list[bytes] = [b""]
"""Bytes of each token id in use; scripts extend it."""


def generated(
    text: str, stops: Sequence[str] = (), probabilities: Mapping[str, float] | None = None
) -> Generated:
    """Return a model output with one token per word (with its leading space); `probabilities` by word, default 1."""
    stop = next((stop for stop in stops if stop in text), "eos")
    words = [word if at == 0 else f" {word}" for at, word in enumerate(text.split(" "))]
    tokens = []
    for word in words:
        if word.encode() not in VOCABULARY:
            VOCABULARY.append(word.encode())
        tokens.append(VOCABULARY.index(word.encode()))
    logps = [float(np.log((probabilities or {}).get(word.strip(), 1.0))) for word in words]
    count = len(tokens)
    trajectory = Trajectory(
        question=QUESTION,
        request=0,
        group=0,
        tokens=np.array([0, *tokens], np.int32),
        roles=np.array([PROMPT] + [POLICY] * count),
        logps=np.array([0.0, *logps]),
        sampled_logps=np.array([0.0, *logps]),
        turns=np.zeros(count + 1, np.int32),
        segments=[(POLICY, text)],
        searches=[],
        ended=stop,
    )
    return Generated(text.partition(stop)[0] if stop != "eos" else text, stop, trajectory)


def play(
    name: str,
    replies: Sequence[tuple[str, str] | tuple[str, str, Mapping[str, float]]],
    question: Question = QUESTION,
    found: Mapping[str, list[Passage] | None] = WORLD,
    settings: PromptedSettings | None = None,
    **options: int | float,
) -> tuple[PromptedResult, list[str]]:
    """Run a method with scripted replies.

    Args:
      name: the method.
      replies: (text that the prompt must contain, output[, probabilities by word]) per request.
      question: the question.
      found: passages by a name that the query contains; None: the search fails.
      settings: shared settings.
      **options: options of the method.

    Returns the result and all prompts. Fails if the method makes more or fewer requests than scripted.
    """
    method, script, prompts = make_prompted_method(name, options), list(replies), list[str]()
    settings = settings or PromptedSettings(token_bytes=VOCABULARY)

    def answer(ask: Any) -> Any:
        if isinstance(ask, Retrieve):
            assert method.searches and ask.query.strip()
            hits = [passages for key, passages in found.items() if key in ask.query]
            return None if None in hits else [passage for passages in hits for passage in passages or ()]
        assert isinstance(ask, Generate) and isinstance(ask.prompt, str)
        assert not ask.stops or ask.stops in method.stops
        assert 0 < ask.tokens <= method.completion(settings).turn_tokens
        expected, text, *probabilities = script.pop(0)
        assert expected in ask.prompt, f"{expected!r} is not in the prompt:\n{ask.prompt}"
        prompts.append(ask.prompt)
        return generated(text, ask.stops, *probabilities)

    flow = method.workflow(question, settings)
    reply = None
    try:
        while True:
            asked = flow.send(reply)
            reply = (
                answer(asked) if isinstance(asked, Generate | Retrieve) else [answer(part) for part in asked]
            )
    except StopIteration as end:
        assert not script, f"unused replies: {script}"
        return end.value, prompts


def ramble(
    name: str, text: str, most: int = 100, question: Question = QUESTION
) -> tuple[str, list[Generate | Retrieve]]:
    """Run a method whose model always writes `text` and whose searches all fail. Return its answer and its requests."""
    flow = make_prompted_method(name).workflow(question, PromptedSettings(token_bytes=VOCABULARY))
    reply, requests = None, list[Generate | Retrieve]()
    while len(requests) < most:
        try:
            asked = flow.send(reply)
        except StopIteration as end:
            return end.value.answer, requests
        parts = [asked] if isinstance(asked, Generate | Retrieve) else asked
        requests += parts
        results = [generated(text, part.stops) if isinstance(part, Generate) else None for part in parts]
        reply = results if parts is asked else results[0]
    raise AssertionError(f"{name} made {len(requests)} requests and has no answer")
