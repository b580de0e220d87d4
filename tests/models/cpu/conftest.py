import jax.numpy as jnp
import pytest

from rrl.models.cpu.layers import can_attend


@pytest.fixture
def compiled():
    """Skips tests of the CPU kernels without a C++ compiler."""
    if not can_attend(jnp.float32, 16):
        pytest.skip("this machine has no C++ compiler")
