"""Train the tokenizer of the built-in world from texts of its training split."""

from collections.abc import Iterator

from transformers import PreTrainedTokenizerFast

from rrl.miniwiki import KINDS, generate
from rrl.models.tokenizer import train_tokenizer

VOCABULARY_SIZE = 1664
"""The smallest multiple of 128 at which nearly all first names, syllables, title words and countries are one token."""

PROTOCOL_TEXTS = (
    " <search> </search> <observation> </observation> <original_evidence> </original_evidence> <answer> </answer>",
    "<search> </search>\n<observation> </observation>\n<original_evidence> </original_evidence>\n<answer> </answer>\n",
    "earlier, later, copy :\n</search>\n</observation>\n</original_evidence>\n</answer>\n",
    " <think> </think> <query> </query> <information> </information> <reference> </reference>",
    " The director of the film is known, so the answer is yes. The answer is no. The answer is unknown.",
    " Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
    "The following are given passages:",
    " You are a helpful assistant.\nsystem\nuser\nassistant\n\nQuestion:\n\nAnswer:",
    " earlier later the same not the same older first last copy : passage of : which passage tells of : after before",
)
"""Tags and words of the recipes' prompts and rollouts, so that they take few tokens. They do not become special tokens."""


def vocabulary_texts(seed: int, passages: int, worlds: int) -> Iterator[str]:
    """Yield the texts to train on: passages of the training split as they stand in observations; questions about them, with
    queries and conclusions; years; and PROTOCOL_TEXTS."""
    wiki = generate("train", seed, passages, worlds)
    for passage in wiki.passages:
        yield f"(Title: {passage.title}) {passage.text}\n"
    for kind in KINDS:
        for item in wiki.questions(kind, passages // 10, seed):
            yield f"{item.question.text}\n{item.plan.conclusion}\n"
            for hop in item.plan.hops:
                yield f" {hop.query} : {hop.value}\n The {hop.query} is {hop.value}. {hop.sentence}\n"
    # Repeated, so that training merges every pair of digits into one token, even if it occurs in no year of this world.
    for _ in range(30):
        for century in range(10, 21):
            yield "".join(f" {century}{year:02d}" for year in range(100))
    # 1000 times, so that they are frequent enough for merges.
    for text in PROTOCOL_TEXTS:
        yield from [text] * 1000


def build_tokenizer(
    seed: int = 0, vocab_size: int = VOCABULARY_SIZE, passages: int = 60000, worlds: int = 300
) -> PreTrainedTokenizerFast:
    """Train the tokenizer. The same arguments give the same bytes; the defaults give the shipped tokenizer."""
    return train_tokenizer(vocabulary_texts(seed, passages, worlds), vocab_size)
