"""Hugging Face generate: python hf_generate.py FOLDER BATCH PROMPT NEW [DTYPE].

Each line of input is answered with the seconds, as JSON.

- `sample CACHE` samples NEW tokens after each prompt.
- `split CACHE` does the same, and also returns the seconds until the first new token ("first"), which are those of the prefill.
- `greedy` decodes NEW tokens greedily after each prompt and returns them.
- `turns CACHE A B C ...` runs prompts of the lengths A, B, C, ... in turn, and samples NEW tokens after each. This is a loop that
  prefills the whole history at every turn. PROMPT is the longest length.
- `uncut CACHE LIMIT A B C ...` does the same with LIMIT tokens per turn, as a loop that cuts the text of a turn afterwards.
- `kept CACHE A B C ...` keeps the cache and prefills only new tokens, which needs texts of equal length.
- `below T U V ...` returns how far these tokens, one per prompt, lie below the best logit, in standard deviations of the logits.

CACHE is dynamic or static. On a GPU, transformers compiles the decode step of a static cache. Without DTYPE, the model has the
dtype of the folder's weights.
"""

import json
import os
import sys
import time
import traceback

import numpy as np
import torch
import transformers

folder, batch, prompt, new = sys.argv[1], *map(int, sys.argv[2:5])
dtype = sys.argv[5] if len(sys.argv) > 5 else "auto"
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
model = model.to(device).eval()
# The folder's config names an end-of-sequence token. Without one, no step has to suppress it or check for it.
model.generation_config = transformers.GenerationConfig(pad_token_id=0)
tokens = np.random.default_rng(0).integers(1, model.config.vocab_size, (batch, prompt))
tokens = torch.tensor(tokens, device=device)
GREEDY: dict = {"do_sample": False}
SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
"""Sample from the full distribution; the default of top_k is 50."""


def generate(texts: torch.Tensor, count: int = new, **options: object) -> torch.Tensor:
    """Return the texts with `count` new tokens after each."""
    out = model.generate(texts, attention_mask=torch.ones_like(texts), max_new_tokens=count, **options)
    if out.shape != (batch, texts.shape[1] + count):
        raise RuntimeError(f"{tuple(out.shape)} tokens, not {batch} x ({texts.shape[1]} + {count})")
    return out


class Clock(transformers.generation.streamers.BaseStreamer):
    """Notes the time of each call. `generate` calls it with the prompts, and then with the tokens of each step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def turns(cache: str, lengths: list[int], sampling: dict, count: int = new) -> torch.Tensor:
    """Run the turns, each from the beginning of the history. Return the new tokens of the last turn."""
    cache_option = {} if cache == "dynamic" else {"cache_implementation": cache}
    for length in lengths:
        out = generate(tokens[:, :length], count, **cache_option, **sampling)
    return out[:, length:]


def uncut(cache: str, lengths: list[int], sampling: dict) -> torch.Tensor:
    """As `turns`, with the first of `lengths` as the number of new tokens per turn."""
    return turns(cache, lengths[1:], sampling, lengths[0])


def kept(cache: str, lengths: list[int], sampling: dict) -> torch.Tensor:
    """Run the turns on one cache: each turn's text is the previous output plus new tokens."""
    keys_and_values = (
        transformers.DynamicCache(config=model.config)
        if cache == "dynamic"
        else transformers.StaticCache(config=model.config, max_cache_len=lengths[-1] + new)
    )
    text = tokens[:, :0]
    for length in lengths:
        text = torch.cat([text, tokens[:, text.shape[1] : length]], dim=1)
        text = generate(text, past_key_values=keys_and_values, **sampling)
    return text[:, length:]


def below(chosen: list[int]) -> list[float]:
    """Return how far these first tokens lie below the best logit, in standard deviations of the logits."""
    with torch.inference_mode():
        logits = model(tokens, logits_to_keep=1).logits[:, -1].float()
    own = logits.gather(-1, torch.tensor(chosen, device=device)[:, None])[:, 0]
    return ((logits.amax(-1) - own) / logits.std(-1)).tolist()


for line in sys.stdin:
    command, *rest = line.split()
    cache, *lengths = rest or ["dynamic"]
    if command == "ready":
        answer: dict = {
            "versions": f"transformers {transformers.__version__}, torch {torch.__version__}",
            "device": "gpu" if device == "cuda" else device,
        }
    elif command == "below":
        answer = {"below": below([*map(int, rest)])}
    else:
        began = time.perf_counter()
        try:
            with torch.inference_mode():
                run, sampling = (
                    {"kept": kept, "uncut": uncut}.get(command, turns),
                    GREEDY if command == "greedy" else SAMPLED,
                )
                clock = Clock()
                streamed = {"streamer": clock} if command == "split" else {}
                out = run(cache, [*map(int, lengths)] or [prompt], sampling | streamed)
            if device == "cuda":
                torch.cuda.synchronize()
            answer = {"seconds": time.perf_counter() - began}
            if command == "split":
                answer["first"] = clock.times[1] - began
            if command == "greedy":
                answer["tokens"] = out.tolist()
        except Exception as error:  # compilation needs a compiler; the dynamic cache needs none
            if cache == "dynamic":
                raise
            traceback.print_exc()
            answer = {"error": type(error).__name__}
    print(json.dumps(answer))
    sys.stdout.flush()
