#!/usr/bin/env bash
# XLA's CPU backend computes bfloat16 products in float32, and is slower than with float32 weights.
#
# Expected: bfloat16 weights halve the memory traffic of a decode step, so they are never slower than float32, least of all on a
#           processor with bfloat16 instructions.
# Actual:   jax 0.10.2 (November 2026, x86-64): the backend rewrites a bfloat16 product to a float32 one. In every call the
#           compiled program makes a float32 copy of the whole weight: it reads 2 bytes per weight, writes 4 and reads 4, where
#           float32 reads 4. With one row of 2,048 and a 2,048 x 2,048 weight it took four times as long as float32 on an AMD
#           EPYC that has avx512_bf16. (jax 0.12.0.1, which needs Python 3.12, made no copy there and was faster than float32
#           from 16 rows on.)
# Impact:   the published settings use bfloat16, and decoding with few rows, which is most of a rollout, is bound by reading
#           weights.
# In rrl:   rrl/models/hardware.py: `compute.dtype=auto`, the default of the large sizes, is float32 on a CPU; an explicit
#           bfloat16 is used, with a warning.
#
# The script inspects the compiled program; it measures no time. Exit code 0 while the behaviour persists, 1 otherwise.
set -euo pipefail
unset PYTHONPATH
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q 'jax==0.10.2' 'jaxlib==0.10.2' 'numpy==2.4.6'
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'END'
import re
import sys

import jax
import jax.numpy as jnp

print("jax", jax.__version__)
WIDTH = 2048
copied = {}
for dtype in (jnp.float32, jnp.bfloat16):
    rows = jax.ShapeDtypeStruct((16, WIDTH), dtype)
    weight = jax.ShapeDtypeStruct((WIDTH, WIDTH), dtype)
    program = jax.jit(lambda x, w: x @ w).lower(rows, weight).compile()
    text = program.as_text()
    copies = re.findall(rf"f32\[{WIDTH},{WIDTH}\]\S* (?:fusion|convert)\(.*", text)
    scratch = program.memory_analysis().temp_size_in_bytes
    copied[dtype.__name__] = bool(copies) and scratch >= 4 * WIDTH * WIDTH
    print(f"{dtype.__name__}: {scratch:,} bytes of scratch memory for {weight.size * dtype.dtype.itemsize:,} bytes of weights")
    for line in copies:
        print("   ", line[:100])
sys.exit(not (copied["bfloat16"] and not copied["float32"]))
END
