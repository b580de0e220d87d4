"""The section "grpo" of `benchmarks.update`: a GRPO step with LoRA, and its update alone, against TRL's GRPOTrainer.

Both sides have the same weights, adapters, prompts, rewards and numbers of tokens. Each of TRL's settings is tried with one step,
and the fastest one is compared. First, the gradient norm of an update and the KL after it are compared on the same completions.
"""

import argparse
import contextlib
import dataclasses
import gc
import json
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterator

import jax
import numpy as np
from flax import nnx

from benchmarks.fixed_lengths import (
    KEY,
    PREFILL_TOKENS,
    SHIPPED,
    FixedLengthModel,
    engine_config,
    random_decoder,
)
from benchmarks.measure import (
    BenchmarkRow,
    PeerProcess,
    SectionResult,
    elapsed,
    interleave,
    medians,
    start_peer,
    warm_up_note,
)
from rrl.data.trajectory import Trajectory
from rrl.models.block_attention import BLOCK
from rrl.models.decoder import LORA_A, LORA_B, Decoder
from rrl.models.hardware import ComputeConfig
from rrl.models.hf import save_decoder
from rrl.models.lora import LoraConfig, add_lora
from rrl.models.tokenizer import load_tokenizer
from rrl.rl.advantages import group_normalize
from rrl.rl.objective import ObjectiveConfig
from rrl.rl.optim import OptimConfig
from rrl.rollout.config import EngineConfig
from rrl.rollout.protocol import SingleTurn
from rrl.setup.rl_config import RLConfig
from rrl.train.learner import Learner, LearningBatch

TRL = "TRL GRPOTrainer"
TRL_SETTINGS = (("float32", 0), ("bfloat16", 0), ("bfloat16", 1))
"""(dtype, 1 to recompute activations in the backward pass, which is TRL's default). TRL's default dtype, float32 weights with
autocast in the update, samples in float32, so it is not among them."""
LORA = LoraConfig(rank=16, alpha=32.0)
KL_COEF = 0.001
"""Weight of the KL, as in R-Search. Both sides evaluate a reference policy for it: the initial adapters."""
OPTIM = OptimConfig(lr=1e-4, b2=0.999, schedule="constant")
HF_MODULES = {name: f"self_attn.{name}_proj" for name in "qkvo"} | {
    name: f"mlp.{name}_proj" for name in ("gate", "up", "down")
}
"""Our name of a linear layer -> Hugging Face's."""
TRL_EPSILON = 1e-4
"""TRL adds this to the standard deviation of a group's rewards."""


