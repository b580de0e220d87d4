"""Measures update speed and memory; rows go to RESULTS.md:

    python -m benchmarks.update [--only=NAME] [--rounds=5] [--torch_python=PYTHON]
    python -m benchmarks.update --shape=Qwen2.5-0.5B --dtype=bfloat16 [--rounds=5] [--trl_python=PYTHON]

With `--shape` a whole GRPO step with LoRA is measured (`benchmarks.grpo_step`). Otherwise the step is GRPO's, in float32:
log-probabilities under policy and frozen reference, clipped ratio, k3, gradient, AdamW.
"""

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.fixed_lengths import add_shape_arguments
from benchmarks.grpo_step import grpo
from benchmarks.measure import (
    BenchmarkRow,
    PeerProcess,
    command,
    elapsed,
    imports,
    interleaved_medians,
    write,
)
from rrl.data.questions import Question
from rrl.data.trajectory import POLICY, PROMPT, Trajectory
from rrl.miniwiki import KINDS, generate, mixed_questions
from rrl.models.attention_backends import choose_backend
from rrl.models.block_attention import BLOCK
from rrl.models.config import DecoderConfig
from rrl.models.decoder import Decoder
from rrl.models.hf import load_language_model, save_decoder
from rrl.models.tokenizer import load_tokenizer
from rrl.models.weights import read_config
from rrl.parallel.runtime import use_huge_pages
from rrl.plan.policy_shape import PUBLISHED
from rrl.recipes.card import read_card
from rrl.recipes.catalogue import make_recipe
from rrl.recipes.episodes import Sampling, run_questions
from rrl.retrieval.index import make_retriever
from rrl.rl.batch import Batch
from rrl.rl.logprobs import token_logprobs
from rrl.rl.objective import ObjectiveConfig
from rrl.rl.optim import OptimConfig, make_optimizer, split_trained
from rrl.rl.update import Updater, pack_minibatch
from rrl.rollout.config import EngineConfig
from rrl.rollout.engine import Engine

TINY = "assets/miniwiki-policy"
"""Folder of the shipped policy."""
ATTENTION = choose_backend("auto", jax.default_backend(), jnp.float32)
OPTIM = OptimConfig(lr=1e-4, total_steps=1000, schedule="constant")


class StepRunner:
    """A decoder with its optimiser and reference, which takes training steps."""

    def __init__(self, decoder: Decoder, config: ObjectiveConfig) -> None:
        graph, params, self.untrained = split_trained(decoder, ())
        self.reference = jax.tree.map(jnp.copy, params)
        optimizer = make_optimizer(OPTIM)
        # Give the inputs the sharding of a step's outputs, so that the second step is not compiled again.
        self.params, self.state = jax.tree.map(
            lambda x: jax.device_put(x, x.sharding), (params, optimizer.init(params))
        )
        self.updater = Updater(graph, optimizer, config)
        self.loss = 0.0

    def step(self, batches: Sequence[Batch], total: float) -> None:
        """Take one optimiser step on packed rows. The summed loss is divided by `total`."""
        not_updated = (self.reference, self.untrained)
        self.params, self.state, metrics = self.updater.accumulator.step(
            self.params, self.state, not_updated, batches, total
        )
        self.loss = metrics["loss"]


def random_trajectories(
    rows: int, length: int, prompt: int, vocabulary: int
) -> tuple[list[Trajectory], np.ndarray]:
    """Return random trajectories of one length, with the same draws as `peers/torch_step.py`, and their
    advantages."""
    draws = np.random.default_rng(0)
    tokens = draws.integers(0, vocabulary, (rows, length))
    old = draws.normal(-np.log(vocabulary), 0.1, (rows, length)).astype(np.float32)
    advantages = draws.normal(size=(rows, 1)).astype(np.float32)[:, 0]
    roles = np.where(np.arange(length) < prompt, PROMPT, POLICY).astype(np.int8)
    turns, question = np.zeros(length, np.int16), Question("", "", ())
    trajectories = [
        Trajectory(question, i, i, tokens[i].astype(np.int32), roles, old[i], old[i], turns, [], [], "done")
        for i in range(rows)
    ]
    return trajectories, advantages


