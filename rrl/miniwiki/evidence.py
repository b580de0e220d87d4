"""Generate training examples for the reader, a model that answers from evidence alone: evidence, a question and a short answer.

R-Search (Eq. 4) rewards a policy by the answers of a reader that is of another model family than the policy.
"""

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

    Evidence consists of the passages' sentences that state the required facts, or of statements such as "The director of X is
    Y.". Some examples have another order or irrelevant sentences. Some lack a required sentence; their answer is "unknown".

    Args:
      wiki: the source of questions and passages.
      tokenizer: the reader's tokenizer, with a chat template if `chat`.
      seed: seed of all random choices.
      template: the prompt, with {evidence} and {query}.
      missing: share of examples without a required sentence, in [0, 1].
      chat: whether to put the prompt into the tokenizer's chat template, as the reward does.

    Raises:
      UserError: the template has no {evidence} or no {query}.
    """
    for field in ("{evidence}", "{query}"):
        if field not in template:
            raise UserError(f"template={template!r}: must contain {field}")
    rng = np.random.default_rng((seed, 2))
    lookup = WikiLookup(wiki)
    for item in _question_stream(wiki, seed, rng):
        evidence, answer = gather_evidence(item, lookup, rng, missing)
        prompt = template.replace("{evidence}", evidence).replace("{query}", item.question.text)
        prompt_ids = chat_ids(tokenizer, prompt) if chat else text_ids(tokenizer, prompt)
        # With a space before it, a name has the same tokens as inside a text.
        answer_ids = [*text_ids(tokenizer, f" {answer}"), tokenizer.eos_token_id]
        loss = np.zeros(len(prompt_ids) + len(answer_ids), bool)
        loss[len(prompt_ids) :] = True
        yield Example(np.array([*prompt_ids, *answer_ids], np.int32), loss)


def gather_evidence(
    item: MiniQuestion, lookup: WikiLookup, rng: np.random.Generator, missing: float
) -> tuple[str, str]:
    """Return evidence for a question, and the gold answer, or `UNKNOWN` if a required sentence is missing.

    With probability `missing`, one random required sentence is left out.
    """
    # Two wordings of each fact: the sentence of the passage, and a statement.
    wordings = list(
        dict.fromkeys((hop.sentence, f"The {hop.query} is {hop.value}.") for hop in item.plan.hops)
    )
    # 60 % of the examples have sentences of passages, 20 % statements, 20 % a mixture.
    draw = rng.random()
    statement_share = 0.0 if draw < 0.6 else 1.0 if draw < 0.8 else 0.5
    chosen = [statement if rng.random() < statement_share else sentence for sentence, statement in wordings]
    sentences = list(dict.fromkeys(chosen))
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
        entity = lookup.sample_entity(rng, item.subworld)
        if lookup.title(entity) not in needed:
            sentences = lookup.world.sentences(entity.type, entity.index)
            return sentences[int(rng.integers(len(sentences)))]


def _question_stream(wiki: MiniWiki, seed: int, rng: np.random.Generator) -> Iterator[MiniQuestion]:
    """Yield questions of all kinds without end. Round r has the questions of `seed` + r, in random order."""
    per_kind = min(1000, len(wiki.passages))
    for round_ in itertools.count():
        items = [item for kind in KINDS for item in wiki.questions(kind, per_kind, seed + round_)]
        yield from (items[i] for i in rng.permutation(len(items)))
