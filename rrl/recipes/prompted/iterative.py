"""Methods with several searches: ReAct, Self-Ask, IRCoT, ITER-RETGEN, FLARE, Search-o1, decomposition, Adaptive-RAG."""

import re
from collections.abc import Sequence

import numpy as np

from rrl.data.passages import Passage
from rrl.data.questions import Question, with_choices
from rrl.data.trajectory import POLICY
from rrl.errors import UserError
from rrl.recipes.prompted.base import (
    ANSWER_INSTRUCTION,
    THOUGHT_END,
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
SENTENCE_GAP = re.compile(
    r"(?:(?<=[.!?])|(?<=[.!?][\"')]))(?<!\b[A-Z]\.)(?<!\b(?:Dr|Mr|Ms|St|Jr|Sr|vs)\.)(?<!\bMrs\.)\s+(?=[A-Z\"'(\d])|\n+"
)
"""Matches the white space between two sentences, but not after initials ("J. R. R.") and titles ("Dr.")."""

ACTION_ALONE = re.compile(r"\b(Search|Finish)\s*\[(.*?)\]", re.DOTALL | re.IGNORECASE)
"""ReAct's action anywhere in the text, also in a thought."""
ACTION = re.compile(r"Action\W*?" + ACTION_ALONE.pattern, re.DOTALL | re.IGNORECASE)
"""ReAct's action after the word "Action". It takes precedence over `ACTION_ALONE`."""


def react(question: Question, settings: PromptedSettings, *, steps: int = 7) -> PromptedWorkflow:
    """ReAct (Yao et al., 2023): thoughts, actions Search[...] and Finish[...], and the passages of a search as observation."""
    history, passages = "", list[Passage]()
    for _ in range(steps):
        output: Generated = yield settings.generate(
            'Answer the question in steps. Each step is one line "Thought: ..." and one line "Action: ...". The action is '
            "Search[words to search for], which is answered by an observation, or Finish[the answer alone].\n\n"
            f"Question: {with_choices(question)}\n{history}",
            OBSERVATION,
        )
        action = ACTION.search(output.text) or ACTION_ALONE.search(output.text)
        if not action:
            break
        if action[1].lower() == "finish":
            return action[2]
        hits = yield Retrieve(action[2].strip() or question.text)
        passages = merge_passages(passages, hits)
        history += (
            f"{output.text[: action.end()].strip()}\n{OBSERVATION} {settings.format_passages(hits or ())}\n"
        )
    return (yield from reasoned_answer(question, settings, passages))


def self_ask(question: Question, settings: PromptedSettings, *, steps: int = 5) -> PromptedWorkflow:
    """Self-Ask with search (Press et al., 2023): follow-up questions, each answered from the passages of its search."""
    history, passages = "", list[Passage]()
    for _ in range(steps):
        output: Generated = yield settings.generate(
            'Answer the question by asking simpler ones first. Write "Follow up: " and the next question that must be answered; '
            f'it is answered after "{INTERMEDIATE}". When no more is needed, write one line that begins with "{FINAL_ANSWER}" '
            f"and gives the answer alone.\n\nQuestion: {with_choices(question)}\n{history}",
            INTERMEDIATE,
        )
        if FINAL_ANSWER in output.text:
            return extract_answer(output)
        *_, follow_up = output.text.strip().splitlines() or [""]
        follow_up = re.sub(r"^.*?Follow[- ]up:", "", follow_up, flags=re.IGNORECASE).strip()
        if not follow_up:
            break
        hits = yield Retrieve(follow_up)
        passages = merge_passages(passages, hits)
        reply: Generated = yield settings.generate(
            f"Answer the question in one short sentence from the passages.\n\nPassages:\n"
            f"{settings.format_passages(hits or ())}\n\n"
            f"Question: {follow_up}\nAnswer:"
        )
        history += f"Follow up: {follow_up}\n{INTERMEDIATE} {reply.text.strip()}\n"
    return (yield from reasoned_answer(question, settings, passages))


def ircot(question: Question, settings: PromptedSettings, *, steps: int = 8) -> PromptedWorkflow:
    """IRCoT (Trivedi et al., 2023): each sentence of the reasoning is the next query; a reader answers from all passages.

    As in the paper, the model may write more than one sentence, but only the first is used.
    """
    passages, thoughts = merge_passages((), (yield Retrieve(question.text))), list[str]()
    for _ in range(steps):
        output: Generated = yield settings.generate(
            "Think about the question with the help of the passages, one sentence at a time. Write the next sentence of the "
            f"reasoning only. {ANSWER_INSTRUCTION}\n\nPassages:\n{settings.format_passages(passages)}"
            f"\n\nQuestion: {with_choices(question)}\n"
            f"Reasoning so far: {' '.join(thoughts)}"
        )
        thought = first_sentence(output.text)
        if not thought or FINAL_ANSWER in thought:
            break
        thoughts.append(thought)
        if len(passages) < settings.most_passages:
            passages = merge_passages(passages, (yield Retrieve(thought)))
    return (yield from reasoned_answer(question, settings, passages))


def iter_retgen(question: Question, settings: PromptedSettings, *, rounds: int = 3) -> PromptedWorkflow:
    """ITER-RETGEN (Shao et al., 2023): each round searches with the question and the last output, and writes a new output."""
    written = ""
    for _ in range(rounds):
        hits = yield Retrieve(f"{question.text} {written}".strip())
        output: Generated = yield settings.generate(
            f"Answer the question with the help of the passages. Think step by step first. {ANSWER_INSTRUCTION}\n\n"
            f"Passages:\n{settings.format_passages(hits or ())}\n\nQuestion: {with_choices(question)}"
        )
        written = " ".join(output.text.split())
    return extract_answer(output)


def flare(
    question: Question,
    settings: PromptedSettings,
    *,
    sentences: int = 10,
    look_below: float = 0.8,
    mask_below: float = 0.4,
) -> PromptedWorkflow:
    """FLARE direct (Jiang et al., 2023): a sentence with an unlikely token becomes a query and is rewritten with its passages.

    Args:
      question: the question.
      settings: shared settings; `token_bytes` is required.
      sentences: maximum number of sentences of the answer.
      look_below: theta; a sentence with a token below this probability is searched.
      mask_below: beta; tokens below this probability are left out of the query.

    Raises UserError if `settings.token_bytes` is missing.
    """
    if not len(settings.token_bytes):
        raise UserError(
            "flare needs the bytes of each token: give PromptedSettings(token_bytes=engine.bytes)"
        )
    hits, text = (yield Retrieve(question.text)), ""
    for _ in range(sentences):
        output: Generated = yield settings.generate(_flare_prompt(question, settings, hits or (), text))
        sentence = first_sentence(output.text)
        tokens = token_probabilities(output, settings.token_bytes, len(sentence))
        if sentence and min((probability for _, probability in tokens), default=1.0) < look_below:
            query = "".join(token if probability >= mask_below else " " for token, probability in tokens)
            hits = (yield Retrieve(" ".join(query.split()) or question.text)) or hits
            output = yield settings.generate(_flare_prompt(question, settings, hits or (), text))
            sentence = first_sentence(output.text)
        text = f"{text} {sentence}".strip()
        if not sentence or FINAL_ANSWER in sentence:
            break
    if FINAL_ANSWER in text:
        return final_answer(text)
    return (yield from reasoned_answer(question, settings, hits or ()))


def _flare_prompt(
    question: Question, settings: PromptedSettings, passages: Sequence[Passage], text: str
) -> str:
    return (
        "Answer the question with the help of the passages. Think step by step in short sentences, and go on from what is "
        f"written already. {ANSWER_INSTRUCTION}\n\nPassages:\n{settings.format_passages(passages)}"
        f"\n\nQuestion: {with_choices(question)}\nAnswer so far: {text}"
    )


def token_probabilities(
    output: Generated, token_bytes: Sequence[bytes], characters: int
) -> list[tuple[str, float]]:
    """Return the sampled tokens of the output's first `characters` characters, as pairs of text and probability.

    `characters` counts neither the thought of a reasoning model nor the white space before the remaining text.
    """
    sampled = output.trajectory.roles == POLICY
    texts = [token_bytes[token] for token in output.trajectory.tokens[sampled].tolist()]
    ends = np.cumsum([len(text) for text in texts])
    joined = b"".join(texts)
    without_thought = joined.rpartition(THOUGHT_END.encode())[2]
    begin = len(joined) - len(without_thought)
    stripped = without_thought.lstrip()
    end = len(joined) - len(stripped) + len(stripped.decode(errors="replace")[:characters].encode())
    probabilities = np.exp(output.trajectory.logps[sampled]).tolist()
    return [
        (text.decode(errors="replace"), probability)
        for text, probability, text_end in zip(texts, probabilities, ends.tolist())
        if begin < text_end and text_end - len(text) < end and text
    ]


def search_o1(question: Question, settings: PromptedSettings, *, searches: int = 10) -> PromptedWorkflow:
    """Search-o1 (Li et al., 2025): the model searches while it reasons, and reads a condensed version of the passages."""
    reasoning, passages = "", list[Passage]()
    for _ in range(searches):
        output: Generated = yield settings.generate(
            "Answer the question. Reason step by step. Where you lack knowledge, write <|begin_search_query|>words to search "
            f"for{END_QUERY}; what was found comes back between <|begin_search_result|> and <|end_search_result|>. "
            f"{ANSWER_INSTRUCTION}\n\n"
            f"Question: {with_choices(question)}\nReasoning so far: {reasoning}",
            END_QUERY,
        )
        if output.stop != END_QUERY:
            if FINAL_ANSWER in output.text:
                return extract_answer(output)
            break
        thought, _, query = output.text.rpartition("<|begin_search_query|>")
        hits = yield Retrieve(query.strip() or question.text)
        passages = merge_passages(passages, hits)
        condensed: Generated = yield settings.generate(
            "Below are the reasoning on a question so far, a search query, and the passages that were found for it. Write down "
            'what in the passages helps to go on with the reasoning, in a few sentences; "No helpful information" if nothing '
            f"does.\n\nReasoning: {reasoning} {thought}\n\nQuery: {query}\n\nPassages:\n{settings.format_passages(hits or ())}"
        )
        reasoning += (
            f"{thought}<|begin_search_query|>{query}{END_QUERY}\n"
            f"<|begin_search_result|>{condensed.text.strip()}<|end_search_result|>\n"
        )
    return (yield from reasoned_answer(question, settings, passages))


def decomposition(question: Question, settings: PromptedSettings, *, parts: int = 4) -> PromptedWorkflow:
    """Prompted decomposition into simpler questions, after RQ-RAG (Chan et al., 2024).

    A simpler question that refers to an earlier answer (#1, #2, ...) waits for it; the others run in parallel. The final
    answer uses all of them.
    """
    output: Generated = yield settings.generate(
        f"Split the question into at most {parts} simpler questions, each on a line of its own, that are answered one after "
        "another. Write #1 for the answer of the first one, #2 for that of the second one, and so on.\n\n"
        f"Question: {with_choices(question, instruct=False)}"
    )
    unanswered = dict(enumerate(parse_list(output.text)[:parts] or [question.text], 1))
    replies: dict[int, str] = {}
    lines, passages = list[str](), list[Passage]()
    while unanswered:
        ready = {
            number: part for number, part in unanswered.items() if not _waits_for(part) & unanswered.keys()
        }
        if not ready:  # the questions wait for each other: take the first
            ready = dict([next(iter(unanswered.items()))])
        queries = {
            number: re.sub(r"#(\d+)", lambda m: replies.get(int(m[1]), ""), part)
            for number, part in ready.items()
        }
        results = yield [Retrieve(query) for query in queries.values()]
        answers: list[Generated] = yield [
            settings.generate(
                f"Answer the question from the passages, with the answer alone.\n\nPassages:\n"
                f"{settings.format_passages(hits or ())}\n\n"
                f"Question: {query}\nAnswer:"
            )
            for query, hits in zip(queries.values(), results)
        ]
        for (number, query), hits, reply in zip(queries.items(), results, answers):
            replies[number] = reply.text.strip()
            lines.append(f"{query} {replies[number]}")
            passages = merge_passages(passages, hits)
            del unanswered[number]
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
    """Adaptive-RAG (Jeong et al., 2024): no search, one search or several, depending on the difficulty of the question.

    The paper trains a classifier; here the model classifies the question itself. If its reply cannot be parsed, the
    method makes several searches.
    """
    output: Generated = yield settings.generate(
        "How is this question best answered? Reply with one letter: A if you know the answer for certain, B if one search finds "
        f"it, C if several facts must be looked up one after another.\n\nQuestion: {question.text}"
    )
    first = re.match(r"\W*([ABC])(?=[).:,;*\n]|\s*$)", output.text)
    # The second pattern does not match the article "A".
    letters = [first[1]] if first else re.findall(r"\b[ABC]\b(?!\s+[a-z])", output.text)
    methods = {"A": cot, "B": rag_cot}
    return (yield from methods.get(letters[-1] if letters else "C", ircot)(question, settings))


def first_sentence(text: str) -> str:
    """Return the first sentence of a text; a line with the final answer is one sentence."""
    text = text.strip()
    if text.startswith(FINAL_ANSWER):
        return text.splitlines()[0].strip()
    return SENTENCE_GAP.split(text, maxsplit=1)[0].strip()
