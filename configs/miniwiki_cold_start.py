"""Stage 1 of the built-in world's cold start: supervised training on demonstrations of a recipe, with early stopping.

    python launch/sft.py --config=configs/miniwiki_cold_start.py:init=runs/pretrain/model --workdir=runs/cold_start
    python launch/sft.py --config=configs/miniwiki_cold_start.py:recipe=tiresrag,init=assets/miniwiki-policy \\
      --workdir=runs/tiresrag_cold_start
    python launch/sft.py --config=configs/miniwiki_cold_start.py:recipe=r3rag,init=assets/miniwiki-policy \\
      --workdir=runs/r3rag_cold_start
    python launch/sft.py --config=configs/miniwiki_cold_start.py:recipe=r2ag,init=assets/miniwiki-policy \\
      --workdir=runs/r2ag_cold_start

Cost: about 2 minutes on 2 quiet cores. The model is written to WORKDIR/model, or to out=FOLDER.

R-Search trains on 500 demonstrations. The other recipes train on 75 to 150 and start from R-Search's policy (`init`); after
500 demonstrations reinforcement learning would gain little. `demonstrations=N` sets another number. `recipe=MODULE:CLASS` is a
recipe of your own (docs/your_own_recipe.md).

`minutes=M` trains for M minutes at a lower constant learning rate, without early stopping, and keeps the parameters with the
lowest held-out loss. `launch/compare.py` uses it for the arm "SFT continued", which trains for as long as reinforcement learning
took.
"""

from typing import Any

from ml_collections import ConfigDict

from rrl.config.arguments import parse
from rrl.config.shared import refuse_unused_encoder
from rrl.errors import UserError

SINGLE_CONTEXT_ENVIRONMENT = {
    "max_searches": 4,
    "turn_tokens": 128,
    "observation_tokens": 256,
    "correction": "",
}
"""Environment fields of the recipes that keep a whole trajectory in one context. `correction` is empty, since the
demonstrations contain no corrections of malformed turns."""
RECIPE_FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rsearch": ({"instruction": ""}, SINGLE_CONTEXT_ENVIRONMENT),
    "tiresrag": ({"opening": "bare"}, SINGLE_CONTEXT_ENVIRONMENT),
    "search_r1": ({"instruction": ""}, SINGLE_CONTEXT_ENVIRONMENT),
    "r1_searcher": ({"opening": "bare", "malformed_penalty": 0.5}, SINGLE_CONTEXT_ENVIRONMENT),
    "research": ({"opening": "bare"}, SINGLE_CONTEXT_ENVIRONMENT),
    "r3rag": ({}, {"max_steps": 5, "turn_tokens": 128}),
    "r2ag": ({}, {"opening": "bare", "turn_tokens": 192}),
}
"""Recipe -> (fields of the recipe, fields of its environment), as in the recipe's RL config. Prompts have no instruction,
since a policy of this size could not follow it."""


DEMONSTRATIONS = {
    "r3rag": 100,
    "tiresrag": 150,
    "r2ag": 100,
    "search_r1": 150,
    "r1_searcher": 75,
    "research": 100,
}
"""Recipe -> number of demonstrations, if not 500 (150 for a recipe of your own)."""


ARGUMENTS: dict[str, Any] = {
    "recipe": "rsearch",
    "init": "runs/pretrain/model",
    "out": "",
    "demonstrations": 0,
    "steps": 260,
    "minutes": 0.0,
    "seed": 0,
    "retriever": ("scann", "bm25", "exact"),
    "encoder": "",
}
"""Argument -> default. A tuple lists the allowed values, the default first. A type alone: no default (None)."""

NEVER = 100_000
"""More steps, or evaluations, than a run with `minutes` reaches."""


def get_config(arg: str = "") -> ConfigDict:
    """Return the config of `--config=configs/miniwiki_cold_start.py:ARG`."""
    args = parse(arg, **ARGUMENTS)
    refuse_unused_encoder(args)
    if args.recipe not in RECIPE_FIELDS and ":" not in args.recipe:
        raise UserError(
            f"config argument recipe={args.recipe!r} is unknown; choose one of {', '.join(RECIPE_FIELDS)}, or MODULE:CLASS for "
            "your own"
        )
    recipe_options, environment = RECIPE_FIELDS.get(args.recipe, ({}, {}))
    default_number = DEMONSTRATIONS.get(args.recipe, 150 if ":" in args.recipe else 500)
    config = ConfigDict()
    config.stage = "demonstrations"
    config.init = args.init
    config.tokenizer = ""
    config.out = args.out
    config.model = {}
    config.data = {
        "train_worlds": 32,
        "held_out_worlds": 4,
        "world_size": 200,
        "demonstrations": {
            "number": args.demonstrations or default_number,
            "held_out": 100,
            "top_k": 2,
            # R2AG's expert needs two passages per search; its policy retrieves one, which its recipe card states.
            "card_top_k": 1 if args.recipe == "r2ag" else 0,
            "recipe": args.recipe,
            "recipe_options": recipe_options,
            "environment": environment,
        },
        "retriever": {
            "kind": args.retriever,
            "encoder": args.encoder or "assets/miniwiki-encoder",
            "title_weight": 3,
        },
    }
    config.train = {
        "steps": args.steps if not args.minutes else NEVER,
        "minutes": args.minutes,
        "rows": 8,
        "row_length": 768,
        "seed": args.seed,
        "eval_every": 60,
        # Evaluations without progress that end the training. With `minutes`, only time ends it. The best parameters are kept.
        "patience": 2 if not args.minutes else NEVER,
    }
    config.optim = {
        "name": "adamw",
        "lr": 1e-3 if not args.minutes else 3e-4,
        "schedule": "constant" if args.minutes else "linear",
        "warmup_steps": 10,
        "weight_decay": 0.0,
    }
    from rrl.sft.stages import with_defaults  # imports jax: only after the arguments are checked

    return with_defaults(config)
