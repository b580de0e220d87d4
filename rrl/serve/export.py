"""Exports a checkpoint of a training run as a Hugging Face folder, with tokenizer and recipe card. Read
`export` first.

A run stores all files of its model's folder except the weights in `model_files/` of its workdir. Any
checkpoint can therefore be exported while the run continues, or after it was killed.
"""

import os
import pathlib
import re
import shutil
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from rrl.config.sections import build
from rrl.errors import UserError
from rrl.files import saving, shipped
from rrl.models.config import DecoderConfig, matrix_parameters
from rrl.models.decoder import Decoder
from rrl.models.hf import (
    folder_hash,
    load_decoder,
    read_decoder_config,
    save_decoder,
)
from rrl.models.lora import LoraConfig, add_lora
from rrl.models.weights import CONFIG_FILE, read_json
from rrl.parallel.memory import device_memory, require_memory
from rrl.parallel.mesh import make_mesh
from rrl.parallel.rules import shardings
from rrl.rl.memory import F32
from rrl.rl.optim import OptimConfig, split_trained
from rrl.rollout.memory import model_bytes
from rrl.runs.checkpoint_reader import read_part, saved_metadata, saved_steps
from rrl.runs.model_files import MODEL_FILES, START_FILE
from rrl.runs.workdir import read_config, read_identity, refuse_unwritable
from rrl.sft import trainer as sft_trainer
from rrl.train import learner

_MODEL_FOLDERS = (MODEL_FILES, "policy", "model")
"""Folders of a workdir that may hold the model's files. Workdirs of older versions have no `model_files/`."""
_NOT_COPIED = re.compile(r"start\.json|config\.json|generation_config\.json|model.*\.safetensors.*|\..*")
"""Files that are not copied from the model's folder: the export writes its own, or they belong to the run only."""
_UNITS = {"MB": 10**6, "GB": 10**9}


def export(
    workdir: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: str = "float32",
    step: int | None = None,
    max_shard_size: str = "5GB",
    start: str | pathlib.Path | None = None,
) -> str:
    """Write a checkpoint as a folder for transformers, vLLM and rrl's own `policy=`.

    The workdir is only read. The folder is written under a temporary name and renamed when it is complete.

    Args:
      workdir: of launch/train.py or launch/sft.py; the run may still be active.
      out: a folder that does not exist yet or is empty.
      dtype: dtype of the weights: float32, bfloat16 or float16.
      step: step of the checkpoint; None: the latest. A run with weight averaging exports its
        averaged parameters, a run with early stopping its best ones.
      max_shard_size: maximum size of one weight file, in MB or GB.
      start: new path of the folder that the run started from, if it was moved. Needed only if
        parameters were frozen or adapters trained.

    Returns:
      One line that describes the folder.

    Raises:
      UserError: no such workdir, checkpoint or step; a damaged config.json; `out` is not empty or
        cannot be created; an invalid size.
      SaveError: the folder could not be written.
    """
    workdir, out = pathlib.Path(workdir), pathlib.Path(out)
    shard_size = parse_size(max_shard_size)
    refuse_unwritable(out, "out")
    if out.exists() and any(out.iterdir()):
        raise UserError(f"out={os.fspath(out)} is not an empty folder; choose one that does not exist yet")
    steps = saved_steps(workdir)
    step = steps[-1] if step is None else step
    if step not in steps:
        raise UserError(
            f"workdir {os.fspath(workdir)} has no checkpoint of step {step}; its steps are {', '.join(map(str, steps))}"
        )
    model_folder = _model_folder(workdir)
    try:
        decoder = _read_decoder(workdir, step, model_folder, start)
    except (OSError, ValueError) as error:
        if step in saved_steps(workdir):
            raise
        raise UserError(
            f"the run has just deleted its checkpoint of step {step}, since it keeps only the latest; run this again"
        ) from error
    with saving(out):
        _write(out, decoder, model_folder, dtype, shard_size)
    return f"wrote {out}: step {step}, {dtype} (sha256 {folder_hash(out)[:12]})"


def _write(
    out: pathlib.Path, decoder: Decoder, model_folder: pathlib.Path, dtype: str, shard_size: int
) -> None:
    """Write the folder under a temporary name, and rename it when it is complete."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        save_decoder(partial, decoder, dtype=dtype, shard_size=shard_size)
        for file in model_folder.iterdir():
            if file.is_file() and not _NOT_COPIED.fullmatch(file.name):
                shutil.copyfile(file, partial / file.name)
        os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def parse_size(text: str) -> int:
    """Return the bytes of "500MB" or "5GB". Raises UserError for any other form."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(MB|GB)", text.strip().upper())
    if not match or not float(match[1]):
        raise UserError(f"max_shard_size={text!r} must be a size such as 500MB or 5GB")
    return int(float(match[1]) * _UNITS[match[2]])


