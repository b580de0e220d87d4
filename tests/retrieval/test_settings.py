"""Settings of an encoder come from its folder, its name or the user, and a guess is logged."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from rrl.errors import UserError
from rrl.models.config import EncoderConfig, Pooling
from rrl.retrieval.settings import EncoderSettings, TextSettings, read_settings

PLAIN = EncoderConfig(vocab_size=9, hidden=4, layers=1, heads=1, mlp=4, max_positions=300).to_hf()
BGE = "Represent this sentence for searching relevant passages: "
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]


def write(folder: Path, **files: Any) -> Path:
    """A folder of JSON files; "__" in a name stands for "/"."""
    for name, value in ({"config": PLAIN} | files).items():
        file = folder / f"{name.replace('__', '/')}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(value))
    return folder


def sentence(folder: Path, **files: Any) -> Path:
    """A folder in the format of sentence-transformers before version 5."""
    flags = {"word_embedding_dimension": 4, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    return write(folder, **({"modules": MODULES, "1_Pooling__config": flags} | files))


@pytest.mark.parametrize(
    ("name", "query", "passage", "mode"),
    [
        ("e5-base-v2", "query: ", "passage: ", "mean"),
        ("bge-large-en-v1.5", BGE, "", "cls"),
        ("all-MiniLM-L6-v2", "", "", "mean"),
        (
            "models--intfloat--multilingual-e5-large-instruct/snapshots/4a3",
            "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: ",
            "",
            "mean",
        ),
    ],
)
def test_a_folder_with_a_known_name_gets_the_settings_of_its_family(
    name: str, query: str, passage: str, mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = read_settings(write(tmp_path / name))
    assert found == EncoderSettings(TextSettings(query, passage, 128, 300), Pooling(mode), derived=True)
    assert "by the folder's name" in caplog.text
    assert repr(query) in caplog.text


def test_the_user_can_give_a_family_or_prefixes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, text_encoder={"family": "e5-instruct", "task": "Find films", "passage_tokens": 99})
    found = read_settings(tmp_path)
    assert found.text == TextSettings("Instruct: Find films\nQuery: ", "", 128, 99)
    assert read_settings(tmp_path, {"family": "bge-en-v1.5", "task": None}).pooling == Pooling("cls")
    given = {"family": None, "query_prefix": "{task}? ", "passage_prefix": "p ", "normalize": False}
    found = read_settings(tmp_path, given)
    assert found.text == TextSettings("Find films? ", "p ", 32, 99)
    assert found.pooling == Pooling(normalize=False)
    assert not caplog.records  # the source is certain, so there is no warning


def test_text_encoder_json_alone_is_sufficient(tmp_path: Path) -> None:
    write(tmp_path / "e5-base", text_encoder={"query_prefix": "a ", "passage_prefix": "b "})
    assert read_settings(tmp_path / "e5-base") == EncoderSettings(
        TextSettings("a ", "b ", 32, 128), Pooling()
    )


def test_sentence_transformers_files_give_the_settings(tmp_path: Path) -> None:
    sentence(
        tmp_path,
        sentence_bert_config={"max_seq_length": 77, "do_lower_case": True},
        config_sentence_transformers={"prompts": {"query": "q: ", "passage": "p: ", "document": ""}},
    )
    found = read_settings(tmp_path)
    assert found == EncoderSettings(TextSettings("q: ", "p: ", 77, 77), Pooling("cls"), True, True)
    write(tmp_path, modules=MODULES[:2], **{"1_Pooling__config": {"pooling_mode": "mean"}})
    assert read_settings(tmp_path).pooling == Pooling("mean", normalize=False)
    assert read_settings(tmp_path, {"family": "e5"}).text == TextSettings("query: ", "passage: ", 77, 77)
    # The family gives the prefixes; the model's own files give the pooling.
    assert read_settings(tmp_path, {"family": "bge-en-v1.5"}).pooling == Pooling("mean", normalize=False)


def test_lengths_default_to_those_of_the_tokenizer_or_the_position_table(tmp_path: Path) -> None:
    sentence(tmp_path, tokenizer_config={"model_max_length": 55})
    assert read_settings(tmp_path).text.passage_tokens == 55
    roberta = PLAIN | {"model_type": "xlm-roberta", "pad_token_id": 1}
    sentence(tmp_path, tokenizer_config={"model_max_length": int(1e30)}, config=roberta)
    assert read_settings(tmp_path).text.passage_tokens == 298


def test_a_sentence_transformers_folder_without_prompts_logs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sentence(tmp_path, config_sentence_transformers={"prompts": {"query": "", "document": ""}})
    assert read_settings(tmp_path).text.query_prefix == ""
    assert (
        "prefixes '' and '' (no file gives prefixes; if the model needs some, add a text_encoder.json"
        in caplog.text
    )
    caplog.clear()
    caplog.set_level(logging.INFO)
    assert read_settings(tmp_path, {"family": "minilm"}).text.passage_prefix == ""
    assert [record.levelname for record in caplog.records] == ["INFO"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"1_Pooling__config": {"pooling_mode_max_tokens": True}}, r"1_Pooling.config.json: pooling .*max_tokens.* mean or cls"),
        ({"1_Pooling__config": {"pooling_mode": "lasttoken"}}, "pooling lasttoken is not supported"),
        ({"1_Pooling__config": {"pooling_mode": ["cls", "mean"]}}, "cls.*mean.*not supported"),
        ({"1_Pooling__config": {"pooling_mode": "mean", "include_prompt": False}}, "include_prompt"),
        ({"modules": [*MODULES, {"path": "3_Dense", "type": "sentence_transformers.models.Dense"}]}, "models.Dense"),
        ({"modules": [MODULES[0] | {"type": "remote.Transformer"}, *MODULES[1:]]}, "remote.Transformer"),
        ({"modules": [MODULES[0] | {"path": "0_Transformer"}, *MODULES[1:]]}, "'0_Transformer'; move it"),
        ({"modules": {"type": "x"}}, "not a list of modules"),
    ],
)  # fmt: skip
def test_the_error_names_unsupported_modules(files: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        read_settings(sentence(tmp_path, **files))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"family": "glove"},
            "family='glove' is unknown; choose one of e5, e5-instruct, bge-en-v1.5, minilm",
        ),
        ({"family": "e5", "task": "x"}, "task='x' is not used by query_prefix='query: '"),
        ({"family": "e5", "pooling": "max"}, "pooling mode='max' is unknown"),
        ({"family": "e5", "query_tokens": "9"}, "query_tokens='9' must be a whole number"),
        ({"family": "e5", "passage_tokens": 0}, "passage_tokens=0 must be at least 1"),
        ({"prefix": "x"}, "prefix unknown. Allowed: query_prefix"),
        ({}, r"no text_encoder.json with its prefixes .* no modules.json .*\"family\": \"e5\""),
    ],
)
def test_errors_name_the_wrong_setting(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        read_settings(write(tmp_path), given)
