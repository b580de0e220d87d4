"""Before jax is imported: threads enough for host callbacks, and eight virtual devices, so that sharding is tested."""

import os

os.environ.setdefault("NPROC", "32")
_FLAG = "--xla_force_host_platform_device_count"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}=8".strip()