def step(args: argparse.Namespace) -> list[BenchmarkRow]:
    """Compare a training step with the same step in torch and transformers."""
    table = []
    shipped = DecoderConfig.from_hf(read_config(TINY))
    wide = dataclasses.replace(shipped, vocab_size=8192, hidden=512, heads=8, kv_heads=2, mlp=1536)
    for name, config in (("the shipped policy's shape", shipped), ("width 512, vocabulary 8,192", wide)):
        # The peer, a Qwen2 of transformers, always has this head dimension.
        config = dataclasses.replace(config, head_dim=config.hidden // config.heads)
        rows, length, prompt = 16, 512, 64
        what = f"a step on {rows} x {length} tokens, {name}, tokens/s"
        if not imports(args.torch_python, "torch"):
            table.append(BenchmarkRow(what, "", "", "not measured: no torch", "1.2x"))
            continue
        decoder = Decoder(config, rngs=nnx.Rngs(0), attention=ATTENTION)
        objective = ObjectiveConfig(
            kl_coef=0.1,
            clip_high=0.28,
            row_lengths=(length,),
            microbatch_tokens=rows * length // 4,
            parallel_microbatches=2,
        )
        batches, total = pack_minibatch(
            *random_trajectories(rows, length, prompt, config.vocab_size), objective
        )
        with tempfile.TemporaryDirectory() as folder:
            save_decoder(folder, decoder, load_tokenizer(TINY))
            peer = PeerProcess(
                args.torch_python, "torch_step.py", folder, str(rows), str(length), str(prompt)
            )
            runner = StepRunner(decoder, objective)
            runner.step(batches, total)
            theirs = peer.ask("step")["loss"]
            loss_difference = abs(runner.loss - theirs) / abs(theirs)
            sides: dict[str, Callable[[], float]] = {
                "ours": lambda runner=runner, batches=batches, total=total: elapsed(  # type: ignore[misc]
                    lambda: runner.step(batches, total)
                ),
                "torch": lambda peer=peer: peer.ask("step")["seconds"],  # type: ignore[misc]
            }
            seconds_of = interleaved_medians(sides, args.rounds)
            peer.close()
        rates = {side: rows * length / value for side, value in seconds_of.items()}
        table += [
            BenchmarkRow(
                what,
                f"{rates['ours']:.0f}",
                f"{rates['torch']:.0f} ({peer.info['versions']}, SDPA)",
                f"{rates['ours'] / rates['torch']:.2f}x",
                "1.2x",
            ),
            BenchmarkRow(
                "loss of the first step",
                f"relative difference {loss_difference:.0e}",
                f"{theirs:.6f}",
                "",
                "the same",
            ),
        ]
    return table


def memory(args: argparse.Namespace) -> list[BenchmarkRow]:
    """Compare the memory that the compiler plans for log-probabilities and their gradient. Nothing is run.

    Ours computes the logits in parts; the other side keeps the logits of all tokens at once.
    """
    config, length = DecoderConfig.from_hf(PUBLISHED["Qwen2.5-0.5B"]), 4096
    graph, params = nnx.split(
        nnx.eval_shape(
            lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16, attention=ATTENTION, remat="full")
        )
    )
    table = []

    def loss(params: Any, batch: Batch, all_logits: bool) -> jax.Array:
        model = nnx.merge(graph, params)
        if all_logits:
            hidden = model(batch.tokens, positions=batch.positions, segment_ids=batch.segment_ids)
            logits = jax.nn.log_softmax(model.unembed(hidden[:, :-1]).astype(jnp.float32))
            return -jnp.take_along_axis(logits, batch.tokens[:, 1:, None], axis=-1).sum()
        return -token_logprobs(model, batch).logp.sum()

    for rows in (1, 8):
        shape = jax.ShapeDtypeStruct((rows, length), jnp.int32)
        batch = Batch(shape, shape, shape, jax.ShapeDtypeStruct((rows, length), jnp.bool_))
        temporary_gib = []
        for all_logits in (False, True):
            compiled = jax.jit(jax.grad(loss), static_argnums=2).lower(params, batch, all_logits).compile()
            temporary_gib.append(compiled.memory_analysis().temp_size_in_bytes / 2**30)
        table.append(
            BenchmarkRow(
                f"log-probabilities and gradient, {rows} x {length} tokens, vocabulary of 151,936, 0.5B shape: GiB "
                "of temporary memory",
                f"{temporary_gib[0]:.2f}",
                f"all logits at once {temporary_gib[1]:.2f}",
                f"{temporary_gib[0] / temporary_gib[1]:.2f}",
                "at most 0.25",
            )
        )
    return table


