"""Hugging Face generate: python hf_generate.py FOLDER BATCH PROMPT NEW; a line in, seconds and the first row's tokens out."""

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
for line in sys.stdin:
    if line.strip() == "ready":
        print(json.dumps({"versions": f"transformers {transformers.__version__}, torch {torch.__version__}"}))
    else:
        began = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=line.strip() == "sample",
                pad_token_id=0,
            )
        if device == "cuda":
            torch.cuda.synchronize()
        print(json.dumps({"seconds": time.perf_counter() - began, "tokens": out[:, prompt:].tolist()}))
    sys.stdout.flush()
