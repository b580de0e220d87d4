"""Prefix trees: each token sees exactly its context, and sharing a prefix does not change the update."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rrl.data.questions import Question
from rrl.data.trajectory import POLICY, PROMPT, Trajectory
from rrl.errors import UserError
from rrl.models.config import DecoderConfig
from rrl.models.decoder import Decoder
from rrl.models.heads import ValueModel
from rrl.parallel.mesh import use_mesh
from rrl.rl.critic import CriticConfig, make_critic
from rrl.rl.minibatches import packed_token_counts
from rrl.rl.objective import ObjectiveConfig
from rrl.rl.optim import OptimConfig, init_optimizer, make_optimizer, split_trained
from rrl.rl.packing import pack_trajectories, packed_sequences
from rrl.rl.prefix_tree import prefix_trees
from rrl.rl.update import Updater

SHAPE = DecoderConfig(vocab_size=53, hidden=16, layers=2, heads=2, kv_heads=1, head_dim=8, mlp=24)
APART = ObjectiveConfig(row_lengths=(96,), microbatch_tokens=192, kl_coef=0.1)
SHARED = dataclasses.replace(APART, share_prefixes=True)
SGD = OptimConfig(name="sgd", lr=0.1, b1=0.0, clip_norm=None, total_steps=10)
TAIL = 52
"""Last token of each prompt, like a chat template's; so no prompt is a prefix of the next one."""


def episode(seed, steps, outputs=5, passages=9):
    """Each step's prompt is the question, all earlier outputs and passages, and the tail."""
    draws = np.random.default_rng(seed)
    history = draws.integers(0, TAIL, 6)
    tokens, roles, starts = [], [], []
    for _ in range(steps):
        starts.append(sum(map(len, tokens)))
        wrote = draws.integers(0, TAIL, outputs)
        tokens += [history, [TAIL], wrote]
        roles += [[PROMPT] * (len(history) + 1), [POLICY] * outputs]
        history = np.concatenate([history, wrote, draws.integers(0, TAIL, passages)])
    return made(seed, np.concatenate(tokens), np.concatenate(roles), tuple(starts))


def made(seed, tokens, roles, starts):
    own = roles == POLICY
    logps = np.where(own, -np.random.default_rng(seed).random(len(tokens)) - 3, 0).astype(np.float32)
    turns = np.searchsorted(starts, np.arange(len(tokens)), side="right") - 1
    question = Question("q", "", ("a",))
    return Trajectory(
        question,
        seed,
        seed,
        tokens.astype(np.int32),
        roles,
        logps,
        logps,
        turns,
        [],
        [],
        "answer",
        starts,
        rewards={"total": float(seed)},
        turn_rewards={turn: float(seed + turn) for turn in range(len(starts))},
    )


EPISODES = [episode(seed, steps) for seed, steps in enumerate((1, 2, 4, 3))]


def seen(tokens, tree, column):
    """The tokens that a column attends to, by the mask, and their positions."""
    branch = tree.branches[column]
    left = [c for c in range(column + 1) if tree.branches[c] in (0, branch)]
    return tokens[tree.column_token_indices[left]].tolist(), tree.positions[left].tolist()


def group(seed, samples, outputs, prompt=12):
    """Samples of one prompt, with different lengths."""
    draws = np.random.default_rng(seed)
    prompt_tokens = np.concatenate([draws.integers(0, TAIL, prompt - 1), [TAIL]])
    found = []
    for place in range(samples):
        wrote = draws.integers(0, TAIL, outputs + place)
        roles = np.array([PROMPT] * prompt + [POLICY] * len(wrote))
        one = made(seed + place, np.concatenate([prompt_tokens, wrote]), roles, (0,))
        found.append(dataclasses.replace(one, group=seed))
    return found


BATCHES = [[episode] for episode in EPISODES] + [
    EPISODES,
    group(5, 4, 6),
    [*group(5, 3, 6), *EPISODES[:3], *group(6, 2, 3)],
    [one for pair in zip(group(5, 3, 6), group(6, 3, 6)) for one in pair],
    [*group(5, 2, 6), dataclasses.replace(EPISODES[2], group=5)],
]