def padded_batches(
    trajectories: Sequence[Trajectory], advantages: np.ndarray, config: ObjectiveConfig, rows: int
) -> list[Batch]:
    """Return batches of `rows` rows with one trajectory each. Trajectories that do not fill the last batch are left out."""
    single_rows = [pack_minibatch([t], advantages[[i]], config)[0][0] for i, t in enumerate(trajectories)]
    return [
        jax.tree.map(lambda *x: np.concatenate(x), *single_rows[start : start + rows])
        for start in range(0, len(trajectories) - rows + 1, rows)
    ]


def packing(args: argparse.Namespace) -> list[BenchmarkRow]:
    """Compare search trajectories in packed rows with one padded row each."""
    decoder, tokenizer = load_language_model(TINY, "policy")
    card = read_card(TINY)
    assert card is not None
    recipe = make_recipe("rsearch", {"instruction": card.fields["instruction"]}, {"max_searches": 4})
    wiki = generate("train", 1, 1000, 5)
    retriever = make_retriever(wiki.passages, "bm25")
    # top_k passages per search; top_p of sampling.
    config = EngineConfig(rows=64, context=1024, wake_threshold=16, prefill_tokens=256, top_k=2, top_p=0.95)
    engine = Engine(decoder, tokenizer, config, retriever=retriever)
    questions = [item.question for item in mixed_questions(wiki, 8, KINDS, 1)][:32]
    trajectories = run_questions(
        engine, nnx.state(decoder), recipe, questions, Sampling(jax.random.key(0), samples=4)
    )
    advantages = np.random.default_rng(0).normal(size=len(trajectories)).astype(np.float32)
    longest = -(-max(len(t.tokens) for t in trajectories) // 128) * 128
    packed = ObjectiveConfig(
        row_lengths=(1024,), microbatch_tokens=2048, parallel_microbatches=2
    )  # as configs/rsearch_grpo.py
    padded = ObjectiveConfig(row_lengths=(longest,), microbatch_tokens=longest, parallel_microbatches=2)
    rows_per_batch = max(1, 4096 // longest)  # batches of up to 4,096 tokens
    batches = {
        "packed": pack_minibatch(trajectories, advantages, packed)[0],
        "padded": padded_batches(trajectories, advantages, padded, rows_per_batch),
    }
    sides: dict[str, Callable[[], float]] = {}
    for name, objective in (("packed", packed), ("padded", padded)):
        runner = StepRunner(load_language_model(TINY, "policy", attention=ATTENTION)[0], objective)
        sides[name] = lambda runner=runner, name=name: elapsed(  # type: ignore[misc]
            lambda: runner.step(batches[name], 1000.0)  # the divisor of the loss does not change the time
        )
    seconds_of = interleaved_medians(sides, min(args.rounds, 3))
    # Scale the time to all trajectories.
    seconds_of["padded"] *= len(trajectories) / (rows_per_batch * len(batches["padded"]))
    tokens = [len(t.tokens) for t in trajectories]
    return [
        BenchmarkRow(
            f"{len(trajectories)} search trajectories of {min(tokens)} to {max(tokens)} tokens "
            f"(mean {np.mean(tokens):.0f}): seconds per step",
            f"{seconds_of['packed']:.2f}",
            f"a padded row each {seconds_of['padded']:.2f}",
            f"{seconds_of['padded'] / seconds_of['packed']:.2f}x",
            "1.8x",
        )
    ]


def prompts(args: argparse.Namespace) -> list[BenchmarkRow]:
    """Compare packing the prompt once per group, shared by its samples, with packing it once per sample.

    The table shows the seconds, and in parentheses the token positions of all packed rows, padding included.
    """
    config = DecoderConfig.from_hf(read_config(TINY))
    groups, samples, output = 8, 8, 128
    table = []
    for prompt in (64, 256, 512):
        trajectories, advantages = random_trajectories(
            groups * samples, prompt + output, prompt, config.vocab_size
        )
        for i, trajectory in enumerate(trajectories):
            trajectory.group = i // samples
            trajectory.tokens[:prompt] = trajectories[trajectory.group * samples].tokens[:prompt]
        length = -(-(prompt + samples * output) // BLOCK) * BLOCK  # one row holds a whole group
        sides: dict[str, Callable[[], float]] = {}
        positions = {}
        for name, share in (("shared", True), ("separate", False)):
            objective = ObjectiveConfig(
                kl_coef=0.1,
                row_lengths=(length,),
                microbatch_tokens=2 * length,
                parallel_microbatches=2,
                share_prefixes=share,
            )
            batches, total = pack_minibatch(trajectories, advantages, objective)
            positions[name] = sum(batch.tokens.size for batch in batches)
            runner = StepRunner(Decoder(config, rngs=nnx.Rngs(0), attention=ATTENTION), objective)
            sides[name] = lambda runner=runner, batches=batches, total=total: elapsed(  # type: ignore[misc]
                lambda: runner.step(batches, total)
            )
        seconds_of = interleaved_medians(sides, args.rounds)
        table.append(
            BenchmarkRow(
                f"{groups} groups of {samples} outputs of {output} tokens after a prompt of {prompt}: seconds per step",
                f"{seconds_of['shared']:.2f} ({positions['shared']:,} positions)",
                f"the prompt once a sample {seconds_of['separate']:.2f} ({positions['separate']:,} positions)",
                f"{seconds_of['separate'] / seconds_of['shared']:.2f}x",
                "",
            )
        )
    return table


SECTIONS: dict[str, Callable[[argparse.Namespace], list[BenchmarkRow]]] = {
    section.__name__: section for section in (step, memory, packing, prompts)
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the selected sections."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=SECTIONS, help="section to run (default: all); not with --shape")
    parser.add_argument("--rounds", type=int, default=5, help="number of timed rounds")
    parser.add_argument(
        "--torch_python", default=sys.executable, help="Python interpreter with torch and transformers"
    )
    add_shape_arguments(parser)
    for name, default in (("questions", 8), ("samples", 8), ("prompt", 256), ("new", 64)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"with --shape: number of {name}")
    parser.add_argument("--trl_python", default=sys.executable, help="Python interpreter with trl and peft")
    args = parser.parse_args(argv)
    if args.shape:
        used = {name: value for name, value in vars(args).items() if name not in ("only", "torch_python")}
        title = f"Update: GRPO step, {args.shape}'s shape, {args.dtype}"
        write(title, command("benchmarks.update", parser, used), *grpo(args))
        return
    for name, section in SECTIONS.items():
        if args.only in (None, name):
            write(f"Update: {name}", f"python -m benchmarks.update --only={name}", section(args), [])


if __name__ == "__main__":
    use_huge_pages()  # as in every training run; the peers get them too
    main()
