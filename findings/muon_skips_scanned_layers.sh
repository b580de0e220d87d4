#!/usr/bin/env bash
# optax.contrib.muon silently uses Adam for the weights of scanned layers.
#
# Expected: `optax.contrib.muon` orthogonalises the weight matrices of a model with scanned layers, or reports that it cannot.
# Actual:   optax 0.2.8 with jax 0.10.2 (November 2026): only arrays with exactly two axes count as matrices. The weights of
#           scanned layers, stacked as [layers, in, out], go to Adam without a warning, with Adam's learning rate. Muon only
#           updates what lies outside the layers, such as the embedding, which it should not update.
# Impact:   JAX models scan their layers, so that a 7B model compiles in a minute. A run "with Muon" is then a run with Adam at
#           Muon's learning rate, which is about ten times too high for a policy.
# In rrl:   rrl/rl/optim.py (`matrix_dimensions`) names the axes of each kind of parameter and passes them to Muon.
#
# Exit code 0 while the behaviour persists, 1 otherwise.
set -euo pipefail
unset PYTHONPATH
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q 'optax==0.2.8' 'jax==0.10.2' 'jaxlib==0.10.2' 'numpy==2.4.6'
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'END'
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

print("optax", optax.__version__, "jax", jax.__version__)
LAYERS = 4
draw = np.random.default_rng(0)
stack = jnp.asarray(draw.normal(size=(LAYERS, 8, 8)), jnp.float32)
grads = {"scanned layers": stack, "one layer": stack[0], "embedding": jnp.asarray(draw.normal(size=(32, 8)), jnp.float32)}
params = {name: jnp.zeros_like(grad) for name, grad in grads.items()}


def first_update(**options):
    rule = optax.contrib.muon(1.0, **options)
    return rule.update(grads, rule.init(params), params)[0]


def orthogonal(matrix):
    """Singular values of an orthogonalised update lie near each other (Newton-Schulz: within 0.5 to 1.5 of a common factor)."""
    values = np.linalg.svd(np.asarray(matrix), compute_uv=False)
    return values.max() / values.min() < 5


update = first_update()
found = {
    "one layer": orthogonal(update["one layer"]),
    "embedding": orthogonal(update["embedding"]),
    "scanned layers": all(orthogonal(layer) for layer in update["scanned layers"]),
}
for name, was in found.items():
    values = np.abs(np.asarray(update[name]))
    print(f"{name:15} {str(grads[name].shape):11} orthogonalised: {was}   |update| from {values.min():.3f} to {values.max():.3f}")
# Adam's first step with Nesterov momentum: the gradient's sign times 1 + 0.9 * 0.1 / (1 - 0.9 ** 2).
first = -np.sign(np.asarray(stack)) * (1 + 0.9 * 0.1 / (1 - 0.9**2))
adam = np.allclose(np.asarray(update["scanned layers"]), first, atol=1e-3)
print("the scanned layers got Adam's first step, the sign of the gradient times 1.474:", adam)
sys.exit(not (found["one layer"] and found["embedding"] and not found["scanned layers"] and adam))
END