@dataclasses.dataclass(frozen=True)
class StepSizes:
    """Sizes of a GRPO step: `questions` prompts of `prompt` tokens, each continued `samples` times by `new` tokens."""

    questions: int
    samples: int
    prompt: int
    new: int

    @property
    def rows(self) -> int:
        """Number of continuations."""
        return self.questions * self.samples

    @property
    def tokens(self) -> dict[str, int]:
        """Number of tokens that are written, and that an update contains (each sample with its prompt)."""
        return {"written": self.rows * self.new, "updated": self.rows * (self.prompt + self.new)}

    @property
    def group_length(self) -> int:
        """Length of a packed row that holds a prompt and its continuations."""
        return -(-(self.prompt + self.samples * self.new) // BLOCK) * BLOCK

    def __str__(self) -> str:
        return f"{self.questions} questions x {self.samples} samples, {self.prompt} prompt and {self.new} new tokens"


class OurSide:
    """Rollout engine and learner, as in a training run, with fixed rewards."""

    def __init__(self, decoder: Decoder, sizes: StepSizes, engine: EngineConfig) -> None:
        self.sizes = sizes
        self.model = FixedLengthModel(decoder, load_tokenizer(SHIPPED))
        self._engine = self.model.engine(engine)
        # One row holds a question's samples, which share the prompt.
        objective = ObjectiveConfig(
            kl_coef=KL_COEF,
            row_lengths=(sizes.group_length,),
            microbatch_tokens=sizes.group_length,
            parallel_microbatches=2,
            share_prefixes=True,
        )
        config = RLConfig(10**6, OPTIM, objective, questions=sizes.questions, samples=sizes.samples)
        self._learner = Learner(config, decoder)
        self.rewards = np.random.default_rng(2).normal(size=sizes.rows)
        groups = np.arange(sizes.rows) // sizes.samples
        self._advantages = group_normalize(self.rewards, groups, epsilon=TRL_EPSILON)
        self._steps = 0
        self.metrics: dict[str, float] = {}
        """Metrics of the last update."""

    def step(self) -> float:
        """Sample and update. Return the seconds."""
        return elapsed(lambda: self._update(self.sample()))

    def update(self, trajectories: list[Trajectory]) -> float:
        """Update on these trajectories. Return the seconds."""
        return elapsed(lambda: self._update(trajectories))

    def sample(self) -> list[Trajectory]:
        """Return new trajectories of the current policy."""
        requests = self.model.requests(self.sizes.questions, self.sizes.prompt, samples=self.sizes.samples)
        key = jax.random.fold_in(KEY, self._steps)
        return self._engine.run(
            self._learner.policy_params, requests, SingleTurn(turn_tokens=self.sizes.new), key
        )

    def _update(self, trajectories: list[Trajectory]) -> None:
        counts = {
            "written": sum(t.policy_tokens for t in trajectories),
            "updated": sum(len(t.tokens) for t in trajectories),
        }
        assert counts == self.sizes.tokens, (counts, self.sizes.tokens)
        batch = LearningBatch(np.zeros(len(trajectories), bool), trajectories, self._advantages)
        self.metrics = self._learner.update(self._steps, batch).metrics
        self._steps += 1


def random_adapters(decoder: Decoder) -> dict[str, np.ndarray]:
    """Add adapters with random values to a decoder, and return them as benchmarks/peers/trl_grpo.py reads them."""
    add_lora(decoder, LORA, rngs=nnx.Rngs(0))
    draws = np.random.default_rng(1)
    adapters = {}
    for name, module in HF_MODULES.items():
        a, b = (getattr(decoder.layers, name + part) for part in (LORA_A, LORA_B))
        # B would start at 0, and then A would get no gradient.
        b[...] = (0.01 * draws.normal(size=b.shape)).astype(b.dtype)
        layers, rank = a.shape[0], LORA.rank
        for layer in range(layers):
            adapters[f"{layer}/{module}/A"] = np.asarray(a[layer], np.float32).reshape(-1, rank).T
            adapters[f"{layer}/{module}/B"] = np.asarray(b[layer], np.float32).reshape(rank, -1).T
    return adapters


def reset_peak() -> None:
    """Reset the peak memory of this process (Linux)."""
    gc.collect()
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def peak_gb() -> float:
    """Return the peak memory of this process since the last reset, in GB."""
    status = pathlib.Path("/proc/self/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+)", status)
    assert found is not None
    return 1024 * int(found[1]) / 1e9


@contextlib.contextmanager
def trl_peer(
    python: str, folder: str, sizes: StepSizes, setting: tuple[str, int]
) -> Iterator[PeerProcess | str]:
    """Start TRL's trainer with one of TRL_SETTINGS. Yields the process, or the reason why it is not measured."""
    dtype, checkpointing = setting
    numbers = map(str, (sizes.questions, sizes.samples, sizes.prompt, sizes.new, checkpointing))
    peer = start_peer(python, "trl", "trl_grpo.py", folder, dtype, *numbers)
    try:
        yield peer
    finally:
        if not isinstance(peer, str):
            peer.close()


def setting_name(setting: tuple[str, int]) -> str:
    """Return the name of one of TRL_SETTINGS for a row."""
    dtype, checkpointing = setting
    return f"{dtype}{', gradient checkpointing' if checkpointing else ''}"


@dataclasses.dataclass(frozen=True)
class Trial:
    """Answers of TRL's trainer with one setting: two updates on our completions, and a step."""

    updates: list[dict[str, float]]
    step: dict[str, float]


def check_tokens(answer: dict[str, float], sizes: StepSizes) -> dict[str, float]:
    """Return a peer's answer. Raises RuntimeError if its step had another number of tokens than ours."""
    counts = {name: answer[name] for name in sizes.tokens}
    if counts != sizes.tokens:
        raise RuntimeError(f"{TRL} computed {counts} tokens, not {sizes.tokens}")
    return answer


def try_settings(python: str, folder: str, sizes: StepSizes) -> dict[tuple[str, int], Trial] | str:
    """Try each of TRL_SETTINGS, or return the reason why TRL is not measured."""
    trials = {}
    for setting in TRL_SETTINGS:
        with trl_peer(python, folder, sizes, setting) as peer:
            if isinstance(peer, str):
                return peer
            updates = [check_tokens(peer.ask("update"), sizes) for _ in range(2)]
            trials[setting] = Trial(updates, check_tokens(peer.ask("step"), sizes))
        print(f"  {TRL}, {setting_name(setting)}: {trials[setting].step['seconds']:.1f} s", file=sys.stderr)
    return trials


def prepare(args: argparse.Namespace, sizes: StepSizes, folder: str) -> OurSide:
    """Make a random model with adapters, write it and what else benchmarks/peers/trl_grpo.py reads, and return our side."""
    compute = ComputeConfig(dtype=args.dtype)
    decoder = random_decoder(args.shape, compute, branches=True)
    save_decoder(folder, decoder, load_tokenizer(SHIPPED), dtype=decoder.dtype)
    np.savez(pathlib.Path(folder, "adapters.npz"), **random_adapters(decoder))
    settings = {"alpha": LORA.alpha, "beta": KL_COEF, "lr": OPTIM.lr}
    pathlib.Path(folder, "grpo.json").write_text(json.dumps(settings), encoding="utf-8")
    engine = engine_config(
        args,
        rows=sizes.rows,
        context=sizes.prompt + sizes.new + 1,
        wake_threshold=sizes.rows,
        prefill_tokens=PREFILL_TOKENS,
    )
    ours = OurSide(decoder, sizes, engine)
    np.save(pathlib.Path(folder, "rewards.npy"), ours.rewards)
    return ours


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What was measured of both sides: seconds by side and round, and peak memory in GB (ours, TRL's)."""

    steps: dict[str, list[float]]
    updates: dict[str, list[float]]
    peaks: tuple[float, float]


def compare(ours: OurSide, trajectories: list[Trajectory], peer: PeerProcess, rounds: int) -> Comparison:
    """Run steps of both sides in turn, and then updates on given trajectories."""
    answers: list[dict[str, float]] = []

    def theirs(line: str) -> float:
        answers.append(check_tokens(peer.ask(line), ours.sizes))
        return answers[-1]["seconds"]

    steps = interleave({"ours": ours.step, TRL: lambda: theirs("step")}, rounds)
    peaks = peak_gb(), answers[-1]["peak_gb"]
    updates = interleave({"ours": lambda: ours.update(trajectories), TRL: lambda: theirs("update")}, rounds)
    return Comparison(steps, updates, peaks)


def grpo(args: argparse.Namespace) -> SectionResult:
    """Compare a GRPO step with LoRA (rollouts and update), and the update alone, with TRL's trainer in its fastest setting."""
    sizes = StepSizes(args.questions, args.samples, args.prompt, args.new)
    what = f"GRPO step with LoRA, {sizes}, {args.dtype}"
    with tempfile.TemporaryDirectory() as folder:
        ours = prepare(args, sizes, folder)
        reset_peak()
        trajectories = ours.sample()
        completions = np.stack([trajectory.tokens[sizes.prompt :] for trajectory in trajectories])
        np.save(pathlib.Path(folder, "completions.npy"), completions)
        our_metrics = []
        for _ in range(2):
            ours.update(trajectories)
            our_metrics.append(ours.metrics)
        trials = try_settings(args.trl_python, folder, sizes)
        if isinstance(trials, str):
            return [BenchmarkRow(what, "", TRL, trials, "3x")], []
        fastest = min(trials, key=lambda setting: trials[setting].step["seconds"])
        with trl_peer(args.trl_python, folder, sizes, fastest) as peer:
            assert not isinstance(peer, str)
            measured = compare(ours, trajectories, peer, args.rounds)
            versions = f"{setting_name(fastest)}; {peer.info['versions']}"
    rows = [
        _seconds_row(f"{what}: seconds", medians(measured.steps), versions, "3x"),
        _memory_row(f"{what}: peak memory, GB", *measured.peaks),
        _seconds_row(f"{what}, the update alone: seconds", medians(measured.updates), versions, ""),
        *_same_update_rows(our_metrics, trials[args.dtype, 0].updates),
    ]
    return rows, _notes(sizes, trials, measured)


def _notes(sizes: StepSizes, trials: dict[tuple[str, int], Trial], measured: Comparison) -> list[str]:
    """Return the notes below the rows."""
    tried = ", ".join(
        f"{setting_name(setting)} {trial.step['seconds']:.1f} s and {trial.step['peak_gb']:.2f} GB"
        for setting, trial in trials.items()
    )
    return [
        f"{TRL}'s settings, one step each: {tried}. The fastest one is compared.",
        f"Rank {LORA.rank}, all linear layers of the body. Both sides wrote {sizes.tokens['written']} tokens per step and "
        f"updated on {sizes.tokens['updated']}, prompts included. Ours computes a question's prompt once for all its samples "
        "(objective.share_prefixes). Peak memory is that since the model was loaded; ours includes compilation.",
        f"Step: {warm_up_note(measured.steps)} Update alone: {warm_up_note(measured.updates)}",
    ]


def _memory_row(what: str, ours: float, theirs: float) -> BenchmarkRow:
    """Return the row of a comparison of peak memory in GB."""
    return BenchmarkRow(what, f"{ours:.2f}", f"{TRL} {theirs:.2f}", f"{ours / theirs:.2f}", "at most 0.6")


def _seconds_row(what: str, seconds_of: dict[str, float], versions: str, target: str) -> BenchmarkRow:
    """Return the row of a comparison of seconds."""
    ratio = seconds_of[TRL] / seconds_of["ours"]
    return BenchmarkRow(
        what,
        f"{seconds_of['ours']:.2f}",
        f"{TRL} {seconds_of[TRL]:.2f} ({versions})",
        f"{ratio:.2f}x",
        target,
    )


def _same_update_rows(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> list[BenchmarkRow]:
    """Return rows that compare the first update on the same completions, and the policy after it."""
    rows = []
    for what, update, name in (
        ("gradient norm of the first update on the same completions", 0, "grad_norm"),
        ("KL from the initial policy on the same completions after this update", 1, "kl"),
    ):
        our_value, their_value = ours[update][f"train/{name}"], theirs[update][name]
        difference = abs(our_value - their_value) / abs(their_value)
        rows.append(
            BenchmarkRow(
                what,
                f"relative difference {difference:.0e}",
                f"{TRL} {their_value:.6g}",
                "",
                "the same, to rounding",
            )
        )
    return rows
