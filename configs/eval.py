"""Evaluation of a trained policy or a prompted method on a question file, a dataset folder, or the built-in world.

    python launch/eval.py --config=configs/eval.py:method=rsearch                       # built-in world, shipped policy
    python launch/eval.py --config=configs/eval.py:method=naive_rag,policy=assets/miniwiki-reader
    python launch/eval.py --config=configs/eval.py:method=ircot,dataset=FOLDER,policy=FOLDER
    python launch/eval.py --config=configs/eval.py:method=direct,dataset=dev.jsonl,policy=FOLDER,judge=http://127.0.0.1:8000/v1

`method` is a recipe or a prompted method; docs/evaluation.md lists them. Single fields are set by flags, such as
`--config.method.steps=4` (an option of a prompted method), `--config.recipe.environment.max_searches=2`,
`--config.rollout.rows=256` and `--config.prompted.passage_chars=800`.
"""

import types
from typing import Any

from ml_collections import ConfigDict

from rrl.config.arguments import parse, run_name
from rrl.config.shared import refuse_unused_encoder
from rrl.errors import UserError

SINGLE_SEARCH = ("naive_rag", "rag_cot")
"""Prompted methods that search once and put all retrieved passages into the prompt."""


ARGUMENTS: dict[str, Any] = {
    "method": "rsearch",
    "dataset": "miniwiki",
    "policy": "",
    "reader": "",
    "retriever": "",
    "encoder": "",
    "index": "",
    "corpus": "",
    "truth": "",
    "split": "",
    "questions": 0,
    "top_k": int,
    "temperature": 0.0,
    "seed": 0,
    "normalization": "squad",
    "judge": "",
    "judge_model": "",
    "judge_prompt": "tiresrag",
}
"""Argument -> default. A tuple lists the allowed values, the default first. A type alone: no default (None)."""


def get_config(arg: str = "") -> ConfigDict:
    """Return the config of `--config=configs/eval.py:ARG`."""
    args = parse(arg, **ARGUMENTS)
    refuse_unused_encoder(args)
    # These modules import jax, so they are imported only after the arguments have been checked.
    from rrl.eval.settings import with_defaults
    from rrl.recipes.card import read_card
    from rrl.rewards.judge_settings import judge_sections

    real = args.dataset != "miniwiki"
    if real and not args.policy:
        raise UserError(
            "config argument policy='': the shipped policy works in the built-in world only; give a model's folder"
        )
    config = ConfigDict()
    # The name, and so the default workdir, depends on the arguments.
    config.name = run_name("eval", arg)
    config.policy = args.policy or "assets/miniwiki-policy"
    config.reader = args.reader
    card = read_card(config.policy)
    # Whether the model is a small one of the built-in world, according to the dataset or to the context in its card.
    tiny = not real or (card is not None and 0 < card.context <= 1024)

    set_method(config, args, card, tiny)
    config.eval = {
        "temperature": args.temperature,
        "seed": args.seed,
        "normalization": args.normalization,
        "judge_prompt": args.judge_prompt,
    }
    set_data(config, args)
    set_rollout(config, args, card, tiny)
    config.mesh = {}
    config.compute = {}
    if args.judge or args.judge_model:
        config.update(judge_sections(args.judge, args.judge_model))
    return with_defaults(config)


def set_method(config: ConfigDict, args: types.SimpleNamespace, card: Any, tiny: bool) -> None:
    """Set the method, and the options of the recipe or of the prompted methods."""
    from rrl.recipes.catalogue import is_recipe
    from rrl.recipes.prompted.base import PromptedSettings

    config.method = {"name": args.method}
    if not is_recipe(args.method):
        config.prompted = {"tokens": 128 if tiny else 256}
        if args.method in SINGLE_SEARCH and (args.top_k or 0) > PromptedSettings.most_passages:
            config.prompted.most_passages = args.top_k  # all passages of its only search
        return
    config.recipe = {}
    if card is not None and card.recipe == args.method:
        # A policy of this recipe is evaluated with the settings of its training, which its card states.
        config.recipe = {**card.fields, "environment": dict(card.environment)}
    if args.method == "r3rag" and args.dataset != "miniwiki" and not tiny:
        # Documents are cut during training only (R3-RAG, section 4.3).
        config.recipe.environment = {**config.recipe.get("environment", {}), "document_characters": 0}


def set_data(config: ConfigDict, args: types.SimpleNamespace) -> None:
    """Set the questions, the corpus and the retriever."""
    config.data = {
        "path": args.dataset,
        "corpus": args.corpus,
        "truth": args.truth,
        "split": args.split,
        "questions": args.questions,
    }
    real = args.dataset != "miniwiki"
    # BM25 and a search service use no encoder, and for real questions there is no default one.
    has_default_encoder = not (real or args.retriever == "bm25" or args.index.startswith("http"))
    config.retriever = {
        "kind": args.retriever or ("bm25" if real and not args.encoder else "scann"),
        "encoder": args.encoder or ("assets/miniwiki-encoder" if has_default_encoder else ""),
        "title_weight": 1 if real else 3,
        "index": args.index,
    }


def set_rollout(config: ConfigDict, args: types.SimpleNamespace, card: Any, tiny: bool) -> None:
    """Set the sizes of the engines. Context and top_k of a policy with a recipe card are those of its training."""
    context = 1024 if tiny else 8192
    if card is not None and card.context:
        context = card.context
    top_k = 2 if tiny else 5  # the papers evaluate with 5
    if card is not None:
        top_k = card.top_k
    if args.top_k is not None:
        top_k = args.top_k
    config.rollout = {
        "rows": 64,
        "context": context,
        "wake_threshold": 16,
        "prefill_tokens": 256 if tiny else 2048,
        "top_k": top_k,
    }
    config.reader_rollout = {
        "rows": 32 if tiny else 128,
        "context": 512 if tiny else 8192,
        "prefill_tokens": 512 if tiny else 2048,
    }
