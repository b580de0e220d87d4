"""Methods that search step by step: ReAct, Self-Ask, IRCoT, ITER-RETGEN, FLARE, Search-o1, decomposition, Adaptive-RAG."""

import re
from collections.abc import Sequence

import numpy as np

from rrl.data.passages import Passage
from rrl.data.questions import Question, with_choices
from rrl.data.trajectory import POLICY
from rrl.errors import UserError
from rrl.recipes.prompted.base import (
    ANSWER_INSTRUCTION,
    PromptedSettings,
    PromptedWorkflow,
    extract_answer,
    merge_passages,
    parse_list,
)
from rrl.recipes.prompted.single import cot, rag_cot, reasoned_answer
from rrl.rollout.workflow import Generated, Retrieve
from rrl.text.short_answers import FINAL_ANSWER, final_answer

OBSERVATION, INTERMEDIATE = "Observation:", "Intermediate answer:"
END_QUERY = "<|end_search_query|>"
SENTENCE = re.compile(
    r"(?:(?<=[.!?])|(?<=[.!?][\"')]))(?<!\b[A-Z]\.)(?<!\b(?:Dr|Mr|Ms|St|Jr|Sr|vs)\.)(?<!\bMrs\.)\s+(?=[A-Z\"'(\d])|\n+"
)
"""Where a sentence ends: not after initials ("J. R. R.") and titles ("Dr.")."""


ACTION_ALONE = re.compile(r"\b(Search|Finish)\s*\[(.*?)\]", re.DOTALL | re.IGNORECASE)
ACTION = re.compile(r"Action\W*?" + ACTION_ALONE.pattern, re.DOTALL | re.IGNORECASE)
"""ReAct's action: where one is named as such, what a thought says of others is none."""


def react(question: Question, settings: PromptedSettings, *, steps: int = 7) -> PromptedWorkflow:
    """ReAct (Yao et al., 2023): thoughts, and actions Search[...] or Finish[...], with what a search found as observation."""
    history, passages = "", list[Passage]()
    for _ in range(steps):
        said: Generated = yield settings.generate(
            'Answer the question in steps. Each step is one line "Thought: ..." and one line "Action: ...". The action is '
            "Search[words to search for], which is answered by an observation, or Finish[the answer alone].\n\n"
            f"Question: {with_choices(question)}\n{history}",
            OBSERVATION,
        )
        action = ACTION.search(said.text) or ACTION_ALONE.search(said.text)
        if not action:
            break
        if action[1].lower() == "finish":
            return action[2]
        found = yield Retrieve(action[2].strip() or question.text)
        passages = merge_passages(passages, found)
        history += (
            f"{said.text[: action.end()].strip()}\n{OBSERVATION} {settings.format_passages(found or ())}\n"
        )
    return (yield from reasoned_answer(question, settings, passages))


def self_ask(question: Question, settings: PromptedSettings, *, steps: int = 5) -> PromptedWorkflow:
    """Self-Ask with search (Press et al., 2023): follow-up questions, each answered from its own passages, then the answer."""
    history, passages = "", list[Passage]()
    for _ in range(steps):
        said: Generated = yield settings.generate(
            'Answer the question by asking simpler ones first. Write "Follow up: " and the next question that must be answered; '
            f'it is answered after "{INTERMEDIATE}". When no more is needed, write one line that begins with "{FINAL_ANSWER}" '
            f"and gives the answer alone.\n\nQuestion: {with_choices(question)}\n{history}",
            INTERMEDIATE,
        )
        if FINAL_ANSWER in said.text:
            return extract_answer(said)
        *_, follow_up = said.text.strip().splitlines() or [""]
        follow_up = re.sub(r"^.*?Follow[- ]up:", "", follow_up, flags=re.IGNORECASE).strip()
        if not follow_up:
            break
        found = yield Retrieve(follow_up)
        passages = merge_passages(passages, found)
        reply: Generated = yield settings.generate(
            f"Answer the question in one short sentence from the passages.\n\nPassages:\n"
            f"{settings.format_passages(found or ())}\n\n"
            f"Question: {follow_up}\nAnswer:"
        )
        history += f"Follow up: {follow_up}\n{INTERMEDIATE} {reply.text.strip()}\n"
    return (yield from reasoned_answer(question, settings, passages))


