"""Tunix's Sampler, greedy: python tunix_sampler.py FOLDER BATCH PROMPT NEW. Each line of input is answered with the seconds.

- `sample` writes NEW tokens after each prompt; `greedy` also returns them.
- `turns A B C ...` runs prompts of the lengths A, B, C, ... in turn, with NEW tokens after each. This is a loop that prefills the
  whole history at every turn. PROMPT is the longest length.
"""

import importlib.metadata
import json
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.qwen2.model import ModelConfig, Qwen2
from tunix.models.qwen2.params import create_model_from_safe_tensors

folder, batch, prompt, new = sys.argv[1], *map(int, sys.argv[2:5])
hf = json.loads(pathlib.Path(folder, "config.json").read_text())
config = ModelConfig(
    num_layers=hf["num_hidden_layers"],
    vocab_size=hf["vocab_size"],
    embed_dim=hf["hidden_size"],
    hidden_dim=hf["intermediate_size"],
    num_heads=hf["num_attention_heads"],
    head_dim=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
    num_kv_heads=hf["num_key_value_heads"],
    rope_theta=(hf.get("rope_parameters") or hf)["rope_theta"],
    norm_eps=hf["rms_norm_eps"],
    use_tied_embedding=hf["tie_word_embeddings"],
    dtype=jnp.dtype(hf["dtype"]),
    param_dtype=jnp.dtype(hf["dtype"]),
)
prompts = np.random.default_rng(0).integers(1, hf["vocab_size"], (batch, prompt))


class Prompts:
    """A stand-in for a tokenizer: the text "7:100" is the first 100 tokens of prompt 7."""

    def encode(self, text: str, **_: object) -> list[int]:
        number, _, length = text.partition(":")
        return prompts[int(number)][: int(length)].tolist()

    def decode(self, ids: object, **_: object) -> str:
        return ""

    def bos_id(self) -> int:
        return 0  # not prepended

    def eos_id(self) -> int:
        return -1

    def pad_id(self) -> int:
        return -2  # no real token, since written padding tokens would be removed from the output


try:
    model = create_model_from_safe_tensors(folder, config, None)
    weights = "the same weights"
except Exception as error:  # the time does not depend on the weights
    print(f"random weights: {error!r}", file=sys.stderr)
    model, weights = Qwen2(config, rngs=nnx.Rngs(0)), "random weights"
samplers: dict[int, Sampler] = {}


def sample(length: int) -> list:
    """Write NEW tokens after the first `length` tokens of each prompt. The cache is as short as possible,
    since each step reads all of it."""
    if length not in samplers:
        cache = CacheConfig(
            cache_size=length + new,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )
        samplers[length] = Sampler(model, Prompts(), cache)
    out = samplers[length](
        [f"{i}:{length}" for i in range(batch)],
        max_generation_steps=new,
        max_prompt_length=length,
        eos_tokens=[-1],
        temperature=0.0,
    )
    if any(len(row) != new for row in out.tokens):
        raise RuntimeError(f"{[len(row) for row in out.tokens]} tokens, not {new} each")
    return out.tokens


for line in sys.stdin:
    command, *lengths = line.split()
    if command == "ready":
        versions = ", ".join(f"{n} {importlib.metadata.version(n)}" for n in ("google-tunix", "jax"))
        answer: dict = {"versions": f"{versions}, {weights}", "device": jax.default_backend()}
    else:
        began = time.perf_counter()
        for length in map(int, lengths or [prompt]):
            out = sample(length)
        answer = {"seconds": time.perf_counter() - began}
        if command == "greedy":
            answer["tokens"] = [np.asarray(row).tolist() for row in out]
    print(json.dumps(answer))
    sys.stdout.flush()