@pytest.mark.parametrize("longest", [1000, 60, 45])
@pytest.mark.parametrize("trajectories", BATCHES)
def test_each_token_sees_exactly_its_context_up_to_itself(trajectories, longest):
    found = prefix_trees(trajectories, longest)
    all_tokens = np.concatenate([t.tokens for t in trajectories])
    where = {}
    for tree in found:
        assert len(tree.column_token_indices) <= max(longest, 54)  # the longest context has 54 tokens
        for token, column in zip(tree.context_token_indices, tree.context_columns, strict=True):
            assert int(token) not in where
            where[int(token)] = (tree, int(column))
    assert sorted(where) == list(range(len(all_tokens)))
    first = 0
    for trajectory in trajectories:
        for part in trajectory.contexts:
            for token in range(part.start, part.stop):
                tree, column = where[first + token]
                tokens, positions = seen(all_tokens, tree, column)
                assert tokens == trajectory.tokens[part.start : token + 1].tolist()
                assert positions == list(range(token - part.start + 1))
                if (
                    trajectory.roles[token] == POLICY
                ):  # has its own column and is predicted from the column to its left
                    assert tree.column_token_indices[column] == first + token
                    assert all_tokens[tree.column_token_indices[column - 1]] == trajectory.tokens[token - 1]
                    assert seen(all_tokens, tree, column - 1)[0] == tokens[:-1]
        first += len(trajectory.tokens)


def test_a_common_prefix_is_packed_once():
    three = EPISODES[3]  # 12, 26 and 40 tokens
    (tree,) = prefix_trees([three], 1000)
    assert len(tree.column_token_indices) == 40 + 6 + 6  # the first two contexts add the tail and the output
    assert [len(tree.column_token_indices) for tree in prefix_trees([three], 46)] == [
        46,
        26,
    ]  # room for one branch
    assert [len(tree.column_token_indices) for tree in packed_sequences([three], APART)] == [12, 26, 40]


def test_the_samples_of_a_group_share_their_prompt():
    four = group(5, 4, 6)  # 12 + 6, 7, 8 and 9 tokens
    (tree,) = prefix_trees(four, 1000)
    assert (
        len(tree.column_token_indices) == 11 + 4 + 6 + 7 + 8 + 9
    )  # each sample keeps its own copy of the prompt's last token
    assert [len(tree.column_token_indices) for tree in prefix_trees(four, 29)] == [21 + 7, 20 + 8]
    assert [len(tree.column_token_indices) for tree in packed_sequences(four, APART)] == [18, 19, 20, 21]
    other = [*four[:2], *group(6, 2, 6)]
    assert [len(tree.column_token_indices) for tree in prefix_trees(other, 1000)] == [19 + 7, 19 + 7]
    assert packed_token_counts(four, SHARED).tolist() == [7, 8, 9, 21]


def test_contexts_without_a_common_prefix_are_packed_separately():
    draws = np.random.default_rng(0)
    tokens = np.concatenate([[1], draws.integers(0, TAIL, 9), [2], draws.integers(0, TAIL, 5)])
    roles = np.array([PROMPT] * 4 + [POLICY] * 6 + [PROMPT] * 2 + [POLICY] * 4)
    assert [
        len(tree.column_token_indices) for tree in prefix_trees([made(0, tokens, roles, (0, 10))], 99)
    ] == [
        10,
        6,
    ]


def test_two_answers_to_the_same_prompt_are_both_kept():
    roles = np.array([PROMPT] * 4 + [POLICY] * 3)
    one = episode(7, 1).tokens[:7]
    other = np.concatenate([one[:4], one[4:] + 1])
    twice = made(0, np.concatenate([one, other]), np.concatenate([roles, roles]), (0, 7))
    (tree,) = prefix_trees([twice], 99)
    assert tree.branches.tolist() == [
        0,
        0,
        0,
        1,
        1,
        1,
        1,
        0,
        0,
        0,
        0,
    ]  # the token before an answer is not shared


def decoder(attention):
    return Decoder(SHAPE, rngs=nnx.Rngs(0), attention=attention)


MIXED = [*group(5, 3, 6)[:2], *EPISODES[:2], *group(5, 3, 6)[2:], EPISODES[2]]


