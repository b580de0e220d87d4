"""Configs of runs that a test kills: --config=killed_config.py:NAME,FOLDER.

NAME is grpo, ppo or sft; FOLDER holds the policy.
"""

from ml_collections import ConfigDict

from tests.train import made


def get_config(arg: str) -> ConfigDict:
    """Return a config with twelve steps, a checkpoint after each and an evaluation after every second."""
    name, _, folder = arg.partition(",")
    if name == "sft":
        config = made.config("miniwiki_cold_start", f"steps=12,demonstrations=5,retriever=bm25,init={folder}")
        made.shrink_cold_start(config)
        config.data.world_size = 50
        config.train.log_every = 1
    else:
        config = made.shrink_run(made.config(f"rsearch_{name}", f"steps=12,policy={folder}"))
        config.data.world_size = 50
        config.retriever.update({"kind": "bm25", "encoder": ""})
        config.reader = ""
        config.optim.lr = 1e-2
        config.objective.entropy_coef = 0.1  # gives a gradient although a random policy gets no reward
    config.train.update({"eval_every": 2, "checkpoint_every": 1})
    return config
