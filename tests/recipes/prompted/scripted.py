"""A model that says what a script says and a retriever that finds what it is told, for methods without an engine."""

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
"""Bytes of each token id that a script has used."""


def said(text: str, stops: Sequence[str] = (), chances: Mapping[str, float] | None = None) -> Generated:
    """What a model writes: a token a word (its leading space in it), each as likely as `chances` says, else certain."""
    stop = next((stop for stop in stops if stop in text), "eos")
    words = [word if at == 0 else f" {word}" for at, word in enumerate(text.split(" "))]
    tokens = []
    for word in words:
        if word.encode() not in VOCABULARY:
            VOCABULARY.append(word.encode())
        tokens.append(VOCABULARY.index(word.encode()))
    logps = [float(np.log((chances or {}).get(word.strip(), 1.0))) for word in words]
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
    """Runs a method. Each reply is (what the prompt must hold, what is said); a query finds what stands under a name in it.

    Returns the outcome and all prompts. Fails where the method asks for more or less than was scripted.
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
        wanted, text, *chances = script.pop(0)
        assert wanted in ask.prompt, f"{wanted!r} is not in the prompt:\n{ask.prompt}"
        prompts.append(ask.prompt)
        return said(text, ask.stops, *chances)

    flow = method.workflow(question, settings)
    reply = None
    try:
        while True:
            asked = flow.send(reply)
            reply = (
                answer(asked) if isinstance(asked, Generate | Retrieve) else [answer(part) for part in asked]
            )
    except StopIteration as end:
        assert not script, f"never asked for: {script}"
        return end.value, prompts


def ramble(name: str, text: str, most: int = 100) -> tuple[str, int]:
    """The answer of a method whose model always writes the same and whose searches all fail, and how much it asked for."""
    flow = make_prompted_method(name).workflow(QUESTION, PromptedSettings(token_bytes=VOCABULARY))
    reply, asks = None, 0
    while asks < most:
        try:
            asked = flow.send(reply)
        except StopIteration as end:
            return end.value.answer, asks
        parts = [asked] if isinstance(asked, Generate | Retrieve) else asked
        asks += len(parts)
        results = [said(text, part.stops) if isinstance(part, Generate) else None for part in parts]
        reply = results if parts is asked else results[0]
    raise AssertionError(f"{name} asked {asks} times and has no answer")
