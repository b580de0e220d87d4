"""Tests that the benchmarks run, at sizes that measure nothing, and that their results file is updated
correctly."""

import argparse
import math
import re
import sys
from typing import ClassVar

import jax
import pytest
from flax import nnx

from benchmarks import accelerator, grpo_step, measure, rollout, shape_rollouts, update
from benchmarks.fixed_lengths import engine_config, shape_config, shape_name
from benchmarks.measure import BenchmarkRow, command, interleave, medians, warm_up_note, write
from benchmarks.peer_library import CACHES, PeerLibrary, best_of
from rrl.errors import UserError
from rrl.models.block_attention import BLOCK
from rrl.models.decoder import Decoder
from rrl.rl.objective import ObjectiveConfig
from rrl.rollout.config import EngineConfig

SHAPE = "Rollout: Qwen2.5-7B's shape"


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A temporary results file."""
    path = tmp_path / "RESULTS.md"
    path.write_text("# Measured\n\n## Rollout: tiny's shape, cpu\n\nold\n\n## Another, cpu\n\nkept\n")
    monkeypatch.setattr(measure, "RESULTS", path)
    return path


@pytest.fixture
def without_peers(tmp_path):
    """A Python that has none of the peers' modules."""
    path = tmp_path / "python"
    path.write_text("#!/bin/sh\nexit 1\n")
    path.chmod(0o755)
    return path


def test_a_section_replaces_its_older_version_and_an_unmeasured_one_replaces_no_measured_one(results):
    row = BenchmarkRow("what", "1", "2", "2x", "3x")
    accelerator.main([])
    accelerator.main([])
    assert results.read_text().count(f"## {SHAPE}, not measured") == 1
    assert results.read_text().count("not measured: this is a CPU") == 3
    write(SHAPE, "the line", [row], ["a note"])
    text = results.read_text()
    assert "not measured" not in text and f"## {SHAPE}, cpu\n\n`the line` on cpu" in text
    assert str(row) in text and "- a note" in text and "old" in text and "kept" in text
    accelerator.main([])
    assert results.read_text() == text


def test_the_printed_command_omits_paths_and_default_options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tunix_python", default="python")
    args = parser.parse_args(["--only=group", "--tunix_python=/home/someone/bin/python"])
    assert command("benchmarks.some", parser, vars(args)) == (
        "python -m benchmarks.some --only=group --tunix_python=PATH"
    )


def test_padded_batches_hold_one_trajectory_per_row_and_omit_the_remainder():
    trajectories, advantages = update.random_trajectories(rows=5, length=8, prompt=2, vocabulary=50)
    config = ObjectiveConfig(row_lengths=(128,), microbatch_tokens=128, parallel_microbatches=2)
    batches = update.padded_batches(trajectories, advantages, config, rows=2)
    assert [batch.tokens.shape for batch in batches] == [(2, 128), (2, 128)]
    rows = [row for batch in batches for row in batch.tokens]
    assert [row[:8].tolist() for row in rows] == [t.tokens.tolist() for t in trajectories[:4]]


def test_the_warm_up_round_is_reported_separately_and_excluded_from_medians():
    times = interleave({"ours": iter([9.0, 1.0, 3.0, 2.0]).__next__}, 3)
    assert medians(times) == {"ours": 2.0}
    assert warm_up_note(times).startswith("Medians of 3 rounds") and "ours 9.0 s" in warm_up_note(times)


def test_the_fastest_cache_is_compared_and_a_failing_one_is_tried_once():
    class Answers:
        def __init__(self, **answers):
            self.info = {"versions": "version 1"}
            self.answers, self.asked = answers, []

        def ask(self, line):
            self.asked.append(line)
            return self.answers[line.split()[1]]

    peer = Answers(dynamic={"seconds": 4.0}, static={"seconds": 2.0})
    both = PeerLibrary("It", peer, CACHES)
    took = medians(interleave(both.sides("turns", 3, 5), 1))
    assert peer.asked == ["turns dynamic 3 5", "turns static 3 5"] * 2
    assert both.best(took, "{:.0f}".format) == (2.0, "It 2 (static cache; dynamic 4; version 1)")

    peer = Answers(dynamic={"seconds": 4.0}, static={"error": "NoCompiler"})
    one = PeerLibrary("It", peer, CACHES)
    took = medians(interleave(one.sides("sample"), 2))
    assert took["It, static cache"] == math.inf and peer.asked.count("sample static") == 1
    assert one.best(took, "{:.0f}".format) == (
        4.0,
        "It 4 (dynamic cache; static not measured, NoCompiler; version 1)",
    )


