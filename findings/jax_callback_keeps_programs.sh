#!/usr/bin/env bash
# A jitted function that calls a method of its owner through io_callback is never collected, and neither is its owner.
#
# Expected: an object that holds `jax.jit(loop)`, where `loop` calls the object's own method through `io_callback`, is a cycle of
#           Python objects. `del` and `gc.collect()` free it together with its compiled program, as they do without a callback.
# Actual:   jax 0.10.2 (November 2026): JAX's caches use the function as a weak key, but hold the traced program strongly. The
#           program holds the callback, the callback its object, and the object the function. The key therefore lives as long
#           as the value. Only `jax.clear_caches()` or the function's own `clear_cache()` frees it. A callback that holds its
#           object weakly is collected as expected. Each remaining program keeps memory maps. Linux allows a process 65,530
#           (vm.max_map_count); a process that needs more crashes inside the compiler.
# Impact:   a rollout loop that calls a search engine from inside jit is built this way: its callback is a method of the engine.
#           A notebook or a sweep that creates many engines keeps all of them, with their tokenizers, indexes and programs.
# In rrl:   `rrl.rollout.host_calls.WeakCallback`, `Engine.close`; tests/rollout/test_programs.py.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
unset PYTHONPATH
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jax==0.10.2 jaxlib==0.10.2
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY'
import gc
import pathlib
import weakref

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback


class Engine:
    """Adds one on the host from inside a jitted loop."""

    def __init__(self, callback: str, size: int) -> None:
        weak = weakref.WeakMethod(self.answer)
        shape = jax.ShapeDtypeStruct((size,), np.float32)

        def strongly(x):
            return io_callback(self.answer, shape, x)

        def weakly(x):
            return io_callback(lambda value: weak()(value), shape, x)

        ask = {"none": lambda x: x + 1, "strong": strongly, "weak": weakly}[callback]

        def loop(x):
            return jax.lax.fori_loop(0, 3, lambda _, value: ask(value), x)

        self.loop = jax.jit(loop)
        # Without a callback the function is to hold its object all the same.
        self.owner = loop.owner = self

    def answer(self, x):
        return np.asarray(x) + 1


def maps() -> int:
    return len(pathlib.Path("/proc/self/maps").read_bytes().splitlines())


def collect() -> None:
    for _ in range(3):
        gc.collect()


alive, grown = {}, {}
for callback in ("none", "weak", "strong"):
    seen, before = [], 0
    for number in range(12):
        size = 100 * (1 + number)
        x = jnp.asarray(np.zeros(size, np.float32))
        engine = Engine(callback, size)
        assert float(engine.loop(x)[0]) == 3.0
        seen.append(weakref.ref(engine))
        del engine, x
        collect()
        before = before or maps()
    alive[callback] = sum(engine() is not None for engine in seen)
    grown[callback] = maps() - before
    print(f"callback {callback}: {alive[callback]} of 12 engines alive after gc.collect(), {grown[callback]} more memory maps")
jax.clear_caches()
collect()
after = sum(engine() is not None for engine in seen)
print(f"jax {jax.__version__}: after jax.clear_caches() {after} of 12 alive")
assert alive["none"] <= 1 and alive["weak"] <= 1, "these are collected"
assert alive["strong"] == 12 and grown["strong"] > grown["weak"] + 10, "a strong callback is collected now: behaviour changed"
assert after <= 1, "clear_caches no longer lets go"
PY
echo "as described: the callback's object keeps the program, and the program the object"
