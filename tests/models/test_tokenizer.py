"""Tokenizers keep every byte, and `token_bytes` gives the exact bytes of each id for every family of tokenizers."""

import dataclasses
import json
import logging
import re
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

from rrl.errors import UserError
from rrl.miniwiki import generate
from rrl.models.tokenizer import (
    END,
    PAD,
    QWEN_MARKER,
    START,
    check_tokenizer,
    end_ids,
    load_tokenizer,
    token_bytes,
    train_tokenizer,
)
from tests.tiny import tiny_shape

SHIPPED = Path(__file__).parents[2] / "assets" / "miniwiki-tokenizer"
TEXTS = [
    " director of Silver Harbour",
    "(Title: Lena Corström) Lena Corström was born in 1931 in Lornford.\n",
    "<search> spouse of Marta Velikov </search>\n<answer> yes </answer>",
    "日本語 🙂 naïve\t\ttabs \n\n  spaces   end ",
    "\x00\x7f\u00a0\u2028",
]


@pytest.fixture(scope="module")
def shipped() -> PreTrainedTokenizerFast:
    return load_tokenizer(SHIPPED)


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_restores_the_text(shipped: PreTrainedTokenizerFast, text: str) -> None:
    ids = shipped.encode(text)
    assert shipped.decode(ids) == text
    table = token_bytes(shipped)
    assert b"".join(table[i] for i in ids) == text.encode()


def test_special_tokens_have_no_bytes_and_tags_are_not_special(shipped: PreTrainedTokenizerFast) -> None:
    table = token_bytes(shipped)
    assert len(table) == len(shipped)
    assert [shipped.convert_ids_to_tokens(i) for i, b in enumerate(table) if not b] == [PAD, START, END]
    assert shipped.pad_token == PAD
    assert shipped.eos_token == END
    assert len(shipped.encode("<search>")) > 1


def test_years_are_two_tokens_and_a_names_tokens_do_not_depend_on_its_context(
    shipped: PreTrainedTokenizerFast,
) -> None:
    assert all(len(shipped.encode(f" {year}")) == 2 for year in range(1000, 2020))
    name = shipped.encode(" Marta Velikov")
    for before, after in [
        ("director of", " </search>"),
        ("(Title:", ") x"),
        (". The founder is", "."),
        ("by", ", and"),
    ]:
        ids = shipped.encode(before + " Marta Velikov" + after)
        start = len(shipped.encode(before))
        assert ids[start : start + len(name)] == name


def test_names_and_passages_need_few_tokens(shipped: PreTrainedTokenizerFast) -> None:
    passages = generate("test", 0, 500, worlds=2).passages
    assert sum(len(shipped.encode(f" {p.title}")) for p in passages) / 500 < 3.5
    assert 20 <= sum(len(shipped.encode(f" {p.text}")) for p in passages) / 500 <= 40


def test_chat_template_is_chatml(shipped: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "user", "content": "Who?"}]
    text = shipped.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"


def test_a_trained_tokenizer_survives_saving_and_loading(tmp_path: Path) -> None:
    trained = train_tokenizer(TEXTS * 5, 300)
    trained.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert [loaded.encode(text) for text in TEXTS] == [trained.encode(text) for text in TEXTS]
    assert loaded.chat_template == trained.chat_template
    assert token_bytes(loaded) == token_bytes(trained)


def test_token_bytes_of_a_sentence_piece_tokenizer_with_byte_fallback() -> None:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ("▁", "a", "b", "▁a", "ab", "▁ab", "é"):
        vocab[piece] = len(vocab)
    merges = [("▁", "a"), ("a", "b"), ("▁", "ab")]
    raw = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    raw.normalizer = normalizers.Replace(" ", "▁")
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    llama = PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    table = token_bytes(llama)
    assert table[:3] == [b"", b"", b""]
    for text in (" ab a", "aé日b"):
        assert b"".join(table[i] for i in llama.encode(text, add_special_tokens=False)) == text.encode()


def gemma() -> Tokenizer:
    """A BPE whose normalizer replaces spaces by U+2581 and whose decoder reverses it."""
    raw = Tokenizer(models.BPE({"<unk>": 0, "</s>": 1, "▁": 2, "a": 3, "<0x41>": 4}, [], unk_token="<unk>"))
    raw.normalizer = normalizers.Replace(" ", "▁")
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return raw


def unigram() -> Tokenizer:
    raw = Tokenizer(models.Unigram([("<unk>", 0.0), ("</s>", 0.0), ("▁", -1.0), ("a", -2.0)], unk_id=0))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return raw


@pytest.mark.parametrize("made", [gemma, unigram])
def test_bytes_of_tokens_added_to_a_sentence_piece_tokenizer_equal_its_decoders(made) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made(), unk_token="<unk>", eos_token="</s>")
    tokenizer.add_tokens(["▁▁", "▁tool▁é", AddedToken("▁raw", normalized=False), "<tag>"])
    table, vocab = token_bytes(tokenizer), tokenizer.get_vocab()
    for piece in ("▁▁", "▁tool▁é", "▁raw", "<tag>", *["<0x41>"] * (made is gemma)):
        ids = [vocab["a"], vocab[piece], vocab["a"]]  # a decoder may strip the first space of a text
        assert b"".join(table[i] for i in ids).decode() == tokenizer.decode(ids)