def ircot(question: Question, settings: PromptedSettings, *, steps: int = 8) -> PromptedWorkflow:
    """IRCoT (Trivedi et al., 2023): each sentence of the reasoning is the next query; a reader answers from all that was found.

    As in the paper, the model may write on, and only its first sentence is kept.
    """
    passages, thoughts = merge_passages((), (yield Retrieve(question.text))), list[str]()
    for _ in range(steps):
        said: Generated = yield settings.generate(
            "Think about the question with the help of the passages, one sentence at a time. Write the next sentence of the "
            f"reasoning only. {ANSWER_INSTRUCTION}\n\nPassages:\n{settings.format_passages(passages)}"
            f"\n\nQuestion: {with_choices(question)}\n"
            f"Reasoning so far: {' '.join(thoughts)}"
        )
        thought = first_sentence(said.text)
        if not thought or FINAL_ANSWER in thought:
            break
        thoughts.append(thought)
        if len(passages) < settings.most_passages:
            passages = merge_passages(passages, (yield Retrieve(thought)))
    return (yield from reasoned_answer(question, settings, passages))


def iter_retgen(question: Question, settings: PromptedSettings, *, rounds: int = 3) -> PromptedWorkflow:
    """ITER-RETGEN (Shao et al., 2023): every round searches with the question and what the last round wrote, and writes anew."""
    written = ""
    for _ in range(rounds):
        found = yield Retrieve(f"{question.text} {written}".strip())
        said: Generated = yield settings.generate(
            f"Answer the question with the help of the passages. Think step by step first. {ANSWER_INSTRUCTION}\n\n"
            f"Passages:\n{settings.format_passages(found or ())}\n\nQuestion: {with_choices(question)}"
        )
        written = " ".join(said.text.split())
    return extract_answer(said)


def flare(
    question: Question,
    settings: PromptedSettings,
    *,
    sentences: int = 10,
    look_below: float = 0.8,
    mask_below: float = 0.4,
) -> PromptedWorkflow:
    """FLARE (Jiang et al., 2023), direct: a sentence with an unlikely token is a query, without its least likely words, and is
    written again over what that finds.

    `look_below` (the paper's theta) and `mask_below` (beta) are probabilities of a token. Raises UserError where the settings
    lack `token_bytes`.
    """
    if not len(settings.token_bytes):
        raise UserError("flare needs the bytes of tokens: give PromptedSettings(token_bytes=engine.bytes)")
    found, text = (yield Retrieve(question.text)), ""
    for _ in range(sentences):
        said: Generated = yield settings.generate(_flare_prompt(question, settings, found or (), text))
        sentence = first_sentence(said.text)
        words = token_probabilities(said, settings.token_bytes, len(sentence))
        if sentence and min((chance for _, chance in words), default=1.0) < look_below:
            sure = "".join(piece if chance >= mask_below else " " for piece, chance in words)
            found = (yield Retrieve(" ".join(sure.split()) or question.text)) or found
            said = yield settings.generate(_flare_prompt(question, settings, found or (), text))
            sentence = first_sentence(said.text)
        text = f"{text} {sentence}".strip()
        if not sentence or FINAL_ANSWER in sentence:
            break
    if FINAL_ANSWER in text:
        return final_answer(text)
    return (yield from reasoned_answer(question, settings, found or ()))


def _flare_prompt(
    question: Question, settings: PromptedSettings, passages: Sequence[Passage], text: str
) -> str:
    return (
        "Answer the question with the help of the passages. Think step by step in short sentences, and go on from what is "
        f"written already. {ANSWER_INSTRUCTION}\n\nPassages:\n{settings.format_passages(passages)}"
        f"\n\nQuestion: {with_choices(question)}\nAnswer so far: {text}"
    )


def token_probabilities(
    said: Generated, token_bytes: Sequence[bytes], characters: int
) -> list[tuple[str, float]]:
    """Text and probability of each sampled token, up to so many characters after leading white space."""
    own = said.trajectory.roles == POLICY
    pieces = [token_bytes[token] for token in said.trajectory.tokens[own].tolist()]
    ends = np.cumsum([len(piece) for piece in pieces])
    whole = b"".join(pieces)
    lead = len(whole) - len(whole.lstrip())
    end = lead + len(whole.lstrip().decode(errors="replace")[:characters].encode())
    chances = np.exp(said.trajectory.logps[own]).tolist()
    starts = [0, *ends.tolist()]
    return [
        (piece.decode(errors="replace"), chance)
        for piece, chance, start in zip(pieces, chances, starts)
        if piece and start < end
    ]


