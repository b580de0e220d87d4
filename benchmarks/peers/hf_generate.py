"""Hugging Face generate: python hf_generate.py FOLDER BATCH PROMPT NEW; a line in, seconds and the tokens out.

The line `turns A B C` runs prompts of each of the lengths A, B, C, ... in turn, with NEW tokens drawn after them, as a loop does
that reads the whole history again at every turn; PROMPT is the longest.
"""

import json
import os
import sys
import time

import numpy as np
import torch
import transformers

folder, batch, prompt, new = sys.argv[1], *map(int, sys.argv[2:5])
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
dtype = torch.bfloat16 if device == "cuda" else torch.float32
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
tokens = np.random.default_rng(0).integers(1, model.config.vocab_size, (batch, prompt))
tokens = torch.tensor(tokens, device=device)


def generate(length: int, draw: bool) -> torch.Tensor:
    """Prompts of so many tokens, and the new ones behind them."""
    asked = tokens[:, :length]
    return model.generate(
        asked,
        attention_mask=torch.ones_like(asked),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=draw,
        pad_token_id=0,
    )


for line in sys.stdin:
    said, *lengths = line.split()
    if said == "ready":
        print(json.dumps({"versions": f"transformers {transformers.__version__}, torch {torch.__version__}"}))
    else:
        began = time.perf_counter()
        with torch.inference_mode():
            for length in map(int, lengths or [prompt]):
                out = generate(length, draw=said != "greedy")
        if device == "cuda":
            torch.cuda.synchronize()
        answer: dict = {"seconds": time.perf_counter() - began}
        if said != "turns":
            answer["tokens"] = out[:, prompt:].tolist()
        print(json.dumps(answer))
    sys.stdout.flush()