def test_bytes_of_a_token_outside_the_byte_alphabet_equal_the_decoders() -> None:
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "日本", "Ġ日", "x y", "Ġa", "Ã©", "</s>"]
    raw = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, []))
    raw.decoder = decoders.ByteLevel()
    table = token_bytes(PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>"))
    for index, piece in enumerate(pieces[256:-1], start=256):
        assert table[index].decode() == raw.decode([index]), piece


def test_added_tokens_that_are_not_special_keep_their_text() -> None:
    tokenizer = train_tokenizer(TEXTS, 300)
    tokenizer.add_tokens(["<tool é>"])
    assert token_bytes(tokenizer)[len(tokenizer) - 1] == "<tool é>".encode()


def test_token_bytes_refuses_word_piece_tokenizers() -> None:
    raw = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(UserError, match="SentencePiece"):
        token_bytes(PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="[UNK]"))


def test_missing_tokenizer_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a folder"):
        load_tokenizer(tmp_path / "missing")
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"broken": True}))
    with pytest.raises(UserError, match="cannot load"):
        load_tokenizer(tmp_path)


def test_a_vocabulary_that_is_too_small_for_the_bytes_is_refused() -> None:
    with pytest.raises(UserError, match="259"):
        train_tokenizer(["a"], 100)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama"])
def test_a_config_json_in_the_folder_does_not_change_the_tokenizer(tmp_path: Path, model_type: str) -> None:
    tokenizer = train_tokenizer(TEXTS, 400)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    loaded = load_tokenizer(tmp_path)
    assert loaded.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


def of_qwen(folder: Path, normalizer: normalizers.Normalizer | None, declared: str) -> Path:
    """A folder whose tokenizer has Qwen's end-of-text token and some letters."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    vocab = {letter: number for number, letter in enumerate(letters)} | dict([QWEN_MARKER])
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    wanted = {"tokenizer_class": declared, "eos_token": QWEN_MARKER[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(wanted))
    return folder


@pytest.mark.parametrize(
    ("normalizer", "declared", "words"),
    [
        (None, "TokenizersBackend", "become tokens that the model was not trained on"),
        (None, "Qwen2Tokenizer", "transformers' Qwen2Tokenizer adds it"),
        (normalizers.NFC(), "TokenizersBackend", ""),
        (normalizers.NFC(), "Qwen2Tokenizer", ""),
    ],
)
def test_a_qwen_tokenizer_without_normalizer_in_its_file_is_warned_about_once(
    normalizer, declared: str, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = of_qwen(tmp_path / "converted", normalizer, declared)
    with caplog.at_level(logging.WARNING):
        loaded = load_tokenizer(folder)
        load_tokenizer(folder)
    assert isinstance(loaded, Qwen2Tokenizer) == (declared == "Qwen2Tokenizer")
    warnings = [record.getMessage() for record in caplog.records if "NFC" in record.getMessage()]
    assert len(warnings) == bool(words) and words in "".join(warnings)
    composed = loaded.encode("e\u0301") == loaded.encode("\u00e9")
    assert composed == (words != "become tokens that the model was not trained on")


def test_a_trained_tokenizer_without_normalizer_gives_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert load_tokenizer(SHIPPED).backend_tokenizer.normalizer is None
    assert not caplog.records


def test_the_templates_end_of_turn_is_an_end_token_even_if_no_config_lists_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokenizer = load_tokenizer(SHIPPED)
    config = dataclasses.replace(tiny_shape(len(tokenizer), 256), eos_token_id=2)
    assert end_ids(tokenizer, config) == [2] and not caplog.records
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.name_or_path = "base_with_chat_template"
    config = dataclasses.replace(config, eos_token_id=0)
    assert end_ids(tokenizer, config) == end_ids(tokenizer, config) == [0, 2]
    assert len(caplog.records) == 1
    assert re.search(r"base_with_chat_template: .* ends a turn with <\|im_end\|>", caplog.text)
    tokenizer.chat_template = None
    assert end_ids(tokenizer, config) == [0]


@pytest.mark.parametrize(
    ("eos", "message"),
    [
        (
            "<|im_end|>",
            r"no chat_template, although its end token <\|im_end\|> is a chat model's; copy chat_template",
        ),
        (
            "<|endoftext|>",
            r"no chat_template, and its end token <\|endoftext\|> is not a chat model's, .* base model",
        ),
    ],
)
def test_a_lost_template_and_a_base_model_are_told_apart(eos: str, message: str) -> None:
    tokenizer = load_tokenizer(SHIPPED)
    tokenizer.chat_template, tokenizer.eos_token = None, eos
    config = dataclasses.replace(tiny_shape(len(tokenizer), 256), eos_token_id=tokenizer.eos_token_id)
    check_tokenizer(tokenizer, config, "policy")
    with pytest.raises(UserError, match=f"^policy=.*{message}"):
        check_tokenizer(tokenizer, config, "policy", chat=True)


def test_a_template_of_another_model_is_refused_since_its_tokens_would_be_split() -> None:
    tokenizer = load_tokenizer(SHIPPED)
    config = dataclasses.replace(tiny_shape(len(tokenizer), 256), eos_token_id=tokenizer.eos_token_id)
    for plain in (
        "[INST] {{ messages[0].content }} [/INST]",
        "{{ raise_exception('no') }}",
        tokenizer.chat_template,
    ):
        tokenizer.chat_template = plain
        check_tokenizer(tokenizer, config, "policy", chat=True)
    tokenizer.chat_template = (
        "{% for m in messages %}<start_of_turn>{{ m.content }}<end_of_turn><|eot_id|>{% endfor %}"
    )
    with pytest.raises(
        UserError, match=r"writes <start_of_turn>, <end_of_turn>, <\|eot_id\|>, but the tokenizer"
    ):
        check_tokenizer(tokenizer, config, "policy", chat=True)
