"""Before jax is imported: threads enough for host callbacks, eight virtual devices, so that sharding is tested, and LLVM's
quickest code, since tests compile for longer than they compute."""

import os

os.environ.setdefault("NPROC", "32")
for flag, value in (("--xla_force_host_platform_device_count", 8), ("--xla_backend_optimization_level", 0)):
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}={value}".strip()