class Answer:
    """A peer's process that gives the same answer to each command of a cache."""

    info: ClassVar = {"versions": "version 1"}

    def __init__(self, **seconds):
        self.seconds = seconds

    def ask(self, line):
        return {"seconds": self.seconds[line.split()[1]]}


def test_the_fastest_dtype_and_cache_of_a_peer_are_compared_and_all_are_named():
    wide = PeerLibrary("It in float32", Answer(dynamic=4.0, static=3.0), CACHES)
    narrow = PeerLibrary("It in bfloat16", Answer(dynamic=1.0, static=2.0), CACHES)
    seconds = medians(interleave(wide.sides("turns") | narrow.sides("turns"), 1))
    assert best_of([wide, narrow], seconds, "{:.0f}".format) == (
        1.0,
        "It in bfloat16 1 (dynamic cache; static 2; version 1); It in float32 3 (static cache; dynamic 4; version 1)",
    )


def test_sides_that_are_not_selected_run_in_the_warm_up_and_one_round_only():
    sides = {"ours": lambda: 1.0, "slow": lambda: 3.0, "fast": lambda: 2.0}
    times = interleave(sides, 3, lambda times: {"ours", min(("slow", "fast"), key=lambda n: times[n][-1])})
    assert {name: len(values) for name, values in times.items()} == {"ours": 4, "slow": 2, "fast": 4}


def test_the_fastest_prefill_and_the_fastest_decoding_of_a_peer_are_both_kept():
    prefills = {"ours": [9.0, 1.0], "a": [9.0, 1.0], "b": [1.0, 2.0], "c": [1.0, 3.0]}
    times = {"ours": [9.0, 5.0], "a": [9.0, 6.0], "b": [1.0, 4.0], "c": [1.0, 6.0]}
    assert shape_rollouts._fastest_of_each(prefills)(times) == {"ours", "a", "b"}


def test_shape_names_ignore_case_and_unknown_ones_are_refused():
    assert shape_name("qwen2.5-0.5b") == "Qwen2.5-0.5B"
    with pytest.raises(argparse.ArgumentTypeError, match=r"'qwen' must be one of tiny, Qwen2.5-0.5B, "):
        shape_name("qwen")


def test_the_command_line_sets_fields_of_our_engine():
    args = argparse.Namespace(rollout="workers=2,rows=4")
    assert engine_config(args, rows=16, context=64) == EngineConfig(workers=2, rows=4, context=64)
    with pytest.raises(UserError, match=r"rollout.*row_s"):
        engine_config(argparse.Namespace(rollout="row_s=4"), rows=16)


def test_the_smallest_qwen_has_its_published_number_of_parameters():
    """494,032,768 parameters, as transformers counts them in Qwen2.5-0.5B."""
    model = nnx.eval_shape(lambda: Decoder(shape_config("Qwen2.5-0.5B"), rngs=nnx.Rngs(0)))
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model))) == 494_032_768


def test_a_section_without_a_shape_is_refused_with_one(capsys):
    with pytest.raises(SystemExit):
        rollout.main(["--only=group", "--shape=tiny"])
    assert "--only=group is no section with --shape: turn, episodes" in capsys.readouterr().err


def test_the_machine_names_the_instruction_sets_of_its_processor(monkeypatch, tmp_path):
    file = tmp_path / "cpuinfo"
    file.write_text("processor : 0\nflags\t\t: fpu avx2 avx512f amx_bf16 avx512_bf16x\n")
    monkeypatch.setattr(measure, "CPU_INFO", file)
    assert measure.processor_features() == "avx2 avx512f amx_bf16"
    monkeypatch.setattr(measure, "CPU_INFO", tmp_path / "absent")
    assert measure.processor_features() == ""


def test_a_peer_that_computes_another_number_of_tokens_is_refused():
    sizes = grpo_step.StepSizes(questions=2, samples=4, prompt=16, new=8)
    assert sizes.tokens == {"written": 64, "updated": 192} and sizes.group_length == BLOCK
    grpo_step.check_tokens({"written": 64, "updated": 192, "seconds": 1.0}, sizes)
    with pytest.raises(RuntimeError, match=r"'written': 63.*, not .*'written': 64"):
        grpo_step.check_tokens({"written": 63, "updated": 192}, sizes)


SIZES = ["--shape=tiny", "--batch=2", "--prompt=8", "--new=4", "--read=40", "--rounds=1"]


