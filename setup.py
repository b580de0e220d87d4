"""Packaging: what the main job needs is in the base; accelerators, seqio, tests and notebooks are extras."""

import pathlib
import re

from setuptools import find_packages, setup

HERE = pathlib.Path(__file__).parent
VERSION = re.search(r'__version__ = "([^"]+)"', (HERE / "rrl/__init__.py").read_text()).group(1)

BASE = [
    # jax 0.11 and later need Python 3.12, so that Python 3.11 gets 0.10.2, and 3.12 and 3.13 get 0.12.
    "jax>=0.10,<0.13",
    "flax>=0.12.8,<0.14",
    "optax>=0.2.8,<0.4",
    "orbax-checkpoint>=0.12.8,<0.14",
    "tensorstore>=0.1.86",
    "numpy>=2.0,<3",
    "scipy>=1.13,<2",
    "jaxtyping>=0.3,<0.4",
    "ml-collections>=1.1,<2",
    "absl-py>=2.1,<3",
    "transformers>=5.0,<6",
    "tokenizers>=0.22,<0.24",
    "jinja2>=3.1,<4",
    "scann>=1.4.2,<1.5",
    "bm25s>=0.3,<0.4",
    "PyStemmer>=3.0,<4",
    "regex>=2024.4",
    "matplotlib>=3.9,<4",
    "tensorboardX>=2.6,<3",
    "tqdm>=4.66,<5",
]

EXTRAS = {
    "cuda12": ["jax[cuda12]>=0.10,<0.13"],
    "tpu": ["jax[tpu]>=0.10,<0.13"],
    # scann's own extra chooses the TensorFlow its shared objects were built against; another breaks `import scann`.
    "seqio": ["seqio>=0.0.20,<0.1", "scann[tf]>=1.4.2,<1.5"],
    "gguf": ["gguf>=0.17,<1"],
    "notebooks": ["jupyter>=1.1,<2", "nbclient>=0.10,<1", "ipykernel>=6.29,<8"],
    # Cluster launches need nothing yet beyond the base.
    "launch": [],
    # transformers reads GGUF files with accelerate only.
    "parity": ["torch>=2.6,<3", "accelerate>=1.10,<2", "sentence-transformers>=5,<7", "faiss-cpu>=1.10,<2"],
    "test": [
        "gguf>=0.17,<1",
        "safetensors>=0.6,<1",
        "pytest>=8.3,<10",
        "pytest-timeout>=2.3,<3",
        "pytest-xdist>=3.6,<4",
        "hypothesis>=6.120,<7",
        "ruff>=0.14,<0.18",
        "mypy>=1.18,<3",
        "import-linter>=2.5,<3",
        "nbclient>=0.10,<1",
        "ipykernel>=6.29,<8",
    ],
}

setup(
    name="rrl",
    version=VERSION,
    description="Reinforcement learning of search agents in JAX.",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    classifiers=[f"Programming Language :: Python :: {version}" for version in ("3.11", "3.12", "3.13")],
    packages=find_packages(include=["rrl", "rrl.*"]),
    package_data={
        "rrl": ["py.typed"],
        "rrl.report": ["*.css", "*.js"],
        "rrl.models.cpu": ["*.cc", "*.h"],
        "rrl.recipes": ["prompts/*.txt"],
    },
    install_requires=BASE,
    extras_require=EXTRAS,
)
