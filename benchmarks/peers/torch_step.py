"""A GRPO step in torch and transformers with SDPA: python torch_step.py FOLDER ROWS LENGTH PROMPT.

Each line `step` is answered with the seconds of one step on rows of random tokens: log-probabilities under policy and frozen
reference, clipped ratio, k3, mean over the policy's tokens, clipped gradient, AdamW.
"""

import json
import os
import sys
import time

import numpy as np
import torch
import transformers

folder, rows, length, prompt = sys.argv[1], *map(int, sys.argv[2:5])
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
torch.set_float32_matmul_precision("highest")
policy, reference = (
    transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    ).to(device)
    for _ in range(2)
)
reference.requires_grad_(False)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
draws = np.random.default_rng(0)
tokens = draws.integers(0, policy.config.vocab_size, (rows, length))
old = draws.normal(-np.log(policy.config.vocab_size), 0.1, (rows, length)).astype(np.float32)
advantage = draws.normal(size=(rows, 1)).astype(np.float32)
tokens, old, advantage = (torch.tensor(x, device=device) for x in (tokens, old, advantage))
policy_positions = slice(prompt, None)


def logps(model):
    # Only positions that predict a policy token go through the head.
    hidden = model.model(tokens, use_cache=False).last_hidden_state[:, prompt - 1 : -1]
    logits = model.lm_head(hidden)
    return torch.log_softmax(logits, -1).gather(-1, tokens[:, policy_positions, None])[..., 0]


def step():
    with torch.no_grad():
        reference_logps = logps(reference)
    policy_logps = logps(policy)
    ratio = torch.exp(policy_logps - old[:, policy_positions])
    clipped = torch.clamp(ratio, 1 - 0.2, 1 + 0.28)
    log_ratio = reference_logps - policy_logps
    kl = torch.exp(log_ratio) - log_ratio - 1
    loss = (0.1 * kl - torch.minimum(ratio * advantage, clipped * advantage)).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


for line in sys.stdin:
    if line.strip() == "ready":
        print(json.dumps({"versions": f"transformers {transformers.__version__}, torch {torch.__version__}"}))
    else:
        began = time.perf_counter()
        loss = step()
        if device == "cuda":
            torch.cuda.synchronize()
        print(json.dumps({"seconds": time.perf_counter() - began, "loss": loss}))
    sys.stdout.flush()
