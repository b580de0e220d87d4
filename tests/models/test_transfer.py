"""Tests of reading tensors ahead of their use."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rrl.models import transfer
from rrl.models.hf import load_decoder, save_decoder
from rrl.models.weights import ALIGNMENT, SafetensorsFolder
from tests.models.small import SMALL, filled


def test_groups_are_yielded_in_order_and_only_the_next_one_is_read_meanwhile():
    read, second = [], threading.Event()

    def reader(group, index):
        def call():
            read.append(group)
            if group == 1:
                second.set()
            return group, index

        return call

    groups = [[reader(group, index) for index in range(3)] for group in range(4)]
    results = transfer._read_ahead(groups)
    assert next(results) == ((0, 0), (0, 1), (0, 2))
    assert second.wait(10), "the second group is read while the first one is used"
    assert not {2, 3} & set(read)
    assert list(results) == [tuple((group, index) for index in range(3)) for group in (1, 2, 3)]
    assert sorted(read) == [group for group in range(4) for _ in range(3)]


def test_an_error_of_a_reader_is_raised_in_the_loading_thread(tmp_path, monkeypatch):
    save_decoder(tmp_path, filled(SMALL))

    def fail(self, name, index=()):
        raise OSError(f"cannot read {name}")

    monkeypatch.setattr(SafetensorsFolder, "read", fail)
    with pytest.raises(OSError, match=r"cannot read model\.embed_tokens\.weight"):
        load_decoder(tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_jax_uses_a_read_tensor_without_copying_it(tmp_path, dtype):
    save_decoder(tmp_path, filled(SMALL), dtype=dtype)
    weights = SafetensorsFolder(tmp_path)
    for name in weights.names():
        tensor = weights.read(name)
        assert tensor.ctypes.data % ALIGNMENT == 0 and tensor.dtype == jnp.dtype(dtype)
        assert tensor.nbytes == weights.size(name)
        assert jax.device_put(tensor).unsafe_buffer_pointer() == tensor.ctypes.data
    whole = weights.read("model.norm.weight")
    np.testing.assert_array_equal(weights.read("model.norm.weight", (slice(1, 3),)), whole[1:3])
