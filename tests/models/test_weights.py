"""Sharded folders: compatible with transformers, replaced atomically, and refused if broken."""

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
"""Bytes per shard, small enough that SMALL has several shards."""


def leaves(decoder):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(decoder))]


def same(first, second):
    return all(map(np.array_equal, leaves(first), leaves(second)))


@pytest.fixture
def sharded(tmp_path):
    save_decoder(tmp_path, filled(SMALL), shard_size=SIZE)
    return tmp_path


def test_shards_contain_the_same_tensors_as_a_single_file_and_respect_their_size(sharded, tmp_path_factory):
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


def test_no_file_of_an_older_export_is_left(sharded):
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


def test_an_export_is_written_to_the_current_folder_although_the_checkout_has_one_of_that_name(
    tmp_path, monkeypatch
):
    checkout, work = tmp_path / "checkout", tmp_path / "work"
    monkeypatch.setattr("rrl.files.CHECKOUT", checkout)
    work.mkdir()
    monkeypatch.chdir(work)
    save_decoder(checkout / "assets" / "model", filled(SMALL))
    before = folder_hash(checkout / "assets" / "model")
    save_decoder("assets/model", filled(SMALL, 1))
    assert same(load_decoder(work / "assets" / "model"), filled(SMALL, 1))
    assert folder_hash(checkout / "assets" / "model") == before


def test_a_failed_export_does_not_change_the_folder(sharded):
    before, names = folder_hash(sharded), sorted(sharded.iterdir())
    large = filled(SMALL)
    large.norm[...] = large.norm[...] + 1e5
    with pytest.raises(UserError, match=r"model\.norm\.weight has values too large for float16"):
        save_decoder(sharded, large, dtype=jnp.float16, shard_size=SIZE)
    with pytest.raises(UserError, match="dtype=int8 cannot be written; choose float32"):
        save_decoder(sharded, large, dtype=jnp.int8)
    assert (folder_hash(sharded), sorted(sharded.iterdir())) == (before, names)


@pytest.mark.parametrize("at", [0, 3])
def test_a_kill_while_files_are_renamed_never_leaves_a_folder_that_loads_wrongly(sharded, monkeypatch, at):
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
def test_a_sharded_folder_loads_equally_on_any_mesh_and_each_part_is_read_once(sharded, sizes, monkeypatch):
    counted, read = [], SafetensorsFolder.read

    def counting(self, *arguments):
        value = read(self, *arguments)
        counted.append(value.nbytes)
        return value

    monkeypatch.setattr(SafetensorsFolder, "read", counting)
    mesh = make_mesh(
        *sizes
    )  # tensor = 4 and 8 do not divide 2 kv heads; no axis divides the vocabulary of 53
    decoder = load_decoder(sharded, mesh=mesh)
    assert same(decoder, filled(SMALL))
    assert sum(counted) == json.loads((sharded / INDEX).read_text())["metadata"]["total_size"]
    assert decoder.layers.gate[...].sharding.is_fully_replicated == (sizes[0] == 8)
    save_decoder(sharded, decoder)
    assert same(load_decoder(sharded), filled(SMALL))


def move(folder, name, change):
    """Rewrites the shard that contains a tensor."""
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
    """Fails if a tensor is read, since folders must be refused before."""
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
            r"{file}: tensor model.layers.1.mlp.up_proj.weight, which .*index.*is missing",
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


def test_a_truncated_shard_is_named_with_the_tensor_beyond_its_end(sharded, untouched):
    file = sorted(sharded.glob("model-*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(
        UserError, match=rf"{file.name} \(\d+ bytes\) is truncated.*tensor model\..* would be in bytes"
    ):
        load_decoder(sharded)


def test_a_tensor_missing_in_index_and_shards_is_named_with_its_shape(sharded, untouched):
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
def test_an_unsupported_model_is_refused_by_its_config(sharded, untouched, field, value, message):
    config = json.loads((sharded / "config.json").read_text())
    (sharded / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(UserError, match=message):
        load_decoder(sharded)


@pytest.mark.parametrize("index", [{}, {"weight_map": {NORM: 5}}])
def test_an_index_without_a_weight_map_is_refused(sharded, untouched, index):
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match=rf"{INDEX}: no weight_map"):
        load_decoder(sharded)
