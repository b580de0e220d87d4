"""Whether two models belong to one family: `same_family`."""

from pathlib import Path

from rrl.models.hf import read_decoder_config
from rrl.models.tokenizer import load_tokenizer

SHARED_TOKENS = 0.9
"""Minimum fraction of the smaller vocabulary that two models of one family share. Releases of a family add some tokens."""


def same_family(first: str | Path, second: str | Path) -> bool:
    """Whether the models in two folders belong to one family, such as Qwen2.5 and Qwen3, of any size.

    They do if their architectures have the same lineage and their tokenizers give most tokens the same id. The second condition
    is needed since other publishers use Llama's architecture too.

    Raises:
        UserError: as `read_decoder_config` and `load_tokenizer`.
    """
    if read_decoder_config(first).family.lineage != read_decoder_config(second).family.lineage:
        return False
    smaller, larger = sorted((load_tokenizer(folder).get_vocab() for folder in (first, second)), key=len)
    shared = sum(larger.get(token) == index for token, index in smaller.items())
    return shared >= SHARED_TOKENS * len(smaller)
