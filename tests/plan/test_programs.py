"""Tests of compiled programs."""

import dataclasses

import jax
import jax.numpy as jnp

from rrl.parallel.topology import CHIPS, GIB, Topology
from rrl.plan import programs
from rrl.plan.programs import CompiledProgram
from rrl.plan.report import report
from rrl.setup.shapes import replicated
from tests.plan.plans import STATE, made


def test_a_program_that_is_too_large_to_compile_is_reported():
    class Refuses:
        def lower(self, *shapes):
            return self

        def compile(self):
            raise jax.errors.JaxRuntimeError(
                "RESOURCE_EXHAUSTED: the total memory required for HLO temporaries (26.00G) exceeds 15.75G"
            )

    mesh = Topology("cpu:8", CHIPS["cpu"], 8, tuple(jax.devices())).mesh(1, 8, 1)
    shapes = (replicated((2**20,), jnp.float32, mesh),)
    program = programs._compile("update", Refuses(), shapes, mesh)
    assert program.argument_bytes + program.temporary_bytes == 26 * GIB
    assert "(26.00G)" in program.refusal
    refused = dataclasses.replace(made({"update": STATE | {"activations": 16}}), programs=[program])
    assert "the compiler refused it" in report(refused)
    assert isinstance(program, CompiledProgram)