@pytest.mark.slow
def test_the_accelerator_benchmark_runs_on_a_cpu_and_replaces_its_own_section(results, without_peers):
    with pytest.raises(FileNotFoundError, match="nowhere"):  # before any measurement
        accelerator.main([*SIZES, "--hf_python=nowhere"])
    accelerator.main([*SIZES, f"--hf_python={without_peers}"])
    text = results.read_text()
    assert "old" not in text and "kept" in text and "--hf_python=PATH" in text
    for words in ("a copy", "a matrix product", "not measured: no torch", "at least 5x"):
        assert text.count(words) == 1
    assert str(without_peers) not in text


@pytest.mark.slow
@pytest.mark.parity
def test_the_accelerator_benchmark_measures_hugging_face_with_both_caches(results):
    pytest.importorskip("torch")
    accelerator.main(SIZES)
    text = results.read_text()
    assert "in standard deviations | 100 %; 0.000 | HF generate" in text
    assert "dynamic cache" in text and "static cache" in text and "not measured" not in text


@pytest.mark.slow
@pytest.mark.parity
def test_one_greedy_turn_equals_hugging_face_and_a_missing_peer_is_reported(results, without_peers):
    pytest.importorskip("torch")
    rollout.main(["--only=single_turn", "--batch=2", "--rounds=1", f"--tunix_python={without_peers}"])
    text = results.read_text()
    assert "equal tokens of 512 | 100.0 % | HF generate" in text and "not measured: no tunix" in text
    assert "--only=single_turn --rounds=1 --batch=2 --tunix_python=PATH` on cpu" in text
    assert str(without_peers) not in text and sys.executable not in text


@pytest.mark.slow
def test_all_searches_of_the_latency_benchmark_are_distinct(results):
    rollout.main(["--only=latency", "--batch=2", "--rounds=1"])  # the benchmark asserts it
    assert "distinct queries" in results.read_text()


@pytest.mark.slow
def test_episodes_are_measured_without_peers(results, without_peers):
    peers = [f"--{name}_python={without_peers}" for name in ("hf", "tunix")]
    rollout.main(["--only=episodes", "--batch=8", "--rounds=1", *peers])
    text = results.read_text()
    for searches, batch, most in ((2, 2, 1.9), (4, 2, 3.1), (4, 8, 3.1)):
        row = f"episodes of {searches} searches (64 sampled, 384 observation tokens per turn), batch {batch}, seconds |"
        own = [line for line in text.splitlines() if row in line and "this engine" in line]
        assert len(own) == 1 and f"x (at most {most}x, the ratio of prefilled tokens)" in own[0]
    # Tunix is not measured with the largest batch.
    assert text.count("not measured: no torch") == 3 and text.count("not measured: no tunix") == 2
    assert str(without_peers) not in text


TURN = ["--shape=tiny", "--batch=8", "--prompt=24", "--new=4", "--rounds=1"]
EPISODES = ["--searches=1", "--turn_tokens=8", "--observation_tokens=16"]
STEP = ["--shape=tiny", "--questions=2", "--samples=2", "--prompt=24", "--new=8", "--rounds=1"]


@pytest.mark.slow
def test_a_shape_is_measured_without_peers(results, without_peers):
    rollout.main([*TURN, *EPISODES, f"--hf_python={without_peers}"])
    update.main([*STEP, f"--trl_python={without_peers}"])
    text = results.read_text()
    assert text.count("not measured: no torch") == 5 and text.count("not measured: no trl") == 1
    assert "## Rollout: turn, tiny's shape, float32, cpu" in text
    assert "## Update: GRPO step, tiny's shape, float32, cpu" in text


@pytest.mark.slow
@pytest.mark.parity
def test_prefill_decoding_and_episodes_of_a_shape_are_measured_against_both_dtypes(results):
    pytest.importorskip("torch")
    rollout.main([*TURN, *EPISODES])
    text = results.read_text()
    assert text.count(": prefill, tokens/s |") == text.count(": decoding, tokens/s |") == 2
    assert "whole history read again at every turn" in text and "cache kept between turns" in text
    for dtype in ("float32", "bfloat16"):
        assert text.count(f"HF generate in {dtype} ") == 4
    assert "in standard deviations | 100 %; 0.000 | HF generate" in text


@pytest.mark.slow
@pytest.mark.parity
def test_a_grpo_update_has_the_gradient_norm_and_the_kl_of_trl(results):
    """To rounding in float32. The KL, from differences of log-probabilities, has fewer exact digits."""
    pytest.importorskip("trl")
    update.main(STEP)
    text = results.read_text()
    norm, kl = (float(value) for value in re.findall(r"relative difference (\S+) \|", text))
    assert norm < 1e-5 and kl < 1e-3
    assert "Both sides wrote 32 tokens per step and updated on 128" in text