def _model_folder(workdir: pathlib.Path) -> pathlib.Path:
    for name in _MODEL_FOLDERS:
        if (workdir / name / CONFIG_FILE).is_file():
            return workdir / name
    raise UserError(
        f"workdir {os.fspath(workdir)} does not describe its model (no {MODEL_FILES}/{CONFIG_FILE}); run its training command "
        "again, which writes that file, or give the workdir of a run with a language model"
    )


def _read_decoder(
    workdir: pathlib.Path, step: int, model_folder: pathlib.Path, start: str | pathlib.Path | None
) -> Decoder:
    """Return the model of a checkpoint, sharded over the devices of this process."""
    settings, identity = read_config(workdir), read_identity(workdir)
    if "optim" not in settings:
        raise UserError(f"{workdir / CONFIG_FILE} has no section optim; give the workdir of a training run")
    if "average_last" in settings:  # a field of reinforcement learning only
        params_path = learner.learned_params_path(settings)
    else:
        params_path = sft_trainer.learned_params_path(settings, saved_metadata(workdir, step))
    mesh = make_mesh(data=1, fsdp=-1, devices=jax.local_devices())
    frozen, lora = _frozen_and_lora(workdir, settings["optim"], identity.get("lora", {}))
    config = read_decoder_config(model_folder)
    _require_memory(workdir, config, lora, mesh)
    if frozen or lora.rank:
        decoder = load_decoder(_start_folder(workdir, model_folder, start), mesh=mesh)
        add_lora(decoder, lora, rngs=nnx.Rngs(0))
    else:
        decoder = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    graph, trained, untrained = split_trained(decoder, frozen)
    sharding_of = shardings(trained, mesh)
    template = nnx.from_flat_state(
        {
            path: leaf.replace(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding_of[path]))
            for path, leaf in nnx.to_flat_state(trained)
        }
    )
    return nnx.merge(graph, read_part(workdir, step, params_path, template), untrained)


def _require_memory(workdir: pathlib.Path, config: DecoderConfig, lora: LoraConfig, mesh: Mesh) -> None:
    """Raise UserError, with the numbers, if the model of a checkpoint needs more memory than the devices have."""
    needs = {
        "parameters": model_bytes(config, "float32") / mesh.size,
        # `merge_lora` makes new kernels.
        "merged kernels": F32 * matrix_parameters(config) / mesh.size if lora.rank else 0.0,
    }
    fix = "export it on a machine with more memory"
    require_memory(needs, device_memory(mesh), f"workdir {os.fspath(workdir)}: its export", fix)


def _frozen_and_lora(workdir: pathlib.Path, optim: Any, lora: Any) -> tuple[tuple[str, ...], LoraConfig]:
    """Return a run's `optim.frozen` (patterns of frozen parameters) and its LoRA config.

    Args:
      workdir: of the run, for error messages.
      optim, lora: these sections of its config.json.

    Raises UserError for a damaged section.
    """
    try:
        for name, section in (("optim", optim), ("lora", lora)):
            if not isinstance(section, dict):
                raise UserError(f"{name}={section!r} must be a JSON object")
        frozen = build(OptimConfig, {"frozen": optim.get("frozen", ())}, "optim").frozen
        return frozen, build(LoraConfig, lora, "lora")
    except UserError as error:
        raise UserError(f"{workdir / CONFIG_FILE}: {error}; restore the file that the run wrote") from error


def _start_folder(
    workdir: pathlib.Path, model_folder: pathlib.Path, new_path: str | pathlib.Path | None
) -> pathlib.Path:
    """Return the folder that a run started from, `new_path` if it was moved. Raises UserError if its weights have changed."""
    if not (model_folder / START_FILE).is_file():
        raise UserError(
            f"workdir {os.fspath(workdir)}: the run froze parameters that were randomly initialised. Its checkpoints do not "
            "hold them; only the model folder that the run writes at its end does"
        )
    expected = read_json(
        model_folder / START_FILE, "the file that names the folder from which the run started"
    )
    folder = shipped(new_path or expected["folder"])
    sha256 = folder_hash(folder) if (folder / CONFIG_FILE).is_file() else "none"
    if sha256 != expected["sha256"]:
        raise UserError(
            f"start={os.fspath(folder)} (sha256 {sha256[:12]}) is not what the run started from (sha256 "
            f"{expected['sha256'][:12]}), which holds the parameters that it froze; give --start=FOLDER"
        )
    return folder
