"""What a folder says about texts, or what its name and the user do; nothing is guessed silently."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from rrl.errors import UserError
from rrl.models.config import EncoderConfig, Pooling
from rrl.retrieval.settings import FolderSettings, TextSettings, read_settings

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
    """A folder as sentence-transformers before version 5 wrote it."""
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
def test_a_plain_folder_of_a_known_name_gets_its_family_and_says_so(
    name: str, query: str, passage: str, mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = read_settings(write(tmp_path / name))
    assert found == FolderSettings(TextSettings(query, passage, 128, 300), Pooling(mode), derived=True)
    assert "by the folder's name" in caplog.text
    assert repr(query) in caplog.text


def test_the_user_picks_a_family_or_gives_the_strings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, text_encoder={"family": "e5-instruct", "task": "Find films", "passage_tokens": 99})
    found = read_settings(tmp_path)
    assert found.text == TextSettings("Instruct: Find films\nQuery: ", "", 128, 99)
    assert read_settings(tmp_path, {"family": "bge-en-v1.5", "task": None}).pooling == Pooling("cls")
    given = {"family": None, "query_prefix": "{task}? ", "passage_prefix": "p ", "normalize": False}
    found = read_settings(tmp_path, given)
    assert found.text == TextSettings("Find films? ", "p ", 32, 99)
    assert found.pooling == Pooling(normalize=False)
    assert not caplog.records  # certain: nobody is warned


def test_our_own_file_alone_keeps_its_meaning(tmp_path: Path) -> None:
    write(tmp_path / "e5-base", text_encoder={"query_prefix": "a ", "passage_prefix": "b "})
    assert read_settings(tmp_path / "e5-base") == FolderSettings(TextSettings("a ", "b ", 32, 128), Pooling())


def test_sentence_transformers_files_are_read_as_they_are(tmp_path: Path) -> None:
    sentence(
        tmp_path,
        sentence_bert_config={"max_seq_length": 77, "do_lower_case": True},
        config_sentence_transformers={"prompts": {"query": "q: ", "passage": "p: ", "document": ""}},
    )
    found = read_settings(tmp_path)
    assert found == FolderSettings(TextSettings("q: ", "p: ", 77, 77), Pooling("cls"), True, True)
    write(tmp_path, modules=MODULES[:2], **{"1_Pooling__config": {"pooling_mode": "mean"}})
    assert read_settings(tmp_path).pooling == Pooling("mean", normalize=False)
    assert read_settings(tmp_path, {"family": "e5"}).text == TextSettings("query: ", "passage: ", 77, 77)
    # A family brings its prefixes; how this model pools, its own files know.
    assert read_settings(tmp_path, {"family": "bge-en-v1.5"}).pooling == Pooling("mean", normalize=False)


def test_lengths_come_from_the_tokenizer_or_the_position_table_where_no_file_has_them(tmp_path: Path) -> None:
    sentence(tmp_path, tokenizer_config={"model_max_length": 55})
    assert read_settings(tmp_path).text.passage_tokens == 55
    roberta = PLAIN | {"model_type": "xlm-roberta", "pad_token_id": 1}
    sentence(tmp_path, tokenizer_config={"model_max_length": int(1e30)}, config=roberta)
    assert read_settings(tmp_path).text.passage_tokens == 298


def test_an_unknown_sentence_transformers_folder_without_prompts_warns_that_there_are_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sentence(tmp_path, config_sentence_transformers={"prompts": {"query": "", "document": ""}})
    assert read_settings(tmp_path).text.query_prefix == ""
    assert "prefixes '' and '' (no file tells any; if it wants some, add a text_encoder.json" in caplog.text
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
        ({"modules": {"type": "x"}}, "no list of modules"),
    ],
)  # fmt: skip
def test_modules_that_the_encoder_does_not_have_are_refused_by_name(
    files: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        read_settings(sentence(tmp_path, **files))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"family": "glove"},
            "family='glove' is unknown; choose one of e5, e5-instruct, bge-en-v1.5, minilm",
        ),
        ({"family": "e5", "task": "x"}, "task='x' has no place in query_prefix='query: '"),
        ({"family": "e5", "pooling": "max"}, "pooling mode='max' is unknown"),
        ({"family": "e5", "query_tokens": "9"}, "query_tokens='9' must be a whole number"),
        ({"family": "e5", "passage_tokens": 0}, "passage_tokens=0 must be at least 1"),
        ({"prefix": "x"}, "prefix unknown. Allowed: query_prefix"),
        ({}, r"no text_encoder.json with its prefixes .* no modules.json .*\"family\": \"e5\""),
    ],
)
def test_wrong_settings_are_refused_by_name(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        read_settings(write(tmp_path), given)
