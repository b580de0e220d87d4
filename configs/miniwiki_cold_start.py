"""Stage 1 of the cold start: SFT on fixed demonstrations of a recipe's protocol, stopped early on held-out ones.

    python launch/sft.py --config=configs/miniwiki_cold_start.py:init=runs/pretrain/model --workdir=runs/cold_start
    python launch/sft.py --config=configs/miniwiki_cold_start.py:recipe=tiresrag,init=assets/miniwiki-policy \\
      --workdir=runs/tiresrag_cold_start
    python launch/sft.py --config=configs/miniwiki_cold_start.py:recipe=r3rag,init=assets/miniwiki-policy \\
      --workdir=runs/r3rag_cold_start
    python launch/sft.py --config=configs/miniwiki_cold_start.py:recipe=r2ag,init=assets/miniwiki-policy \\
      --workdir=runs/r2ag_cold_start

About 2 minutes on 2 quiet cores. The model is written to WORKDIR/model, or to out=FOLDER. There are 500 demonstrations for
R-Search and 75 to 150 for the others, whose start, `init`, is the policy that R-Search's made: after 500 there is little
left for reinforcement learning to do; `demonstrations=N` takes another number. `minutes=M` trains for so long instead, at a lower
constant rate, and keeps the parameters with the least held-out loss: the control that goes on with supervised training for as
long as reinforcement learning took.
"""

from typing import Any

from ml_collections import ConfigDict

from rrl.config.arguments import parse
from rrl.config.shared import refuse_unused_encoder

SINGLE_CONTEXT = {"max_searches": 4, "turn_tokens": 128, "observation_tokens": 256, "correction": ""}
"""One growing context; the expert is shown no correction."""
PROTOCOL_FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rsearch": ({"instruction": ""}, SINGLE_CONTEXT),
    "tiresrag": ({"opening": "bare"}, SINGLE_CONTEXT),
    "search_r1": ({"instruction": ""}, SINGLE_CONTEXT),
    "r1_searcher": ({"opening": "bare", "malformed_penalty": 0.5}, SINGLE_CONTEXT),
    "research": ({"opening": "bare"}, SINGLE_CONTEXT),
    "r3rag": ({}, {"max_steps": 5, "turn_tokens": 128}),
    "r2ag": ({}, {"opening": "bare", "turn_tokens": 192}),
}
"""Fields of each recipe and of its environment, as its config has them: without an instruction, which a policy of this size could
not follow."""


DEMONSTRATIONS = {
    "r3rag": 100,
    "tiresrag": 150,
    "r2ag": 100,
    "search_r1": 150,
    "r1_searcher": 75,
    "research": 100,
}
"""Where it is not 500."""


def get_config(arg: str = "") -> ConfigDict:
    """The config of `--config=configs/miniwiki_cold_start.py:ARG`."""
    args = parse(
        arg,
        recipe=tuple(PROTOCOL_FIELDS),
        init="runs/pretrain/model",
        out="",
        demonstrations=0,
        steps=260,
        minutes=0.0,
        seed=0,
        retriever=("scann", "bm25", "exact"),
        encoder="",
    )
    refuse_unused_encoder(args)
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
            "number": args.demonstrations or DEMONSTRATIONS.get(args.recipe, 500),
            "held_out": 100,
            "top_k": 2,
            "card_top_k": 1 if args.recipe == "r2ag" else 0,
            "recipe": args.recipe,
            "recipe_options": PROTOCOL_FIELDS[args.recipe][0],
            "environment": PROTOCOL_FIELDS[args.recipe][1],
        },
        "retriever": {
            "kind": args.retriever,
            "encoder": args.encoder or "assets/miniwiki-encoder",
            "title_weight": 3,
        },
    }
    config.train = {
        "steps": args.steps if not args.minutes else 100_000,
        "minutes": args.minutes,
        "rows": 8,
        "row_length": 768,
        "seed": args.seed,
        "eval_every": 60,
        "patience": 2 if not args.minutes else 100_000,  # time ends it; the best parameters are kept
    }
    config.optim = {
        "name": "adamw",
        "lr": 1e-3 if not args.minutes else 3e-4,
        "schedule": "constant" if args.minutes else "linear",
        "warmup_steps": 10,
        "weight_decay": 0.0,
    }
    from rrl.sft.stages import with_defaults  # imports jax: after the arguments were found right

    return with_defaults(config)
