"""Rows whose logits are not finite: they end there, with what they wrote before, and no other row notices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rrl.data.trajectory import NOT_FINITE, POLICY
from rrl.models.decoder import Decoder
from rrl.parallel.mesh import make_mesh
from rrl.parallel.rules import shard
from rrl.rollout import loop
from rrl.rollout.engine import Engine
from rrl.rollout.protocol import SingleTurn
from rrl.rollout.workflow import Completion, Generate
from tests.rollout.test_engine import CONFIG, ENVIRONMENT_, KEY, TEMPERATURES, same
from tests.rollout.world import make_world


@pytest.fixture(scope="module")
def world():
    """The usual one, with a table of its own for logits: a NaN in the embedding of a token reaches no other token's logits."""
    tied, tokenizer, retriever, requests = make_world()
    shape = dataclasses.replace(tied.config, tie_embeddings=False)
    requests = [dataclasses.replace(r, temperature=TEMPERATURES[r.seed % 5]) for r in requests]
    return Decoder(shape, rngs=nnx.Rngs(1)), tokenizer, retriever, requests


def broken(params, *tokens):
    """The parameters with NaN as the embedding of these tokens."""
    flat = {
        path: leaf.replace(leaf[...].at[jnp.asarray(tokens)].set(jnp.nan)) if path == ("embedding",) else leaf
        for path, leaf in nnx.to_flat_state(params)
    }
    return nnx.from_flat_state(flat)


def cut(trajectory, bad):
    """How many tokens of a healthy trajectory are left where a token is bad: all before the first draw that sees it."""
    seen = np.cumsum(np.isin(trajectory.tokens, bad))
    after = np.flatnonzero((trajectory.roles == POLICY) & (np.concatenate([[0], seen[:-1]]) > 0))
    return after[0] if len(after) else len(trajectory.tokens)


def often_written(trajectories):
    """A token that about a third of the trajectories have, and how many."""
    counts = np.zeros(416, int)
    for trajectory in trajectories:
        counts[np.unique(trajectory.tokens[trajectory.roles == POLICY])] += 1
    return int(np.argmin(np.abs(counts - len(trajectories) / 3)))


VARIANTS = {
    "kernel": {},
    "drafts": {"draft_tokens": 2},
    "reference": {},
    "no kernel": {},
    "workers": {"workers": 2, "rows": 16},
    "mesh": {},
}


@pytest.mark.parametrize(
    "variant",
    [
        "drafts",
        *(pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS if name != "drafts"),
    ],
)
def test_a_row_ends_before_its_first_draw_from_nan_and_others_keep_their_bits(world, variant, monkeypatch):
    decoder, tokenizer, retriever, requests = world
    if variant == "no kernel":
        monkeypatch.setattr(loop, "can_attend", lambda *_: False)
    params, mesh = nnx.state(decoder), make_mesh(2, 2, 2) if variant == "mesh" else None
    config = dataclasses.replace(CONFIG, **VARIANTS[variant])
    engine = Engine(decoder, tokenizer, config, retriever=retriever, mesh=mesh)

    def run(params):
        placed = params if mesh is None else shard(params, mesh)
        return engine.run(placed, requests, ENVIRONMENT_, KEY, reference=variant == "reference")

    healthy = run(params)
    assert engine.stats.not_finite == 0
    bad = often_written(healthy)
    found = run(broken(params, bad))
    lengths = [cut(t, [bad]) for t in healthy]
    ends = [n < len(t.tokens) for n, t in zip(lengths, healthy, strict=True)]
    assert [t.ended == NOT_FINITE for t in found] == ends
    assert engine.stats.not_finite == sum(ends) and 2 < sum(ends) < len(ends) - 2
    for one, other, length in zip(found, healthy, lengths, strict=True):
        for name in ("tokens", "roles", "turns", "logps", "sampled_logps"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name)[:length])
    whole = [pair for pair, ended in zip(zip(found, healthy, strict=True), ends, strict=True) if not ended]
    same(*zip(*whole, strict=True), tolerance=0)


@pytest.mark.parametrize(
    ("kernel", "kept"),
    [
        (True, {"top_p": 0.9}),
        pytest.param(True, {"sample_top_k": 5}, marks=pytest.mark.slow),
        *(
            pytest.param(False, kept, marks=pytest.mark.slow)
            for kept in ({}, {"top_p": 0.9}, {"sample_top_k": 5})
        ),
    ],
)
def test_a_model_of_nan_writes_nothing_and_is_named_in_the_log(world, kernel, kept, monkeypatch, caplog):
    decoder, tokenizer, _, requests = world
    if not kernel:
        monkeypatch.setattr(loop, "can_attend", lambda *_: False)
    config = dataclasses.replace(CONFIG, top_p=1.0, sample_top_k=0, rows=4)
    engine = Engine(decoder, tokenizer, dataclasses.replace(config, **kept))
    params = jax.tree.map(lambda x: x * jnp.nan, nnx.state(decoder))
    found = engine.run(params, requests[2:7], SingleTurn(turn_tokens=8), KEY)
    assert {t.temperature for t in requests[2:7]} == set(TEMPERATURES)  # greedy, too
    for trajectory, request in zip(found, requests[2:7], strict=True):
        assert (trajectory.ended, trajectory.policy_tokens, trajectory.response) == (NOT_FINITE, 0, [])
        np.testing.assert_array_equal(trajectory.tokens, request.prompt)
    (line,) = [line for line in caplog.messages if "not finite" in line]
    assert "5 texts" in line and repr(requests[2].question.id) in line


def test_a_workflow_gets_a_text_that_ended_as_not_finite(world, caplog):
    decoder, tokenizer, _, requests = world
    engine = Engine(decoder, tokenizer, CONFIG)
    params = nnx.state(decoder)

    def flow():
        return (yield Generate(requests[0].prompt, temperature=1.0))

    def run(params):
        (found,) = engine.run_workflows(params, [flow()], Completion(turn_tokens=8), KEY)
        return found

    healthy = run(params)
    prompt = len(requests[0].prompt)
    third = int(healthy.trajectory.tokens[prompt + 2])
    found = run(broken(params, third))
    length = cut(healthy.trajectory, [third])
    assert found.stop == found.trajectory.ended == NOT_FINITE
    assert found.trajectory.tokens.tolist() == healthy.trajectory.tokens[:length].tolist()
    assert healthy.text.startswith(found.text)
    assert [line for line in caplog.messages if "1 texts" in line and "'0.0'" in line]