@pytest.mark.parametrize("trajectories", [EPISODES, MIXED], ids=["episodes", "groups"])
@pytest.mark.parametrize("attention", ["xla", "blocks"])
def test_sharing_prefixes_changes_neither_log_probabilities_nor_the_step(attention, trajectories):
    graph, params, fixed = split_trained(decoder(attention))
    advantages = np.array([0.5, -1.0, 1.0, 0.3, 0.8, -0.2], np.float32)[: len(trajectories)]
    found = []
    for objective in (APART, SHARED):
        optimizer = make_optimizer(SGD)
        updater = Updater(graph, optimizer, objective)
        logps = updater.logps(params, fixed, trajectories)["logp"]
        own = [jax.tree.map(jnp.copy, params) for _ in range(2)]
        state = init_optimizer(optimizer, own[0], None)
        new, _, metrics = updater(own[0], state, own[1], fixed, trajectories, advantages)
        found.append((logps, new, metrics))
    (logps, new, metrics), (shared, moved, shared_metrics) = found
    for t, one, other in zip(trajectories, logps, shared, strict=True):
        np.testing.assert_allclose(one[t.roles == POLICY], other[t.roles == POLICY], atol=2e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), new, moved)
    for name, value in metrics.items():
        np.testing.assert_allclose(shared_metrics[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("across", [False, True])
def test_sharing_prefixes_changes_neither_values_nor_the_critics_update(across):
    found = []
    for objective in (APART, SHARED):
        model = ValueModel(SHAPE, rngs=nnx.Rngs(0))
        model.score[...] = jnp.ones_like(model.score[...])
        config = CriticConfig(SGD, gae_lambda=0.9, across_contexts=across)
        critic, state = make_critic(model, config, objective)
        estimate = critic.estimate(state, EPISODES)
        found.append((estimate, *critic.update(state, EPISODES, estimate)))
    (separate, (params, _), metrics), (shared, (moved, _), shared_metrics) = found
    for name in ("values", "returns", "advantages"):
        for one, other in zip(getattr(separate, name), getattr(shared, name), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5, err_msg=name)
    # Some parameters are as large as 8, and CPUs with AVX-512 sum in another order.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), params, moved)
    np.testing.assert_allclose(shared_metrics["explained_variance"], metrics["explained_variance"], atol=1e-4)


def test_shared_prefixes_need_fewer_tokens_and_splash_refuses_them():
    used = [
        sum(int((batch.segment_ids > 0).sum()) for batch in pack_trajectories(EPISODES, config).batches)
        for config in (APART, SHARED)
    ]
    assert used == [12 + 38 + 132 + 78, 12 + 32 + 72 + 52]
    batch = pack_trajectories(EPISODES, SHARED).batches[0]
    with use_mesh(None), pytest.raises(UserError, match=r"share_prefixes=False or compute.attention=xla"):
        decoder("splash")(
            batch.tokens,
            positions=batch.positions,
            segment_ids=batch.segment_ids,
            branches=batch.branches,
        )


@pytest.mark.parametrize("config", [APART, SHARED])
def test_packed_token_counts_equal_the_tokens_in_the_rows(config):
    config = dataclasses.replace(config, row_lengths=(192,))
    for one, size in zip(EPISODES, packed_token_counts(EPISODES, config), strict=True):
        batches = pack_trajectories([one], config).batches
        assert size == sum(int((batch.segment_ids > 0).sum()) for batch in batches)
        assert (size < len(one.tokens)) == (config.share_prefixes and len(one.starts) > 1)


def test_the_critics_minibatches_have_equally_many_packed_tokens(monkeypatch):
    """Each group is in one minibatch, in which its prompt is packed once."""
    config = dataclasses.replace(SHARED, row_lengths=(192,), microbatch_tokens=192)
    critic, state = make_critic(ValueModel(SHAPE, rngs=nnx.Rngs(0)), CriticConfig(SGD, minibatches=2), config)
    taken, step = [], critic.accumulator.step

    def counted(params, opt_state, frozen, batches, total):
        taken.append(sum(int((batch.segment_ids > 0).sum()) for batch in batches))
        return step(params, opt_state, frozen, batches, total)

    monkeypatch.setattr(critic.accumulator, "step", counted)
    groups = [group(seed, 4, 6, prompt=30) for seed in (5, 6, 7, 8)]
    mixed = [one for some in zip(*groups) for one in some]
    for batch, sizes in (
        (EPISODES, [72 + 12, 52 + 32]),
        (mixed, [2 * (29 + 4 + 6 + 7 + 8 + 9)] * 2),
    ):
        taken.clear()
        state, _ = critic.update(state, batch, critic.estimate(state, batch))
        assert sorted(taken) == sizes and sum(taken) == packed_token_counts(batch, config).sum()
