"""Folders in several files: written and read as transformers does, replaced whole or not at all, broken ones refused."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from rrl.errors import UserError
from rrl.models.hf import folder_hash, load_decoder, save_decoder
from rrl.models.weights import SafetensorsFolder
from rrl.parallel.mesh import make_mesh
from tests.models.small import SMALL, filled

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SIZE = 4000
"""Bytes of a shard, so that SMALL has several."""


def leaves(decoder):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(decoder))]


def same(first, second):
    return all(map(np.array_equal, leaves(first), leaves(second)))


@pytest.fixture
def sharded(tmp_path):
    save_decoder(tmp_path, filled(SMALL), shard_size=SIZE)
    return tmp_path


def test_shards_hold_what_the_one_file_holds_and_keep_to_their_size(sharded, tmp_path_factory):
    whole = tmp_path_factory.mktemp("whole")
    save_decoder(whole, filled(SMALL))
    index = json.loads((sharded / INDEX).read_text())
    files = sorted(sharded.glob("model-*.safetensors"))
    assert len(files) > 3 and files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    tensors = [load_file(file) for file in files]
    sizes = [[tensor.nbytes for tensor in part.values()] for part in tensors]
    assert all(sum(size) <= SIZE or len(size) == 1 for size in sizes)
    assert index["metadata"]["total_size"] == sum(map(sum, sizes))
    assert index["weight_map"] == {name: f.name for f, part in zip(files, tensors) for name in part}
    single = load_file(whole / WEIGHTS)
    joined = {name: tensor for part in tensors for name, tensor in part.items()}
    assert joined.keys() == single.keys()
    assert all(np.array_equal(joined[name], single[name]) for name in single)
    assert same(load_decoder(sharded), filled(SMALL))


def test_an_older_export_leaves_nothing_behind_whatever_its_form(sharded):
    for seed, size in ((1, SIZE // 2), (2, 10**9), (3, SIZE), (4, 10**9)):
        save_decoder(sharded, filled(SMALL, seed), shard_size=size)
        assert same(load_decoder(sharded), filled(SMALL, seed))
        names = {file.name for file in sharded.iterdir()} - {"config.json", "generation_config.json"}
        single = size == 10**9
        expected = (
            {WEIGHTS}
            if single
            else {INDEX, *json.loads((sharded / INDEX).read_text())["weight_map"].values()}
        )
        assert names == expected


def test_an_export_that_fails_leaves_the_folder_as_it_was(sharded):
    before, names = folder_hash(sharded), sorted(sharded.iterdir())
    large = filled(SMALL)
    large.norm[...] = large.norm[...] + 1e5
    with pytest.raises(UserError, match=r"model\.norm\.weight has values too large for float16"):
        save_decoder(sharded, large, dtype=jnp.float16, shard_size=SIZE)
    with pytest.raises(UserError, match="dtype=int8 cannot be written; choose float32"):
        save_decoder(sharded, large, dtype=jnp.int8)
    assert (folder_hash(sharded), sorted(sharded.iterdir())) == (before, names)


@pytest.mark.parametrize("at", [0, 3])
def test_a_kill_while_files_take_their_names_never_leaves_a_folder_that_loads_wrong(sharded, monkeypatch, at):
    replaced, replace = [], os.replace

    def killed(source, target):
        if len(replaced) == at:
            raise KeyboardInterrupt
        replaced.append(target)
        replace(source, target)

    monkeypatch.setattr("os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save_decoder(sharded, filled(SMALL, seed=1), shard_size=SIZE)
    with pytest.raises(UserError, match=f"no {WEIGHTS} and no {INDEX}"):
        load_decoder(sharded)


@pytest.mark.parametrize("sizes", [(8, 1, 1), (1, 8, 1), (2, 1, 4), (1, 1, 8)], ids=str)
def test_a_sharded_folder_on_any_mesh_is_what_it_is_on_one_device_and_each_part_is_read_once(
    sharded, sizes, monkeypatch
):
    counted, read = [], SafetensorsFolder.read

    def counting(self, *arguments):
        value = read(self, *arguments)
        counted.append(value.nbytes)
        return value

    monkeypatch.setattr(SafetensorsFolder, "read", counting)
    mesh = make_mesh(
        *sizes
    )  # tensor 4 and 8 do not divide the 2 kv heads; nothing divides the vocabulary of 53
    decoder = load_decoder(sharded, mesh=mesh)
    assert same(decoder, filled(SMALL))
    assert sum(counted) == json.loads((sharded / INDEX).read_text())["metadata"]["total_size"]
    assert decoder.layers.gate[...].sharding.is_fully_replicated == (sizes[0] == 8)
    save_decoder(sharded, decoder)
    assert same(load_decoder(sharded), filled(SMALL))


def move(folder, name, change):
    """Rewrites the shard that holds a tensor."""
    file = folder / json.loads((folder / INDEX).read_text())["weight_map"][name]
    tensors = load_file(file)
    change(tensors, name)
    save_file(tensors, file)
    return file.name


def to_int8(tensors, name):
    tensors[name] = tensors[name].astype(np.int8)


def to_other_shape(tensors, name):
    tensors[name] = tensors[name][:5]


NORM, UP = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def untouched(monkeypatch):
    """Whatever is refused is refused before a tensor is read."""
    monkeypatch.setattr(SafetensorsFolder, "read", lambda *_: pytest.fail("a tensor was read"))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (NORM, to_int8, r"{file}: tensor model.norm.weight has dtype I8, .*F32.*quantized"),
        (
            NORM,
            to_other_shape,
            r"{file}: tensor model.norm.weight has shape \(5,\), but config.json requires \(16,\)",
        ),
        (
            UP,
            lambda t, name: t.pop(name),
            r"{file}: tensor model.layers.1.mlp.up_proj.weight, which .*index.*is not",
        ),
        (UP, lambda t, name: t.update(odd=t[name][:2]), r"do not belong.*: odd \(2, 16\) in {file}"),
        (
            UP,
            lambda t, name: t.update({NORM: t[name]}),
            r"tensor model.norm.weight is in two files, .*{file}",
        ),
    ],
)
def test_a_broken_shard_is_named_with_its_tensor(sharded, untouched, name, change, message):
    file = move(sharded, name, change)
    with pytest.raises(UserError, match=message.replace("{file}", file)):
        load_decoder(sharded)


def test_a_truncated_shard_is_named_with_the_tensor_that_lies_beyond_its_end(sharded, untouched):
    file = sorted(sharded.glob("model-*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(
        UserError, match=rf"{file.name} \(\d+ bytes\) is truncated.*tensor model\..* would be in bytes"
    ):
        load_decoder(sharded)


def test_a_tensor_that_neither_index_nor_shard_has_is_missing_with_its_shape(sharded, untouched):
    move(sharded, UP, lambda tensors, name: tensors.pop(name))
    index = json.loads((sharded / INDEX).read_text())
    del index["weight_map"][UP]
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"lack.*: model.layers.1.mlp.up_proj.weight \(24, 16\);"):
        load_decoder(sharded)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model_type", "gemma", r"model_type='gemma' is not supported; choose one of llama, qwen2, qwen3"),
        ("quantization_config", {"quant_method": "gptq"}, r"quantization_config \(quant_method='gptq'\)"),
    ],
)
def test_a_model_that_is_none_of_ours_is_refused_by_its_config(sharded, untouched, field, value, message):
    config = json.loads((sharded / "config.json").read_text())
    (sharded / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(UserError, match=message):
        load_decoder(sharded)


@pytest.mark.parametrize("index", [{}, {"weight_map": {NORM: 5}}])
def test_an_index_without_a_map_to_files_is_refused(sharded, untouched, index):
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match=rf"{INDEX}: no weight_map"):
        load_decoder(sharded)
