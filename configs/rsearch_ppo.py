"""R-Search with PPO: a critic, GAE over the policy's own tokens, the KL in the reward.

    python launch/train.py --config=configs/rsearch_ppo.py                      # built-in world
    python launch/train.py --config=configs/rsearch_ppo.py:steps=2              # smoke run
    python launch/train.py --config=configs/rsearch_ppo.py:size=7b,data=FOLDER,policy=FOLDER,reader=FOLDER,encoder=FOLDER

Everything but the objective, the critic and, in the built-in world, the numbers of questions and updates is that of
`configs/rsearch_grpo.py`, whose arguments it takes. There 54 updates took 25 minutes of one shared core. size=3b and
size=7b hold the paper's PPO (Table 4; released values where it is silent): k1 in the reward at 0.001, gamma = lambda = 1,
critic at 1e-5. The critic starts from the policy's weights with an output of 0.
"""

import importlib.util
import pathlib
import types

from ml_collections import ConfigDict

from rrl.config.shared import is_smoke, parse_run


def get_config(arg: str = "") -> ConfigDict:
    """The config of `--config=configs/rsearch_ppo.py:ARG`."""
    grpo = _load_sibling("rsearch_grpo")
    args, config = parse_run(arg, **grpo.ARGUMENTS), grpo.get_config(arg)
    from rrl.train.experiment import with_defaults

    # The built-in world's cold-started policy, as rsearch_grpo.py knows it.
    ours = config.rollout.context <= 1024
    config.name = config.name.replace("rsearch_grpo", "rsearch_ppo", 1)
    config.objective.kl_estimator = "k1"
    config.objective.kl_in = "reward"
    config.objective.whiten = True
    # A group without spread still teaches the critic, and through it the policy.
    config.objective.drop_spread = None
    config.critic = {"warmup_steps": 0}
    config.critic_optim = {"name": "adamw", "lr": 1e-5, "b2": 0.999, "clip_norm": 1.0, "frozen": ()}
    if ours:
        config.objective.kl_coef = 0.05
        config.critic.warmup_steps = min(2, config.train.steps // 4)
        config.critic_optim.update({"lr": 3e-4, "frozen": ("^embedding$",)})
        if not is_smoke(args):  # no group is needed: other questions tell more than other answers to the same
            config.train.update({"questions": 128, "samples": 1})
        if args.steps is None:
            config.train.update({"steps": 54, "eval_every": 27})
    return with_defaults(config)


def _load_sibling(name: str) -> types.ModuleType:
    """The config file of that name beside this one; configs are loaded by path, not as a package."""
    path = pathlib.Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
