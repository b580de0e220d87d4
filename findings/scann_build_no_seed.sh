#!/usr/bin/env bash
# One would guess: ScaNN built twice over the same vectors with the same settings is the same index, since nothing in its
#   builder asks for a seed.
# What happens (scann 1.4.2, November 2026): the tree's training draws its centres from an unseeded generator. Two builds give
#   another first five for several queries of a hundred, in one process or in two; `score_brute_force` does not differ.
# Why it matters to search-agent RL: a run that is preempted and resumed builds its index again, its policy reads other passages,
#   and the run is no longer the one that was stopped; two arms of a comparison search two different indexes.
# What rrl does: rrl/retrieval/index.py (`stored_retriever`) builds the index of 20,000 passages or more once, in the workdir, and
#   opens it at every later start.
# Exits with 0 while this is so, with 1 where two builds agree.
set -euo pipefail
unset PYTHONPATH
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q 'scann==1.4.2' 'numpy==2.4.6'
"$folder/venv/bin/python" - <<'END' 2>/dev/null
import importlib.metadata
import sys

import numpy as np
from scann import scann_ops_pybind as scann

draw = np.random.default_rng(0)


def unit(x):
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


centres = draw.normal(size=(1000, 128))
vectors = unit(centres[draw.integers(0, 1000, 25_000)] + 0.7 * draw.normal(size=(25_000, 128)))
queries = unit(vectors[draw.integers(0, 25_000, 2000)] + 0.05 * draw.normal(size=(2000, 128)))


def tree():
    builder = scann.builder(vectors, 10, "dot_product")
    builder = builder.tree(num_leaves=316, num_leaves_to_search=15, training_sample_size=25_000)
    return builder.score_ah(2, anisotropic_quantization_threshold=0.2).reorder(100).build()


def brute_force():
    return scann.builder(vectors, 10, "dot_product").score_brute_force().build()


print("scann", importlib.metadata.version("scann"))
share = {}
for make in (tree, brute_force):
    one, two = (make().search_batched(queries, 5)[0] for _ in range(2))
    share[make.__name__] = (one != two).any(axis=1).mean()
    print(f"{make.__name__}: {100 * share[make.__name__]:.1f} % of 2,000 queries find other passages after a second build")
sys.exit(not (share["tree"] > 0.01 and share["brute_force"] == 0))
END
