"""Saves batches whose gradient was not finite, for debugging."""

import json
import pathlib
from collections.abc import Sequence

import jax
import numpy as np

from rrl.data.trajectory import Trajectory
from rrl.rl.update import Advantages

MAX_FILES = 5
"""Largest number of batches in a folder, so that a run that never recovers does not fill the disk."""


def dump_batch(
    folder: str | pathlib.Path, step: int, trajectories: Sequence[Trajectory], advantages: Advantages
) -> pathlib.Path | None:
    """Write the trajectories and advantages of an update to `folder/step_N.npz`.

    The file has arrays over the concatenated tokens of all trajectories: tokens, roles, logps, sampled_logps and turns (see
    `Trajectory`), rewards (`Trajectory.token_rewards`) and advantages. It also has lengths (tokens of each trajectory) and
    `about`, a JSON list with one object per trajectory: id and text of its question, and the fields request, group, ended, cuts,
    starts, rewards and segments of `Trajectory`.

    Returns:
        The file; None if the folder already has `MAX_FILES` files, and in every process except the first.
    """
    if jax.process_index() != 0:
        return None
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"step_{step:06d}.npz"
    if len(list(folder.glob("step_*.npz"))) >= MAX_FILES:
        return None
    token_advantages = [
        np.broadcast_to(np.asarray(a, np.float32), len(t.tokens))
        for a, t in zip(advantages, trajectories, strict=True)
    ]
    about = [
        {
            "id": t.question.id,
            "question": t.question.text,
            "request": t.request,
            "group": t.group,
            "ended": t.ended,
            "cuts": t.cuts,
            "starts": [int(start) for start in t.starts],
            "rewards": t.rewards,
            "segments": [[role, text] for role, text in t.segments],
        }
        for t in trajectories
    ]
    np.savez_compressed(
        file,
        tokens=np.concatenate([t.tokens for t in trajectories]),
        roles=np.concatenate([t.roles for t in trajectories]),
        logps=np.concatenate([t.logps for t in trajectories]),
        sampled_logps=np.concatenate([t.sampled_logps for t in trajectories]),
        turns=np.concatenate([t.turns for t in trajectories]),
        rewards=np.concatenate([t.token_rewards for t in trajectories]),
        advantages=np.concatenate(token_advantages),
        lengths=np.array([len(t.tokens) for t in trajectories]),
        about=np.array(json.dumps(about)),
    )
    return file
