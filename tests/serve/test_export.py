"""Tests of the export: any checkpoint becomes a folder, the workdir stays unchanged, and wrong input is
refused by name."""

import errno
import hashlib
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from rrl.errors import UserError
from rrl.files import SaveError
from rrl.models.config import DecoderConfig
from rrl.models.hf import load_decoder, load_language_model, save_decoder
from rrl.models.lora import LoraConfig, add_lora, merge_lora
from rrl.models.tokenizer import load_tokenizer, train_tokenizer
from rrl.recipes.card import make_card, read_card
from rrl.recipes.rsearch import RSearch
from rrl.rl.optim import split_trained
from rrl.runs.checkpoints import Checkpoints
from rrl.runs.model_files import write_model_files
from rrl.serve.export import export, parse_size
from rrl.sft.trainer import TrainState
from tests.memory import limit_memory
from tests.models.small import filled

SHAPE = DecoderConfig(
    vocab_size=259,
    hidden=16,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    mlp=24,
    eos_token_id=(2, 7),
    pad_token_id=0,
)
PLAIN = {"optim": {"frozen": []}, "run": {}}
"""Part of a config.json: all parameters are trained."""
CARD = make_card(RSearch(instruction="Search."), 1024, 2)


def parameters(seed):
    return nnx.state(filled(SHAPE, seed))


def optimiser(seed):
    return {"mu": parameters(seed), "count": jnp.int32(3)}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["some text"], 259)


@pytest.fixture(scope="module")
def run(tmp_path_factory, tokenizer):
    """A workdir of rrl.train.loop that averages: the live parameters have seed 10 * step, their mean has
    seed 10 * step + 1."""
    workdir = tmp_path_factory.mktemp("run")
    with Checkpoints(workdir, PLAIN | {"average_last": 0.5}) as checkpoints:
        write_model_files(workdir, SHAPE, tokenizer, CARD)
        for step in (2, 4):
            state = (parameters(10 * step), optimiser(99), parameters(10 * step + 1))
            checkpoints.save(step, state, {"step": step})
    return workdir


def holds(folder, seed):
    found, expected = (
        jax.tree.leaves(state) for state in (nnx.state(load_decoder(folder)), parameters(seed))
    )
    return all(map(np.array_equal, found, expected))


def contents(folder):
    return {
        str(path): path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
    }


def test_the_averaged_parameters_of_the_latest_checkpoint_are_exported_and_the_workdir_is_unchanged(
    run, tmp_path
):
    before = contents(run)
    line = export(run, tmp_path / "deep" / "out")
    assert contents(run) == before
    assert "step 4" in line and holds(tmp_path / "deep" / "out", 41)
    decoder, _ = load_language_model(tmp_path / "deep" / "out", "policy")
    assert decoder.config == SHAPE and read_card(tmp_path / "deep" / "out") == CARD
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]


def test_a_model_larger_than_memory_is_refused_before_the_checkpoint_is_read(run, tmp_path, monkeypatch):
    limit_memory(monkeypatch, tmp_path, sum(leaf.nbytes for leaf in jax.tree.leaves(parameters(0))) - 1)
    monkeypatch.setattr("rrl.serve.export.read_part", lambda *_: pytest.fail("nothing may be read"))
    with pytest.raises(UserError, match=r"its export needs .* are available: parameters .*; export it on"):
        export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_step_dtype_and_shard_size_are_as_requested(run, tmp_path):
    (tmp_path / "out").mkdir()  # an existing empty folder is allowed
    export(run, tmp_path / "out", dtype="bfloat16", step=2, max_shard_size="0.01MB")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    files = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(files) > 1 and {t.dtype for t in load_file(files[0]).values()} == {np.dtype(jnp.bfloat16)}
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), parameters(21))
    found = nnx.state(load_decoder(tmp_path / "out"))
    assert all(map(np.array_equal, jax.tree.leaves(found), jax.tree.leaves(rounded)))


@pytest.mark.parametrize(
    ("settings", "seed"), [({"average_last": 0.0}, 1), ({"patience": 0}, 1), ({"patience": 2}, 2)]
)
def test_runs_without_averaging_export_their_live_or_their_best_parameters(
    tmp_path, tokenizer, settings, seed
):
    live = parameters(1)
    state = (live, optimiser(99), None)
    if "patience" in settings:
        best = parameters(2) if settings["patience"] else None
        state = (TrainState(live, optimiser(99), jnp.int32(1)), best)
    with Checkpoints(tmp_path / "run", PLAIN | settings) as checkpoints:
        write_model_files(tmp_path / "run", SHAPE, tokenizer)
        checkpoints.save(1, state, {"loss": 0.5})
    export(tmp_path / "run", tmp_path / "out")
    assert holds(tmp_path / "out", seed) and read_card(tmp_path / "out") is None
    assert load_tokenizer(tmp_path / "out").get_vocab() == tokenizer.get_vocab()


