"""Folders saved by sentence-transformers, with random weights, give its embeddings."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from rrl.data.passages import Passage
from rrl.retrieval.encoder_folder import load_text_encoder, save_text_encoder

torch = pytest.importorskip("torch", reason="torch is not installed; parity needs the extra [parity]")
library = pytest.importorskip("sentence_transformers", reason="parity needs the extra [parity]")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.parity

TEXT = "The film Silver Harbour was directed by Ann Lee. Åse of Oslo, born in 1931, wrote it for Étoile Pictures."
PASSAGES = [Passage("1", "Silver Harbour", TEXT * 3), Passage("2", "Oslo", "Rain."), Passage("3", "", TEXT)]
QUERIES = ["who directed Silver Harbour", "", "rain  in\tOSLO?", TEXT]
SHAPE = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 20}


def word_piece() -> Any:
    """As BERT's."""
    core = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    core.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=150, special_tokens=special, show_progress=False)
    core.train_from_iterator([TEXT, TEXT.lower()], trainer)
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )


def sentence_piece() -> Any:
    """As XLM-RoBERTa's."""
    core = Tokenizer(models.Unigram())
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=90, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    core.train_from_iterator([TEXT] * 5, trainer)
    pieces = json.loads(core.to_str())["model"]["vocab"]
    return transformers.XLMRobertaTokenizer(vocab=[tuple(piece) for piece in pieces])


def build(folder: Path, kind: str, mode: str, normalize: bool, prompts: dict[str, str], lower: bool) -> Any:
    """A SentenceTransformer of random weights, saved to the folder and opened again."""
    tokenizer = word_piece() if kind == "bert" else sentence_piece()
    extra = (
        {} if kind == "bert" else {"pad_token_id": 1, "type_vocab_size": 1, "max_position_embeddings": 514}
    )
    shape = transformers.AutoConfig.for_model(kind, vocab_size=len(tokenizer), **SHAPE, **extra)
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(shape)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    model.save_pretrained(folder / "plain")
    tokenizer.save_pretrained(folder / "plain")
    parts = library.sentence_transformer.modules
    transformer = parts.Transformer(str(folder / "plain"), max_seq_length=24)
    modules = [transformer, parts.Pooling(24, pooling_mode=mode), *[parts.Normalize()][: int(normalize)]]
    saved = library.SentenceTransformer(modules=modules, device="cpu", prompts=prompts)
    saved.save(str(folder / "saved"))
    if lower:  # older versions write this flag in place of a normalizer
        file = folder / "saved" / "sentence_bert_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"do_lower_case": True}))
    return library.SentenceTransformer(str(folder / "saved"), device="cpu")


@pytest.mark.parametrize(
    ("kind", "mode", "normalize", "prompts", "lower"),
    [
        ("bert", "cls", True, {"query": "Represent this: ", "document": ""}, True),
        ("bert", "mean", False, {}, False),
        ("xlm-roberta", "mean", True, {"query": "Instruct: Find\nQuery: ", "document": "passage: "}, False),
    ],
)
def test_a_saved_folder_gives_the_embeddings_of_sentence_transformers(
    kind: str, mode: str, normalize: bool, prompts: dict[str, str], lower: bool, tmp_path: Path
) -> None:
    theirs = build(tmp_path, kind, mode, normalize, prompts, lower)
    ours = load_text_encoder(tmp_path / "saved")
    assert (ours.settings.query_tokens, ours.settings.passage_tokens) == (24, 24)
    queries = theirs.encode_query(QUERIES)
    passages = theirs.encode_document([f"{passage.title} {passage.text}" for passage in PASSAGES])
    assert len(theirs.tokenizer(TEXT).input_ids) > 24
    np.testing.assert_allclose(ours.embed_queries(QUERIES), queries, atol=2e-5)
    np.testing.assert_allclose(ours.embed_passages(PASSAGES, batch=4), passages, atol=2e-5)
    save_text_encoder(tmp_path / "again", ours)
    again = load_text_encoder(tmp_path / "again")
    assert (again.settings, again.encoder.config) == (ours.settings, ours.encoder.config)
    np.testing.assert_array_equal(again.tokenize_queries(QUERIES), ours.tokenize_queries(QUERIES))
