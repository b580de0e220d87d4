#!/usr/bin/env bash
# A copy of a policy made by nnx.split and nnx.merge changes with the policy: as the reference model, it makes every KL 0.
#
# Expected: `nnx.merge(*nnx.split(policy))` makes a second model, as in flax 0.10, whose variables do not change when an update
#           changes the policy. Such a line makes the frozen reference of PPO and GRPO, or the old policy of an importance ratio.
# Actual:   flax 0.12.8 with jax 0.10.2 (November 2026): both models hold the same variables. An update of the policy updates the
#           "reference" too. In flax 0.10.7 the same line makes a copy. `nnx.clone` makes a copy in both.
# Impact:   The KL penalty is exactly 0 in every step, so the policy drifts without a bound, and no error or metric shows it:
#           a KL of 0 looks like a policy that stays near its reference. Importance ratios are exactly 1, so clipping does nothing.
# In rrl:   rrl/train/learner.py copies the arrays of the reference; tests copy models with `nnx.clone`.
#
# Exit code 0 while the behaviour persists, 1 otherwise.
set -euo pipefail
unset PYTHONPATH
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cat >"$folder/reference.py" <<'END'
import sys
from importlib.metadata import version

import jax
import jax.numpy as jnp
from flax import nnx

policy = nnx.Linear(8, 5, rngs=nnx.Rngs(0))
references = {"merge(*split(policy))": nnx.merge(*nnx.split(policy)), "clone(policy)": nnx.clone(policy)}
tokens, hidden = jnp.array([1, 3]), jax.random.normal(jax.random.key(1), (2, 8))


def kl(reference):
    """KL(policy || reference), averaged over two states."""
    ours, theirs = (jax.nn.log_softmax(model(hidden)) for model in (policy, reference))
    return float((jnp.exp(ours) * (ours - theirs)).sum(-1).mean())


def loss(model):
    return -jax.nn.log_softmax(model(hidden))[jnp.arange(2), tokens].mean()


before = float(loss(policy))
for _ in range(3):
    step = jax.tree.map(lambda weight, grad: weight - 0.5 * grad, nnx.state(policy), nnx.grad(loss)(policy))
    nnx.update(policy, step)
found = {name: kl(reference) for name, reference in references.items()}
print("flax", version("flax"), f"loss {before:.3f} -> {float(loss(policy)):.3f};", end=" ")
print("; ".join(f"KL to {name}: {value:.4f}" for name, value in found.items()))
merged, cloned = found.values()
shared = sys.argv[1] == "shared"
sys.exit(not (cloned > 0.01 and (merged == 0 if shared else merged == cloned)))
END
run() {  # expectation, packages
  "${PYTHON:-python3}" -m venv "$folder/$1"
  "$folder/$1/bin/pip" install -q "${@:2}"
  JAX_PLATFORMS=cpu "$folder/$1/bin/python" "$folder/reference.py" "$1"
}
run shared 'flax==0.12.8' 'jax==0.10.2' 'jaxlib==0.10.2' 'numpy==2.4.6'
run copied 'flax==0.10.7' 'jax==0.6.2' 'jaxlib==0.6.2' 'numpy==2.2.6'
