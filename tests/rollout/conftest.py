"""Tests of rollouts try sizes anew: they change what is compiled, of which what is remembered knows nothing."""

import pytest

from rrl.rollout.cpu import shape_probe as sizes


@pytest.fixture(autouse=True)
def nothing_is_remembered(monkeypatch):
    monkeypatch.setattr(sizes, "load", lambda key: None)
    monkeypatch.setattr(sizes, "store", lambda key, found: None)
