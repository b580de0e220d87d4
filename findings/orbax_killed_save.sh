#!/usr/bin/env bash
# Orbax keeps the files of a killed save, and treats any numbered folder as a step.
#
# Expected: after a save was killed, the next CheckpointManager removes the incomplete files, and `latest_step` is the newest
#           readable step.
# Actual:   orbax-checkpoint 0.12.8 with jax 0.10.2 (November 2026): the temporary folder of the killed save stays, with its
#           files, at each start and after each later save, unless `cleanup_tmp_directories=True` is set (which removes it in
#           the background). Any folder whose name is a number counts as a step, even without the commit marker that Orbax
#           itself writes last (commit_success.txt), and without the state: `latest_step` names it, and restoring it raises.
# Impact:   RL runs are preempted often and save often. A disk fills with incomplete checkpoints of tens of GB. A run whose
#           newest folder was copied or deleted in part does not start, although the previous step is complete.
# In rrl:   rrl/runs/checkpoint_folder.py removes the temporary folders at the start and uses only folders with a commit marker.
set -euo pipefail
unset PYTHONPATH
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q orbax-checkpoint==0.12.8 tensorstore==0.1.86 jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
cat >"$folder/killed.py" <<'PY'
"""Saves step 1 whole and ends the process in the background save of step 2, as a kill does."""

import os
import sys

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from orbax.checkpoint import type_handlers

state = {"w": jnp.ones((512, 512))}
manager = ocp.CheckpointManager(sys.argv[1])
manager.save(1, args=ocp.args.StandardSave(state))
manager.wait_until_finished()


class Killed(type_handlers.ArrayHandler):
    async def serialize(self, *args, **kwargs):
        futures = await super().serialize(*args, **kwargs)
        for future in futures:
            future.result()
        os._exit(9)


manager.close()
type_handlers.register_type_handler(jax.Array, Killed(), override=True)
manager = ocp.CheckpointManager(sys.argv[1])
manager.save(2, args=ocp.args.StandardSave(state))
manager.wait_until_finished()
PY
cat >"$folder/look.py" <<'PY'
import pathlib
import shutil
import sys
import time

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

steps = pathlib.Path(sys.argv[1])
state = {"w": jnp.ones((512, 512))}


def temporary():
    return sorted(path.name for path in steps.glob("*.orbax-checkpoint-tmp*"))


def size(path):
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


print("jax", jax.__version__, "orbax-checkpoint", ocp.__version__)
for name in temporary():
    print(f"left by the killed save: {name}, {size(steps / name):,} bytes")
assert temporary(), "the killed save has left nothing"
with ocp.CheckpointManager(steps) as manager:
    assert manager.latest_step() == 1
    manager.save(3, args=ocp.args.StandardSave(state))
print("after another start and another save:", temporary())
stays = bool(temporary())

shutil.copytree(steps / "3", steps / "4")
(steps / "4" / "commit_success.txt").unlink()
shutil.rmtree(steps / "4" / "default")
with ocp.CheckpointManager(steps, options=ocp.CheckpointManagerOptions(cleanup_tmp_directories=True)) as manager:
    for _ in range(100):  # it removes them in the background
        if temporary():
            time.sleep(0.1)
    print("with cleanup_tmp_directories:", temporary())
    removed = not temporary()
    latest = manager.latest_step()
    print("steps", manager.all_steps(), "latest", latest, "files of 4:", sorted(path.name for path in (steps / "4").iterdir()))
    try:
        manager.restore(latest, args=ocp.args.StandardRestore(state))
        restored = True
    except Exception as error:
        restored = False
        print(f"restoring step {latest}: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
assert stays, "the temporary folder is removed without being asked: behaviour changed"
assert removed, "cleanup_tmp_directories does not remove it: behaviour changed"
assert latest == 4 and not restored, "a folder without the commit marker is no step any more: behaviour changed"
PY
export JAX_PLATFORMS=cpu
code=0
"$folder/venv/bin/python" "$folder/killed.py" "$folder/steps" 2>/dev/null || code=$?
test "$code" = 9
"$folder/venv/bin/python" "$folder/look.py" "$folder/steps" 2>"$folder/errors" || { cat "$folder/errors"; exit 1; }
echo "as described: the temporary folder stays, and a numbered folder without a commit marker is the latest step"
