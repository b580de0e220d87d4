"""Logits that are not finite end their episode, keep the tokens before, and change no other episode."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rrl.data.trajectory import NOT_FINITE, POLICY
from rrl.models.cpu import kernels
from rrl.models.decoder import Decoder
from rrl.parallel.mesh import make_mesh
from rrl.parallel.rules import shard
from rrl.rollout.engine import Engine
from rrl.rollout.protocol import SingleTurn
from rrl.rollout.workflow import Completion, Generate
from tests.rollout.test_engine import CONFIG, KEY, SCRIPTED, TEMPERATURES, assert_same
from tests.rollout.world import make_world


@pytest.fixture(scope="module")
def world():
    """The usual world, with untied embeddings: a NaN in the input embedding of a token reaches no logits of other tokens."""
    tied, tokenizer, retriever, requests = make_world()
    shape = dataclasses.replace(tied.config, tie_embeddings=False)
    requests = [dataclasses.replace(r, temperature=TEMPERATURES[r.seed % 5]) for r in requests]
    return Decoder(shape, rngs=nnx.Rngs(1)), tokenizer, retriever, requests


def broken(params, *tokens):
    """Return the parameters with NaN as the embeddings of some tokens."""
    flat = {
        path: leaf.replace(leaf[...].at[jnp.asarray(tokens)].set(jnp.nan)) if path == ("embedding",) else leaf
        for path, leaf in nnx.to_flat_state(params)
    }
    return nnx.from_flat_state(flat)


def length_before(trajectory, bad):
    """Return the number of tokens before the first one that is sampled after a `bad` token."""
    seen = np.cumsum(np.isin(trajectory.tokens, bad))
    after = np.flatnonzero((trajectory.roles == POLICY) & (np.concatenate([[0], seen[:-1]]) > 0))
    return after[0] if len(after) else len(trajectory.tokens)


def often_written(trajectories):
    """Return a token that occurs in about a third of the trajectories."""
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
def test_an_episode_ends_before_its_first_sample_from_nan_and_others_keep_their_bits(
    world, variant, monkeypatch
):
    decoder, tokenizer, retriever, requests = world
    if variant == "no kernel":
        monkeypatch.setattr(kernels, "can_attend", lambda *_: False)
    params, mesh = nnx.state(decoder), make_mesh(2, 2, 2) if variant == "mesh" else None
    config = dataclasses.replace(CONFIG, **VARIANTS[variant])
    engine = Engine(decoder, tokenizer, config, retriever=retriever, mesh=mesh)

    def run(params):
        placed = params if mesh is None else shard(params, mesh)
        return engine.run(placed, requests, SCRIPTED, KEY, reference=variant == "reference")

    healthy = run(params)
    assert engine.stats.not_finite == 0
    bad = often_written(healthy)
    results = run(broken(params, bad))
    lengths = [length_before(t, [bad]) for t in healthy]
    ends = [n < len(t.tokens) for n, t in zip(lengths, healthy, strict=True)]
    assert [t.ended == NOT_FINITE for t in results] == ends
    assert engine.stats.not_finite == sum(ends) and 2 < sum(ends) < len(ends) - 2
    for one, other, length in zip(results, healthy, lengths, strict=True):
        for name in ("tokens", "roles", "turns", "logps", "sampled_logps"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name)[:length])
    whole = [pair for pair, ended in zip(zip(results, healthy, strict=True), ends, strict=True) if not ended]
    assert_same(*zip(*whole, strict=True), tolerance=0)


@pytest.mark.parametrize(
    ("kernel", "truncation"),
    [
        (True, {"top_p": 0.9}),
        pytest.param(True, {"sample_top_k": 5}, marks=pytest.mark.slow),
        *(
            pytest.param(False, truncation, marks=pytest.mark.slow)
            for truncation in ({}, {"top_p": 0.9}, {"sample_top_k": 5})
        ),
    ],
)
def test_a_model_of_nan_writes_nothing_and_the_log_names_the_first_question(
    world, kernel, truncation, monkeypatch, caplog
):
    decoder, tokenizer, _, requests = world
    if not kernel:
        monkeypatch.setattr(kernels, "can_attend", lambda *_: False)
    config = dataclasses.replace(CONFIG, top_p=1.0, sample_top_k=0, rows=4)
    engine = Engine(decoder, tokenizer, dataclasses.replace(config, **truncation))
    params = jax.tree.map(lambda x: x * jnp.nan, nnx.state(decoder))
    results = engine.run(params, requests[2:7], SingleTurn(turn_tokens=8), KEY)
    assert {t.temperature for t in requests[2:7]} == set(TEMPERATURES)  # greedy, too
    for trajectory, request in zip(results, requests[2:7], strict=True):
        assert (trajectory.ended, trajectory.policy_tokens, trajectory.response) == (NOT_FINITE, 0, [])
        np.testing.assert_array_equal(trajectory.tokens, request.prompt)
    (line,) = [line for line in caplog.messages if "not finite" in line]
    assert "5 texts" in line and repr(requests[2].question.id) in line


def test_a_workflow_receives_a_text_that_ended_as_not_finite(world, caplog):
    decoder, tokenizer, _, requests = world
    engine = Engine(decoder, tokenizer, CONFIG)
    params = nnx.state(decoder)

    def flow():
        return (yield Generate(requests[0].prompt, temperature=1.0))

    def run(params):
        (results,) = engine.run_workflows(params, [flow()], Completion(turn_tokens=8), KEY)
        return results

    healthy = run(params)
    prompt = len(requests[0].prompt)
    third = int(healthy.trajectory.tokens[prompt + 2])
    results = run(broken(params, third))
    length = length_before(healthy.trajectory, [third])
    assert results.stop == results.trajectory.ended == NOT_FINITE
    assert results.trajectory.tokens.tolist() == healthy.trajectory.tokens[:length].tolist()
    assert healthy.text.startswith(results.text)
    assert [line for line in caplog.messages if "1 texts" in line and "'0.0'" in line]
