#!/usr/bin/env bash
# One would guess: bfloat16 weights halve the memory that a decode step reads, so that they are never slower than float32, and
#   surely not on a processor with bfloat16 instructions.
# What happens (jax 0.10.2, November 2026, x86-64): XLA's CPU backend rewrites a bfloat16 product to a float32 one. The compiled
#   program makes a float32 copy of the whole weight, again at every call: it reads 2 bytes, writes 4 and reads 4 a weight, where
#   float32 reads 4. With one row of 2,048 and 2,048 x 2,048 weights it took four times as long as float32 on an AMD EPYC that has
#   avx512_bf16. (jax 0.12.0.1, which needs Python 3.12, made no copy there and was faster than float32 from 16 rows on.)
# Why it matters to search-agent RL: the published settings say bfloat16, and decoding with few rows, which is most of a rollout,
#   is bound by reading weights.
# What rrl does: rrl/models/hardware.py: `compute.dtype=auto`, which the large sizes have, is float32 on a CPU; bfloat16 by name is
#   done, with a warning.
# Looks at the compiled program, not at seconds. Exits with 0 while this is so, with 1 otherwise.
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
