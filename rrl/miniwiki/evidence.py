"""Text for the reader of another family: evidence and a question in, a short answer out."""

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
"""What the reader says when the evidence does not answer the question."""


def reader_examples(
    wiki: MiniWiki,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    template: str,
    *,
    missing: float = 0.2,
    chat: bool = True,
) -> Iterator[Example]:
    """An endless stream of reading-comprehension examples; the same arguments give the same stream.

    Evidence is the sentences of a question's plan, or statements of its facts, at times in another order, with
    sentences that do not matter, or with one that is needed left out: then the answer is "unknown".

    Args:
      wiki: where questions and passages come from.
      tokenizer: with a chat template if `chat`.
      seed: order and choice.
      template: the prompt, with {evidence} and {query}.
      missing: share of examples with a needed sentence left out.
      chat: put the prompt into the tokenizer's chat template, as the reader will see it.

    Raises:
      UserError: a template without {evidence} or {query}.
    """
    for field in ("{evidence}", "{query}"):
        if field not in template:
            raise UserError(f"template={template!r}: must contain {field}")
    rng = np.random.default_rng((seed, 2))
    lookup = WikiLookup(wiki)
    for item in _endless(wiki, seed, rng):
        evidence, answer = gather_evidence(item, lookup, rng, missing)
        prompt = template.replace("{evidence}", evidence).replace("{query}", item.question.text)
        asked = chat_ids(tokenizer, prompt) if chat else text_ids(tokenizer, prompt)
        # The leading space gives a name the tokens it has everywhere else.
        said = [*text_ids(tokenizer, f" {answer}"), tokenizer.eos_token_id]
        loss = np.zeros(len(asked) + len(said), bool)
        loss[len(asked) :] = True
        yield Example(np.array([*asked, *said], np.int32), loss)


def gather_evidence(
    item: MiniQuestion, lookup: WikiLookup, rng: np.random.Generator, missing: float
) -> tuple[str, str]:
    """Evidence for a question and the answer it allows."""
    facts = list(dict.fromkeys((hop.sentence, f"The {hop.query} is {hop.value}.") for hop in item.plan.hops))
    style = rng.random()
    # Quoted sentences, statements, or some of each.
    spoken = [rng.random() < (0.0 if style < 0.6 else 1.0 if style < 0.8 else 0.5) for _ in facts]
    sentences = list(dict.fromkeys(fact[bool(said)] for fact, said in zip(facts, spoken, strict=True)))
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
    """A sentence about something the question does not need."""
    needed = set(item.question.gold) | {hop.value for hop in item.plan.hops}
    while True:
        entity = lookup.sample_entity(rng, item.world)
        if lookup.title(entity) not in needed:
            sentences = lookup.world.sentences(entity.kind, entity.index)
            return sentences[int(rng.integers(len(sentences)))]


def _endless(wiki: MiniWiki, seed: int, rng: np.random.Generator) -> Iterator[MiniQuestion]:
    """Questions of all kinds in random order, round after round."""
    each = min(1000, len(wiki.passages))
    for round_ in itertools.count():
        items = [item for kind in KINDS for item in wiki.questions(kind, each, seed + round_)]
        yield from (items[i] for i in rng.permutation(len(items)))