def search_o1(question: Question, settings: PromptedSettings, *, searches: int = 10) -> PromptedWorkflow:
    """Search-o1 (Li et al., 2025): the model searches while it reasons, and what was found is condensed for that reasoning
    before it is read."""
    reasoning, passages = "", list[Passage]()
    for _ in range(searches):
        said: Generated = yield settings.generate(
            "Answer the question. Reason step by step. Where you lack knowledge, write <|begin_search_query|>words to search "
            f"for{END_QUERY}; what was found comes back between <|begin_search_result|> and <|end_search_result|>. "
            f"{ANSWER_INSTRUCTION}\n\n"
            f"Question: {with_choices(question)}\nReasoning so far: {reasoning}",
            END_QUERY,
        )
        if said.stop != END_QUERY:
            if FINAL_ANSWER in said.text:
                return extract_answer(said)
            break
        thought, _, query = said.text.rpartition("<|begin_search_query|>")
        found = yield Retrieve(query.strip() or question.text)
        passages = merge_passages(passages, found)
        condensed: Generated = yield settings.generate(
            "Below are the reasoning on a question so far, a search query, and the passages that were found for it. Write down "
            'what in the passages helps to go on with the reasoning, in a few sentences; "No helpful information" if nothing '
            f"does.\n\nReasoning: {reasoning} {thought}\n\nQuery: {query}\n\nPassages:\n{settings.format_passages(found or ())}"
        )
        reasoning += (
            f"{thought}<|begin_search_query|>{query}{END_QUERY}\n"
            f"<|begin_search_result|>{condensed.text.strip()}<|end_search_result|>\n"
        )
    return (yield from reasoned_answer(question, settings, passages))


def decomposition(question: Question, settings: PromptedSettings, *, parts: int = 4) -> PromptedWorkflow:
    """Decomposition into simpler questions (as in RQ-RAG, Chan et al., 2024, by prompt): those that need no other answer side by
    side, then those that name them as #1, #2, ..., then the answer from all."""
    said: Generated = yield settings.generate(
        f"Split the question into at most {parts} simpler questions, each on a line of its own, that are answered one after "
        "another. Write #1 for the answer of the first one, #2 for that of the second one, and so on.\n\n"
        f"Question: {question.text}"
    )
    open_parts = dict(enumerate(parse_list(said.text)[:parts] or [question.text], 1))
    replies: dict[int, str] = {}
    lines, passages = list[str](), list[Passage]()
    while open_parts:
        ready = {at: part for at, part in open_parts.items() if not _waits_for(part) & open_parts.keys()}
        ready = ready or dict([next(iter(open_parts.items()))])  # questions that wait for each other
        queries = {
            at: re.sub(r"#(\d+)", lambda m: replies.get(int(m[1]), ""), part) for at, part in ready.items()
        }
        found = yield [Retrieve(query) for query in queries.values()]
        answers: list[Generated] = yield [
            settings.generate(
                f"Answer the question from the passages, with the answer alone.\n\nPassages:\n"
                f"{settings.format_passages(some or ())}\n\n"
                f"Question: {query}\nAnswer:"
            )
            for query, some in zip(queries.values(), found)
        ]
        for (at, query), some, reply in zip(queries.items(), found, answers):
            replies[at] = reply.text.strip()
            lines.append(f"{query} {replies[at]}")
            passages = merge_passages(passages, some)
            del open_parts[at]
    last: Generated = yield settings.generate(
        "Answer the question with the help of the simpler questions and their answers, and of the passages. "
        f"{ANSWER_INSTRUCTION}\n\nPassages:\n{settings.format_passages(passages)}\n\n"
        + "\n".join(lines)
        + f"\n\nQuestion: {with_choices(question)}"
    )
    return extract_answer(last)


def _waits_for(part: str) -> set[int]:
    return {int(number) for number in re.findall(r"#(\d+)", part)}


def adaptive_rag(question: Question, settings: PromptedSettings) -> PromptedWorkflow:
    """Adaptive-RAG (Jeong et al., 2024): no search, one search or many, by how hard the question is.

    The paper trains a classifier; here the model says it itself. What it says in no known word counts as many.
    """
    said: Generated = yield settings.generate(
        "How is this question best answered? Reply with one letter: A if you know the answer for certain, B if one search finds "
        f"it, C if several facts must be looked up one after another.\n\nQuestion: {question.text}"
    )
    opening = re.match(r"\W*([ABC])(?=[).:,;*\n]|\s*$)", said.text)
    letters = [opening[1]] if opening else re.findall(r"\b[ABC]\b(?!\s+[a-z])", said.text)  # no article
    ways = {"A": cot, "B": rag_cot}
    return (yield from ways.get(letters[-1] if letters else "C", ircot)(question, settings))


def first_sentence(text: str) -> str:
    """The first sentence; a line that gives the final answer is one sentence."""
    text = text.strip()
    if text.startswith(FINAL_ANSWER):
        return text.splitlines()[0].strip()
    return SENTENCE.split(text, maxsplit=1)[0].strip()
