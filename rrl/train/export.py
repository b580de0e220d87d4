"""From a training workdir to a Hugging Face folder: the parameters of a checkpoint, with tokenizer and recipe card.

A run keeps everything of its model's folder but the weights in `model_files/` of its workdir, so that any checkpoint of
it can be exported while it goes on, or after it was killed.
"""

import os
import pathlib
import re
import shutil

import jax
from flax import nnx
from transformers import PreTrainedTokenizerBase

from rrl.errors import UserError
from rrl.models.config import DecoderConfig
from rrl.models.decoder import Decoder
from rrl.models.hf import folder_hash, save_decoder, save_description
from rrl.models.weights import CONFIG, read_config, read_json
from rrl.parallel.mesh import make_mesh
from rrl.parallel.rules import shardings
from rrl.recipes.card import Card, write_card
from rrl.train import rl, sft
from rrl.train.checkpoints import read_part, saved_metadata, saved_steps

MODEL_FILES = "model_files"
_DESCRIBED = (MODEL_FILES, "policy", "model")
"""Folders of a workdir that tell what its model is; workdirs of older versions lack the first."""
_WRITTEN_ANEW = re.compile(r"config\.json|generation_config\.json|model.*\.safetensors.*|\..*")
_UNITS = {"MB": 10**6, "GB": 10**9}


def write_model_files(
    workdir: str | os.PathLike[str],
    config: DecoderConfig,
    tokenizer: PreTrainedTokenizerBase,
    card: Card | None = None,
) -> None:
    """Keeps in a run's workdir what an export needs beside a checkpoint."""
    folder = pathlib.Path(workdir, MODEL_FILES)
    save_description(folder, config, tokenizer)
    if card is not None:
        write_card(folder, card)


def export(
    workdir: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: str = "float32",
    step: int | None = None,
    max_shard_size: str = "5GB",
) -> str:
    """Writes what a run has learned by a checkpoint as a folder for transformers, vLLM and our own `policy=`.

    The workdir is only read. The folder appears when it is complete.

    Args:
        workdir: of launch/train.py or launch/sft.py; the run may still be going.
        out: a folder that is not there yet, or empty.
        dtype: of the weights: float32, bfloat16 or float16.
        step: of the checkpoint; None: the latest. The parameters are the averaged ones where the run averages, and the
            best ones where it stops early.
        max_shard_size: most of the weights in one file, in MB or GB.

    Returns:
        What was written, in one line.

    Raises:
        UserError: no workdir, checkpoint or step of this name; the folder is not empty; a size that is none.
    """
    workdir, out = pathlib.Path(workdir), pathlib.Path(out)
    shard_size = parse_size(max_shard_size)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"out={os.fspath(out)} is not an empty folder; choose one that is not there yet")
    steps = saved_steps(workdir)
    step = steps[-1] if step is None else step
    if step not in steps:
        raise UserError(
            f"workdir {os.fspath(workdir)} has no checkpoint of step {step}; there are {', '.join(map(str, steps))}"
        )
    described = _described(workdir)
    try:
        decoder = _read_decoder(workdir, step, DecoderConfig.from_hf(read_config(described)))
    except (OSError, ValueError) as error:
        if step in saved_steps(workdir):
            raise
        raise UserError(
            f"the run has removed its checkpoint of step {step} meanwhile, to keep the latest; run this again"
        ) from error
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        save_decoder(partial, decoder, dtype=dtype, shard_size=shard_size)
        for file in described.iterdir():
            if file.is_file() and not _WRITTEN_ANEW.fullmatch(file.name):
                shutil.copyfile(file, partial / file.name)
        os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return f"wrote {out}: step {step}, {dtype} (sha256 {folder_hash(out)[:12]})"


def parse_size(text: str) -> int:
    """Bytes of "500MB" or "5GB". Raises UserError for another form."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(MB|GB)", text.strip().upper())
    if not found or not float(found[1]):
        raise UserError(f"max_shard_size={text!r} must be a size such as 500MB or 5GB")
    return int(float(found[1]) * _UNITS[found[2]])


def _described(workdir: pathlib.Path) -> pathlib.Path:
    for name in _DESCRIBED:
        if (workdir / name / CONFIG).is_file():
            return workdir / name
    raise UserError(
        f"workdir {os.fspath(workdir)} says nowhere what its model is (no {MODEL_FILES}/{CONFIG}); start its command "
        "again, which writes that, or use the workdir of a run with a language model"
    )


def _read_decoder(workdir: pathlib.Path, step: int, config: DecoderConfig) -> Decoder:
    """What the run has to show by a checkpoint, spread over the devices of this process."""
    settings = read_json(workdir / CONFIG, "which says what the run is")
    if "average_last" in settings:
        where = rl.learned_in_checkpoint(settings)
    else:
        where = sft.learned_in_checkpoint(settings, saved_metadata(workdir, step))
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    places = shardings(state, make_mesh(data=1, fsdp=-1, devices=jax.local_devices()))
    template = nnx.from_flat_state(
        {
            path: variable.replace(
                jax.ShapeDtypeStruct(variable.shape, variable.dtype, sharding=places[path])
            )
            for path, variable in nnx.to_flat_state(state)
        }
    )
    return nnx.merge(graph, read_part(workdir, step, where, template))
