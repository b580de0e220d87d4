"""Read an encoder's pooling, prompts and lengths from the files of sentence-transformers."""

import json
from pathlib import Path
from typing import Any

from rrl.errors import UserError
from rrl.models.hf import read_encoder_config
from rrl.models.weights import read_json

MODULES_FILE = "modules.json"

PREFIXES = {"query_prefix": ("query",), "passage_prefix": ("document", "passage", "corpus")}
"""Our name of a prefix, and the prompts of sentence-transformers that may hold it; the first prompt that is not empty is used."""

MAX_QUERY_TOKENS = 128
"""Upper limit of `query_tokens`. All queries are padded to that width, so a model's full length would be wasteful."""

_POOLING_FLAG = "pooling_mode_"
_MODULES = ("Transformer", "Pooling", "Normalize")


def read_sentence_transformers(folder: Path) -> dict[str, Any]:
    """Read settings from modules.json and its companion files; return them by their keys in text_encoder.json.

    The result has no prefixes if the files name no prompts.

    Raises:
        UserError: modules or a pooling that the encoder does not support, or a broken file.
    """
    config = _read_if_present(folder / "config_sentence_transformers.json")
    prompts = config.get("prompts") or {}
    prefixes = {
        prefix: next((prompts[name] for name in prompt_names if prompts.get(name)), "")
        for prefix, prompt_names in PREFIXES.items()
    }
    # Newer versions write empty prompts if none were set.
    given_prefixes = prefixes if any(prefixes.values()) else {}
    lower_case = bool(_read_if_present(folder / "sentence_bert_config.json").get("do_lower_case"))
    return _pooling(folder) | given_prefixes | text_lengths(folder) | {"lower_case": lower_case}


def text_lengths(folder: Path) -> dict[str, int]:
    """Return the `query_tokens` and `passage_tokens` that the model and its files allow, queries at most MAX_QUERY_TOKENS."""
    max_tokens = read_encoder_config(folder).max_tokens
    config = _read_if_present(folder / "sentence_bert_config.json")
    length = config.get("max_seq_length") or _read_if_present(folder / "tokenizer_config.json").get(
        "model_max_length"
    )
    length = min(max_tokens, int(length or max_tokens))
    query, passage = (min(length, config.get(f"{kind}_length") or length) for kind in ("query", "document"))
    return {"query_tokens": min(query, MAX_QUERY_TOKENS), "passage_tokens": passage}


def _pooling(folder: Path) -> dict[str, Any]:
    """Return `pooling` and `normalize` from modules.json and the configuration of its Pooling module."""
    file = folder / MODULES_FILE
    try:
        modules = json.loads(file.read_text(encoding="utf-8"))
        types, paths = [module["type"] for module in modules], [module["path"] for module in modules]
    except (TypeError, KeyError, ValueError) as error:
        raise UserError(
            f"{file} is not a list of modules ({error!r}); download or export the folder again"
        ) from error
    names = tuple(kind.rpartition(".")[2] for kind in types if kind.startswith("sentence_transformers."))
    if len(names) < len(types) or names not in (_MODULES[:2], _MODULES):
        raise UserError(
            f"{file} asks for {', '.join(types)}, which is not supported; it must be "
            "sentence_transformers' Transformer and Pooling, with or without Normalize"
        )
    if paths[0]:
        raise UserError(f"{file}: the model is in {paths[0]!r}; move it beside {MODULES_FILE}, path ''")
    pooling = folder / paths[1] / "config.json"
    config = read_json(pooling, what="which sets the pooling")
    # Before version 5 there was a flag for each mode, such as pooling_mode_cls_token.
    flags = [name.removeprefix(_POOLING_FLAG) for name, on in config.items() if _POOLING_FLAG in name and on]
    mode_of_flag = {"cls_token": "cls", "mean_tokens": "mean"}
    mode = config.get("pooling_mode") or [mode_of_flag.get(flag, flag) for flag in flags] or "mean"
    if mode not in ("mean", "cls", ["mean"], ["cls"]):
        raise UserError(f"{pooling}: pooling {mode} is not supported; it must be mean or cls")
    if config.get("include_prompt") is False:
        raise UserError(
            f"{pooling}: include_prompt=false is not supported; prefixes are pooled like the text"
        )
    return {"pooling": mode if isinstance(mode, str) else mode[0], "normalize": names == _MODULES}


def _read_if_present(file: Path) -> dict[str, Any]:
    return read_json(file, "") if file.is_file() else {}
