"""R-Search with PPO: a critic, GAE over the policy's own tokens, the KL in the reward.

    python launch/train.py --config=configs/rsearch_ppo.py                      # built-in world
    python launch/train.py --config=configs/rsearch_ppo.py:steps=2              # smoke run
    python launch/train.py --config=configs/rsearch_ppo.py:size=7b,data=FOLDER,policy=FOLDER,reader=FOLDER,encoder=FOLDER

The config extends `configs/rsearch_grpo.py` and takes its arguments. It changes only the objective, the critic and, in the
built-in world, the numbers of questions and updates. Cost in the built-in world: 54 updates took 25 minutes on one shared core.

size=3b and size=7b hold the paper's PPO (Table 4; the released values if the paper states none): k1 in the reward at 0.001,
gamma = lambda = 1, critic at 1e-5. The critic starts from the policy's weights with an output layer of 0.
"""

import importlib.util
import pathlib
import types

from ml_collections import ConfigDict

from rrl.config.shared import is_smoke, parse_run_arguments


def get_config(arg: str = "") -> ConfigDict:
    """Return the config of `--config=configs/rsearch_ppo.py:ARG`."""
    grpo = _load_sibling("rsearch_grpo")
    args, config = parse_run_arguments(arg, **grpo.ARGUMENTS), grpo.get_config(arg)
    from rrl.setup.settings import with_defaults

    # rsearch_grpo.py sets this short context only for a cold-started policy of the built-in world.
    cold_started = config.rollout.context <= 1024
    config.name = config.name.replace("rsearch_grpo", "rsearch_ppo", 1)
    config.objective.kl_estimator = "k1"
    config.objective.kl_in = "reward"
    config.objective.whiten = True
    # A group with equal rewards still trains the critic, and through it the policy.
    config.objective.drop_spread = None
    config.critic = {"warmup_steps": 0}
    config.critic_optim = {"name": "adamw", "lr": 1e-5, "b2": 0.999, "clip_norm": 1.0, "frozen": ()}
    if cold_started:
        config.objective.kl_coef = 0.05
        config.critic.warmup_steps = min(2, config.train.steps // 4)
        config.critic_optim.update({"lr": 3e-4, "frozen": ("^embedding$",)})
        # PPO needs no groups, and more questions are more informative than more samples.
        if not is_smoke(args):
            config.train.update({"questions": 128, "samples": 1})
        if args.steps is None:
            config.train.update({"steps": 54, "eval_every": 27})
    return with_defaults(config)


def _load_sibling(name: str) -> types.ModuleType:
    """Load the config file of that name in this folder. Configs are loaded by path, not as a package."""
    path = pathlib.Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
