"""Tests of the training command: the files that a run writes, in the built-in world and with a folder of
real questions."""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
from flax import nnx

from rrl.models.config import DecoderConfig
from rrl.models.decoder import Decoder
from rrl.models.hf import load_decoder, save_decoder
from rrl.models.tokenizer import load_tokenizer
from rrl.report.article import HELD_OUT, TRAINING, UNUSED
from rrl.runs.metrics import read_metrics

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
SHIPPED = ROOT / "assets" / "miniwiki-policy"
FEW = ("--config.train.questions=4", "--config.train.samples=2", "--config.rollout.rows=8")
"""Flags that make a training step short."""


def start(config, workdir, *flags):
    return subprocess.run(
        [sys.executable, "launch/train.py", f"--config={config}", f"--workdir={workdir}", *flags],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def sources(workdir):
    return set(re.findall(r'data-source="(.*?)"', (workdir / "trajectories.html").read_text()))


def test_a_run_writes_all_its_files_and_repeating_the_command_changes_nothing(tmp_path):
    command = ("configs/rsearch_grpo.py:steps=2", tmp_path, *FEW, "--config.data.held_out_per_kind=2")
    done = start(*command)
    assert done.returncode == 0, done.stderr
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows if "train/em" in row] == [1, 2]
    assert {0, 2} <= {row["step"] for row in rows if "eval/em" in row}
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "summary.txt").read_text() in done.stdout
    assert HELD_OUT in sources(tmp_path) and sources(tmp_path) <= {HELD_OUT, TRAINING, UNUSED}
    assert load_decoder(tmp_path / "policy").config == load_decoder(SHIPPED).config
    assert len(load_tokenizer(tmp_path / "policy")) == len(load_tokenizer(SHIPPED))

    exported = subprocess.run(
        [sys.executable, "launch/export.py", f"--workdir={tmp_path}", f"--out={tmp_path / 'exported'}"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert exported.returncode == 0 and "step 2, float32" in exported.stdout, exported.stderr
    names = [sorted(file.name for file in (tmp_path / name).iterdir()) for name in ("policy", "exported")]
    assert names[0] == names[1]
    for name in names[0]:
        assert (tmp_path / "policy" / name).read_bytes() == (tmp_path / "exported" / name).read_bytes(), name

    kept = {name: (tmp_path / name).read_bytes() for name in ("metrics.jsonl", "trajectories.html")}
    again = start(*command)
    assert again.returncode == 0, again.stderr
    assert kept == {name: (tmp_path / name).read_bytes() for name in kept}
    assert (tmp_path / "summary.txt").exists()


@pytest.fixture(scope="module")
def searcher(tmp_path_factory):
    """A Qwen2 folder with random layers and a head constructed so that every turn is `<search> Harbour
    </search>`."""
    tokenizer = load_tokenizer(SHIPPED)
    shape = DecoderConfig(len(tokenizer), hidden=128, layers=2, heads=4, kv_heads=2, head_dim=32, mlp=64)
    shape = dataclasses.replace(shape, tie_embeddings=False, eos_token_id=tokenizer.eos_token_id)
    decoder = Decoder(shape, rngs=nnx.Rngs(0))
    table = np.random.default_rng(0).normal(size=(shape.vocab_size, shape.hidden))
    # The feature that all tokens share predicts the first token; a token's own features predict the next one.
    table[:, 0] = 10.0
    opened, word, named, space, closing, *_ = tokenizer.encode("<search> Harbour </search>")
    head = np.zeros((shape.hidden, shape.vocab_size))
    head[0, opened] = 10.0
    for before, after in ((opened, word), (word, named), (named, space), (space, closing), (closing, word)):
        head[1:, after] += 3 * table[before, 1:]
    decoder.embedding[...], decoder.head[...] = 30 * table, head  # far larger than what the layers add
    folder = tmp_path_factory.mktemp("searcher")
    save_decoder(folder, decoder, tokenizer)
    return folder


@pytest.fixture
def folder(tmp_path):
    """Questions in the format of HotpotQA and a corpus in that of BEIR."""
    places = ("Velden", "Marnfurt", "Tolm", "Asch", "Reel", "Danes")
    corpus = [
        {"_id": place, "title": f"{place} Harbour", "text": f"{place} has a harbour."} for place in places
    ]
    questions = [
        {
            "_id": f"q-{place}",
            "type": "bridge",
            "question": f"Which harbour is in {place}?",
            "answer": f"{place} Harbour",
            "supporting_facts": [[f"{place} Harbour", 0]],
        }
        for place in places
    ]
    made = tmp_path / "real"
    made.mkdir()
    for name, records in (("corpus.jsonl", corpus), ("questions.jsonl", questions)):
        (made / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return made


def test_any_policy_searches_a_folder_of_real_questions(tmp_path, folder, searcher):
    config = f"configs/rsearch_grpo.py:steps=1,prompt=bare,data={folder},policy={searcher}"
    done = start(config, tmp_path / "run", *FEW, "--config.objective.drop_spread=0.0")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "run" / "trajectories.html").read_text()
    assert "Velden Harbour</span>" in page and "1 of 1 gold passages found" in page
    assert sources(tmp_path / "run") == {HELD_OUT, UNUSED}  # all samples of a question are equal
    assert "retriever bm25" in (tmp_path / "run" / "summary.txt").read_text()


def test_a_broken_line_is_refused_by_number_unless_skipping_is_allowed(tmp_path, folder, searcher):
    with (folder / "questions.jsonl").open("a") as file:
        file.write('{"question": "Who\n')
    config = f"configs/rsearch_grpo.py:steps=1,prompt=bare,data={folder},policy={searcher}"
    done = start(config, tmp_path / "run", *FEW)
    assert done.returncode == 2, done.stderr
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "questions.jsonl" in error and "line 7" in error
    assert not (tmp_path / "run").exists()
    done = start(config, tmp_path / "run", *FEW, "--config.data.on_error=skip")
    assert done.returncode == 0, done.stderr
    assert "line 7" in done.stderr
    assert (tmp_path / "run" / "summary.txt").exists()


def test_a_config_of_another_folder_trains_the_shipped_policy_from_an_empty_one(tmp_path):
    (tmp_path / "my.py").write_text(
        "from configs import rsearch_grpo\n\n\ndef get_config(arg=''):\n    return rsearch_grpo.get_config(arg)\n"
    )
    (tmp_path / "empty").mkdir()
    command = [sys.executable, str(ROOT / "launch/train.py"), f"--config={tmp_path / 'my.py'}:steps=1"]
    flags = (*FEW, "--config.data.held_out_per_kind=1")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, *flags], cwd=tmp_path / "empty", env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("files that come with rrl are read from") == 1
    (run,) = (tmp_path / "empty/runs").iterdir()
    assert (run / "policy/config.json").is_file()
