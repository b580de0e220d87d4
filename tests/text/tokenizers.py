"""Small SentencePiece tokenizers with a dummy prefix, as Llama 2 has, or without one, as Gemma has."""

import json

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXTS = [
    "the search for evidence and the answer is found in the observation of the river < / > </search> <search>"
]
LEGACY = {
    "type": "Sequence",
    "normalizers": [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ],
}
DECODERS = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
]


def sentence_piece(kind: str) -> PreTrainedTokenizerFast:
    """Make a tokenizer of a few hundred tokens. `kind`: "legacy" (the normalizer adds the prefix), or the prepend_scheme of
    Metaspace: "always", "first" or "never"."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 50, trainer)
    fields = json.loads(tokenizer.to_str())
    vocabulary = fields["model"]["vocab"]
    size = len(vocabulary)
    vocabulary |= {f"<0x{byte:02X}>": size + byte for byte in range(256)}
    fields["model"]["byte_fallback"] = True
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": kind, "split": False}
    fields["normalizer"], fields["pre_tokenizer"] = (LEGACY, None) if kind == "legacy" else (None, metaspace)
    fields["decoder"] = {"type": "Sequence", "decoders": DECODERS}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(fields)),
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
    )
