"""Tests of the suggested change of a run that does not fit."""

import re

import pytest

from rrl.plan.report import report
from tests.plan.plans import STATE, made


@pytest.mark.parametrize(
    ("found", "change"),
    [
        (
            made({"rollout": STATE | {"KV cache": 16, "activations": 1}}),
            r"--config.rollout.rows=172 \(now 256\)",
        ),
        (
            made({"rollout": STATE | {"KV cache": 16, "activations": 1}}, spare=256),
            r"--config.rollout.oversubscribed_slots=88 \(now 256\)",
        ),
        (
            made({"rollout": STATE | {"KV cache": 16, "activations": 1}}, spare=64),
            r"--config.rollout.rows=212 --config.rollout.oversubscribed_slots=0 \(now 256 and 64\)",
        ),
        (
            made({"rollout": STATE | {"KV cache": 2, "activations": 16}}),
            "--config.rollout.prefill_tokens=1024",
        ),
        (
            made({"update": STATE | {"gradients": 1, "activations": 16}}, microbatch_tokens=131072),
            r"--config.objective.microbatch_tokens=65536 \(now 131072\)",
        ),
        (
            made({"critic update": STATE | {"critic": 1, "activations": 16}}, remat="dots"),
            r"--config.compute.remat=full \(now dots\)",
        ),
        (
            made({"update": STATE | {"activations": 16}}, remat="dots"),
            r"--config.compute.remat=full \(now dots\)",
        ),
        (
            made({"update": STATE | {"activations": 16}}, sizes=(1, 8, 2)),
            "--config.mesh.data=1 --config.mesh.fsdp=4 --config.mesh.tensor=4: even one row of 8192 tokens",
        ),
        (
            made({"update": STATE | {"activations": 16}}, sizes=(1, 2, 8), microbatch_tokens=16384),
            "--config.rollout.context and objective.row_lengths",
        ),
        (
            made({"update": {"parameters": 8, "optimiser state": 16, "activations": 2}}, sizes=(4, 1, 4)),
            "--config.mesh.data=1 --config.mesh.fsdp=4 --config.mesh.tensor=4: parameters and their state are stored 4 times",
        ),
        (
            made({"update": {"parameters": 8, "optimiser state": 16}}),
            r"--config.lora.rank=32 .*more chips \(about 25\)",
        ),
    ],
)
def test_the_suggested_change_reduces_the_largest_part(found, change):
    assert not found.fits
    lines = report(found).splitlines()
    assert "IT DOES NOT FIT" in lines[-2]
    assert lines[-1].startswith("change first: ")
    assert re.search(change, lines[-1]), lines[-1]
