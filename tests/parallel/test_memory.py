"""Tests of the memory that a process may use, and of the refusal of what needs more."""

import os

import pytest

from rrl.errors import UserError
from rrl.parallel import memory
from rrl.parallel.memory import GIB, device_memory, host_memory, require_memory
from rrl.parallel.mesh import make_mesh
from rrl.parallel.topology import open_topology
from tests.memory import limit_memory

PHYSICAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Write the list of groups and their limits: path -> content; return what the process may use."""

    def write(lines, limits):
        for path, limit in limits.items():
            file = tmp_path / "groups" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(limit)
        (tmp_path / "list").write_text("".join(f"{line}\n" for line in lines))
        return host_memory()

    monkeypatch.setattr(memory, "CGROUP_ROOT", tmp_path / "groups")
    monkeypatch.setattr(memory, "CGROUP_LIST", tmp_path / "list")
    return write


def test_without_a_limit_the_memory_is_the_machines(groups, monkeypatch, tmp_path):
    assert groups(["0::/"], {"memory.max": "max\n"}) == PHYSICAL
    monkeypatch.setattr(memory, "CGROUP_LIST", tmp_path / "missing")  # not Linux
    assert host_memory() == PHYSICAL


def test_the_smallest_limit_of_the_group_and_those_above_it_counts(groups):
    limits = {"memory.max": "max", "a/memory.max": "4096", "a/b/memory.max": "8192"}
    assert groups(["0::/a/b"], limits) == 4096


def test_limits_of_version_1_and_of_a_container_are_read(groups):
    lines = ["8:pids:/x", "4:cpu,memory:/job", "0::/"]
    limits = {"memory/job/memory.limit_in_bytes": "2048", "pids/x/memory.limit_in_bytes": "1"}
    assert groups(lines, limits) == 2048
    # A container sees its own group as the root; the path that it reads is the host's.
    limits = {
        "memory/memory.limit_in_bytes": "1024",
        "memory/job/memory.limit_in_bytes": "9223372036854771712",
    }
    assert groups(["4:memory:/docker/abc", "0::/"], limits) == 1024


def test_cpu_devices_of_a_mesh_share_the_limit_and_topologies_use_it(tmp_path, monkeypatch):
    limit_memory(monkeypatch, tmp_path, 8192)
    assert device_memory(None) == device_memory(make_mesh(devices=make_mesh().devices.flat[:1])) == 8192
    assert device_memory(make_mesh(data=8)) == 1024
    assert open_topology("cpu:1").chip.memory == 8192


def test_the_refusal_names_need_limit_parts_and_fix():
    require_memory({"parameters": GIB}, GIB, "it", "buy more")
    with pytest.raises(
        UserError,
        match=r"^it needs 3.50 GiB of memory, but 2.00 GiB are available: parameters 3.00, "
        r"KV cache 0.50 GiB; buy more$",
    ):
        require_memory(
            {"parameters": 3 * GIB, "KV cache": GIB / 2, "little": 1000.0}, 2 * GIB, "it", "buy more"
        )
