"""Tests of rollouts do not use the shape probe's cache: they patch functions that the cache key does not cover."""

import pytest

from rrl.rollout.cpu import shape_probe


@pytest.fixture(autouse=True)
def no_probe_cache(monkeypatch):
    monkeypatch.setattr(shape_probe, "load", lambda key: None)
    monkeypatch.setattr(shape_probe, "store", lambda key, result: None)
