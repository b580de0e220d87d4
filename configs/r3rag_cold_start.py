"""R3-RAG's cold start (section 3.2): samples trajectories of a teacher, rejects wrong ones, and writes training pairs.

    python launch/cold_start.py --config=configs/r3rag_cold_start.py:data=FOLDER,model=FOLDER --workdir=runs/r3rag_data
    python launch/cold_start.py --config=configs/r3rag_cold_start.py:data=FOLDER,model=http://127.0.0.1:8000/v1,model_name=NAME
    python launch/sft.py --config=configs/r3rag_sft.py:pairs=runs/r3rag_data/pairs.jsonl,init=FOLDER
    python launch/cold_start.py --config=configs/r3rag_cold_start.py       # built-in world, the cold-started policy as teacher

Algorithm 1: each training question is sampled once at each temperature, in at most 5 steps, with the prompts of Figures 6 and 7.
Trajectories that break the format, give no answer or a wrong one are rejected. Of the trajectories of one question, duplicates
are removed and at most `keep` are kept. Algorithm 2: WORKDIR/pairs.jsonl holds a line {id, step, input, output} for each step.
WORKDIR/report.json and the printed table show how many trajectories were kept and why the others were rejected. WORKDIR/blocks
holds all trajectories. The same command continues a run that was stopped or killed.

`model` is the folder of a policy, or the http address of an OpenAI-compatible service, with `model_name`. The paper uses
DeepSeek-V3. A model that reasons first needs a service that returns its reasoning separately. The service's key is read from
OPENAI_API_KEY. An answer is correct if it contains a gold answer, or if `judge` accepts it ("oracle", a folder, or an address
with its `judge_model`); without a judge only matches count. The paper samples from 64,937 questions of HotpotQA, 2Wiki and
MuSiQue and keeps 51,254 trajectories, with E5 and whole documents.

RL must train on other questions (Appendix A). In the built-in world the questions come from other worlds than those of
`configs/r3rag_ppo.py`; with your own data, give RL another folder.
"""

import types
from typing import Any

from ml_collections import ConfigDict

from rrl.config.arguments import parse
from rrl.config.shared import refuse_unused_encoder
from rrl.errors import UserError

ARGUMENTS: dict[str, Any] = {
    "model": "runs/r3rag_cold_start/model",
    "model_name": "",
    "data": "miniwiki",
    "encoder": "",
    "retriever": "",
    "questions": int,
    "keep": 1,
    "seed": 0,
    "prompt": ("auto", "paper", "steps"),
    "judge": "",
    "judge_model": "",
}
"""Argument -> default. A tuple lists the allowed values, the default first. A type alone: no default (None)."""

TEMPERATURES = (0.1, 0.4, 0.7, 1.0)
"""Each question is sampled once at each of these."""


def get_config(arg: str = "") -> ConfigDict:
    """Return the config of `--config=configs/r3rag_cold_start.py:ARG`."""
    args = parse(arg, **ARGUMENTS)
    refuse_unused_encoder(args)
    if args.model_name and not args.model.startswith("http"):
        raise UserError(
            f"config argument model_name={args.model_name!r} names a service's model, but model={args.model!r} is a folder: give "
            "the service's address, model=http://..., or leave model_name out"
        )
    # These modules import jax, so they are imported only after the arguments have been checked.
    from rrl.rewards.judge_settings import judge_sections
    from rrl.sft.cold_start_settings import with_defaults

    real = args.data != "miniwiki"
    config = ConfigDict()
    set_teacher(config, args)
    config.recipe = {
        "name": "r3rag",
        "match": "cover" if real else "exact",
        "judge_answers": bool(args.judge),
        # Trajectories are only accepted or rejected here, which needs no process reward.
        "use_process": False,
        "short_answers": False,
    }
    config.recipe.environment = {
        "max_steps": 5,
        "turn_tokens": 512 if real else 128,  # as in RL, where a longer step counts as malformed
        "opening": opening_of(args),
        "document_characters": 0 if real else 512,
    }
    if args.judge or args.judge_model:
        config.update(judge_sections(args.judge, args.judge_model))
    questions = args.questions if args.questions is not None else (0 if real else 1000)  # 0: all
    config.sampling = {
        "questions": questions,
        "temperatures": TEMPERATURES,
        "keep": args.keep,
        "seed": args.seed,
    }
    config.rollout = {
        "rows": 64,
        "context": 8192 if real else 1024,
        "prefill_tokens": 2048 if real else 512,
        "top_k": 5 if real else 2,
    }
    config.data = {"path": args.data, "seed": 0, "held_out_per_kind": 1, "held_out_worlds": 1}
    config.retriever = {
        "kind": args.retriever or ("bm25" if real and not args.encoder else "scann"),
        "encoder": args.encoder or ("assets/miniwiki-encoder" if not real else ""),
        "title_weight": 1 if real else 3,
    }
    config.mesh = {"fsdp": -1 if real else 1}
    config.compute = {"dtype": "auto" if real else "float32"}
    return with_defaults(config)


def set_teacher(config: ConfigDict, args: types.SimpleNamespace) -> None:
    """Set the teacher: a model's folder, or a service."""
    is_service = args.model.startswith("http")
    config.model = "" if is_service else args.model
    config.endpoint = {
        "url": args.model if is_service else "",
        "model": args.model_name,
        "answer_tokens": 1024,
    }


def opening_of(args: types.SimpleNamespace) -> str:
    """Return the form of the prompt: "steps" for a policy that rrl trained with this recipe, otherwise "paper"."""
    from rrl.recipes.card import read_card

    if args.prompt != "auto":
        return args.prompt
    card = None if args.model.startswith("http") else read_card(args.model)
    return "steps" if card is not None and card.recipe == "r3rag" else "paper"
