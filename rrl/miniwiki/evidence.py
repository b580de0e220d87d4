"""Generate training examples for the cross-family reader: evidence and a question, followed by a short answer."""

import itertools
from collections.abc import Iterator

import numpy as np
from transformers import PreTrainedTokenizerBase

from rrl.data.examples import Example
from rrl.errors import UserError
from rrl.miniwiki import KINDS, MiniQuestion, MiniWiki
from rrl.miniwiki.lookup import WikiLookup
from rrl.text.chat import chat_ids
from rrl.text.encoding import text_ids

UNKNOWN = "unknown"
"""The reader's answer if the evidence does not answer the question."""


def reader_examples(
    wiki: MiniWiki,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    template: str,
    *,
    missing: float = 0.2,
    chat: bool = True,
) -> Iterator[Example]:
    """Yield reading-comprehension examples without end; the same arguments give the same stream.

    Evidence consists of the sentences of a question's plan, or of statements of its facts. Some examples have them in another
    order, or with irrelevant sentences among them, or without a required sentence; then the answer is "unknown".

    Args:
      wiki: the source of questions and passages.
      tokenizer: the reader's tokenizer, with a chat template if `chat`.
      seed: seed of all random choices.
      template: the prompt, with {evidence} and {query}.
      missing: share of examples without a required sentence, in [0, 1].
      chat: whether to put the prompt into the tokenizer's chat template, as in use.

    Raises:
      UserError: the template has no {evidence} or no {query}.
    """
    for field in ("{evidence}", "{query}"):
        if field not in template:
            raise UserError(f"template={template!r}: must contain {field}")
    rng = np.random.default_rng((seed, 2))
    lookup = WikiLookup(wiki)
    for item in _endless(wiki, seed, rng):
        evidence, answer = gather_evidence(item, lookup, rng, missing)
        prompt = template.replace("{evidence}", evidence).replace("{query}", item.question.text)
        prompt_ids = chat_ids(tokenizer, prompt) if chat else text_ids(tokenizer, prompt)
        # After a space, a name has the same tokens as everywhere else.
        answer_ids = [*text_ids(tokenizer, f" {answer}"), tokenizer.eos_token_id]
        loss = np.zeros(len(prompt_ids) + len(answer_ids), bool)
        loss[len(prompt_ids) :] = True
        yield Example(np.array([*prompt_ids, *answer_ids], np.int32), loss)


def gather_evidence(
    item: MiniQuestion, lookup: WikiLookup, rng: np.random.Generator, missing: float
) -> tuple[str, str]:
    """Return evidence for a question, and the gold answer, or `UNKNOWN` if a required sentence is missing.

    A sentence is missing with the probability `missing`.
    """
    facts = list(dict.fromkeys((hop.sentence, f"The {hop.query} is {hop.value}.") for hop in item.plan.hops))
    style = rng.random()
    # Sentences of passages, statements, or a mixture of both.
    use_statement = [rng.random() < (0.0 if style < 0.6 else 1.0 if style < 0.8 else 0.5) for _ in facts]
    sentences = list(dict.fromkeys(fact[bool(use)] for fact, use in zip(facts, use_statement, strict=True)))
    answer = item.question.answers[0]
    if rng.random() < missing:
        sentences.pop(int(rng.integers(len(sentences))))
        answer = UNKNOWN
    if rng.random() < 0.4 or not sentences:
        for _ in range(int(rng.integers(1, 4))):
            sentences.insert(int(rng.integers(len(sentences) + 1)), _distractor(item, lookup, rng))
    if rng.random() < 0.3:
        sentences = [sentences[i] for i in rng.permutation(len(sentences))]
    return " ".join(sentences), answer


def _distractor(item: MiniQuestion, lookup: WikiLookup, rng: np.random.Generator) -> str:
    """Return a sentence about an entity that the question does not need."""
    needed = set(item.question.gold) | {hop.value for hop in item.plan.hops}
    while True:
        entity = lookup.sample_entity(rng, item.world)
        if lookup.title(entity) not in needed:
            sentences = lookup.world.sentences(entity.kind, entity.index)
            return sentences[int(rng.integers(len(sentences)))]


def _endless(wiki: MiniWiki, seed: int, rng: np.random.Generator) -> Iterator[MiniQuestion]:
    """Yield questions of all kinds without end: rounds of new questions, each in random order."""
    each = min(1000, len(wiki.passages))
    for round_ in itertools.count():
        items = [item for kind in KINDS for item in wiki.questions(kind, each, seed + round_)]
        yield from (items[i] for i in rng.permutation(len(items)))
