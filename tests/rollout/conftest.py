"""Fixtures of the tests of rollouts. No test uses the shape probe's cache: they patch functions that its key does not cover."""

import dataclasses

import jax.numpy as jnp
import pytest

from rrl.models.cpu.layers import can_attend
from rrl.rollout.cpu import shape_probe
from rrl.rollout.engine import Engine
from tests.rollout.scripted import CONFIG, TEMPERATURES
from tests.rollout.world import make_world


@pytest.fixture(autouse=True)
def no_probe_cache(monkeypatch):
    monkeypatch.setattr(shape_probe, "load", lambda key: None)
    monkeypatch.setattr(shape_probe, "store", lambda key, result: None)


@pytest.fixture(scope="module")
def world():
    """Return `make_world` with requests at several temperatures."""
    *others, requests = make_world()
    return *others, [dataclasses.replace(r, temperature=TEMPERATURES[r.seed % 5]) for r in requests]


@pytest.fixture(scope="module")
def engine(world):
    """Return an engine of the world, with `CONFIG`."""
    decoder, tokenizer, retriever, _ = world
    return Engine(decoder, tokenizer, CONFIG, retriever=retriever)


@pytest.fixture(scope="session")
def size_tolerance():
    """Tolerance of log-probabilities between engines of different sizes: 0 with the CPU kernel, whose results do not depend on
    sizes."""
    return 0.0 if can_attend(jnp.float32, 16) else 1e-5
