"""Tests of the memory plan's parts."""

import pytest

from rrl.plan.programs import CompiledProgram, compiled_temporaries


@pytest.mark.parametrize("refusal", ["", "RESOURCE_EXHAUSTED: Used 26.0G of 15.7G hbm"])
def test_the_kv_cache_is_no_part_of_the_temporaries(refusal):
    rollout = CompiledProgram("rollout", temporary_bytes=26.0, refusal=refusal)
    found = compiled_temporaries([rollout, CompiledProgram("update", temporary_bytes=5.0)], cache=17.0)
    assert found == {"rollout": 9.0, "update": 5.0}