@pytest.mark.parametrize("lora", [{}, {"rank": 2, "alpha": 4.0, "layers": "layers/q"}])
def test_frozen_parameters_come_from_the_starting_folder(tmp_path, tokenizer, lora):
    start, workdir = tmp_path / "start", tmp_path / "run"
    save_decoder(start, filled(SHAPE, 5))
    learned = filled(SHAPE, 5)
    add_lora(learned, LoraConfig(**lora), rngs=nnx.Rngs(0))
    frozen = [] if lora else ["^embedding$", "layers/k"]
    _, trained, _ = split_trained(learned, frozen)
    trained = jax.tree.map(lambda x: x + 0.5, trained)
    nnx.update(learned, trained)
    settings = {"average_last": 0.0, "optim": {"frozen": frozen}, "run": {"lora": lora}}
    with Checkpoints(workdir, settings) as checkpoints:
        write_model_files(workdir, SHAPE, tokenizer, initial_model=start)
        checkpoints.save(1, (trained, optimiser(99), None), {})
    export(workdir, tmp_path / "out")
    found, expected = (
        jax.tree.leaves(nnx.state(m)) for m in (load_decoder(tmp_path / "out"), merge_lora(learned))
    )
    assert all(map(np.array_equal, found, expected))
    start.rename(tmp_path / "moved")
    with pytest.raises(UserError, match=r"start=.*start \(sha256 none\) is not what .* give --start=FOLDER"):
        export(workdir, tmp_path / "other")
    export(workdir, tmp_path / "again", start=tmp_path / "moved")


def test_a_workdir_of_an_older_version_uses_the_files_of_its_policy_folder(run, tmp_path):
    shutil.copytree(run, tmp_path / "old")
    (tmp_path / "old" / "model_files").rename(tmp_path / "old" / "policy")
    export(tmp_path / "old", tmp_path / "out")
    assert holds(tmp_path / "out", 41)
    shutil.rmtree(tmp_path / "old" / "policy")
    with pytest.raises(UserError, match=r"does not describe its model \(no model_files/config.json\)"):
        export(tmp_path / "old", tmp_path / "other")


def edit(workdir, **fields):
    file = workdir / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_an_invalid_output_path_is_refused_before_the_checkpoint_is_read(run, tmp_path):
    (tmp_path / "file").write_text("mine")
    for out, message in (
        (tmp_path / "file" / "out", r"out .*file/out: .*file is a file; choose another --out"),
        (tmp_path / ("x" * 256), "a name of 256 bytes is too long .*; choose a shorter --out"),
    ):
        with pytest.raises(UserError, match=message):
            export(run, out)


def test_a_full_disk_is_a_save_error(run, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("rrl.serve.export.save_decoder", full)
    with pytest.raises(SaveError, match=r"out could not be saved: the disk, .* full\. Free space"):
        export(run, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda run, out: None, {"step": 3}, r"no checkpoint of step 3; its steps are 2, 4"),
        (lambda run, out: None, {"max_shard_size": "5"}, r"max_shard_size='5' must be a size such as 500MB"),
        (lambda run, out: shutil.rmtree(run / "checkpoints"), {}, r"has no folder checkpoints"),
        (
            lambda run, out: [
                shutil.move(run / "checkpoints" / n, run / "checkpoints" / f"{n}.tmp") for n in "24"
            ],
            {},
            "no complete checkpoint yet",
        ),
        (lambda run, out: (out.mkdir(), (out / "file").touch()), {}, r"out=.*out is not an empty folder"),
        (lambda run, out: out.touch(), {}, r"out .*out is a file; choose a folder"),
        (lambda run, out: edit(run, optim=[1]), {}, r"config\.json: optim=\[1\] must be a JSON object"),
        (
            lambda run, out: edit(run, optim={"frozen": 7}),
            {},
            r"config\.json: optim\.frozen=7 must be a tuple",
        ),
        (lambda run, out: edit(run, run={"lora": {"rang": 2}}), {}, r"config\.json: lora\.rang is unknown"),
        (
            lambda run, out: (run / "model_files" / "config.json").write_text(
                json.dumps(SHAPE.to_hf() | {"hidden_size": 8})
            ),
            {},
            r"step 4 in .* has \[2\]\['embedding'\].* of shape \(259, 16\); expected shape \(259, 8\)",
        ),
    ],
)
def test_wrong_input_is_refused_by_name_and_nothing_is_written(run, tmp_path, change, options, message):
    shutil.copytree(run, tmp_path / "run")
    change(tmp_path / "run", tmp_path / "out")
    before = contents(tmp_path)
    with pytest.raises(UserError, match=message):
        export(tmp_path / "run", tmp_path / "out", **options)
    assert contents(tmp_path) == before


def test_shard_sizes_are_parsed_in_the_units_of_transformers():
    assert [parse_size(text) for text in ("5GB", "1.5 gb", "200MB")] == [5 * 10**9, 15 * 10**8, 2 * 10**8]
