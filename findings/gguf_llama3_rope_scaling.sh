#!/usr/bin/env bash
# transformers drops the RoPE scaling of Llama 3.1 and 3.2 when it reads a GGUF file.
#
# Expected: a Llama 3.1 model read from GGUF has the scaling of its config.json (rope_type "llama3"), or reading it fails.
#           llama.cpp's converter stores the scaling as a tensor, rope_freqs.weight: a divisor of each frequency.
# Actual:   transformers 5.24.0 with gguf 0.19.0 and torch 2.13.0 (November 2026): `from_pretrained(FOLDER, gguf_file=FILE)`
#           skips the tensor without a warning. The model has rope_type "default", so that most frequencies are as much as 8
#           (Llama 3.1) or 32 (Llama 3.2) times too high.
# Impact:   the weights are right and short texts look plausible, but the model is another one than was trained: its logits are
#           wrong from the first few positions on, and long contexts are out of its range.
# In rrl:   rrl/models/gguf_config.py (`_llama3_scaling`) recovers the scaling from the tensor and refuses other divisors.
#
# Exit code 0 while the behaviour persists, 1 otherwise.
set -euo pipefail
unset PYTHONPATH
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q 'transformers==5.24.0' 'gguf==0.19.0' 'torch==2.13.0' accelerate
cd "$folder"
HF_HUB_OFFLINE=1 TRANSFORMERS_NO_ADVISORY_WARNINGS=1 "$folder/venv/bin/python" - <<'END'
import importlib.metadata
import sys

import gguf
import numpy as np
import torch
import transformers

print("transformers", transformers.__version__, "gguf", importlib.metadata.version("gguf"), "torch", torch.__version__)
VOCAB, HIDDEN, HEADS, MLP, THETA = 64, 64, 2, 96, 500_000.0
HEAD_DIM = HIDDEN // HEADS
scaling = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
shape = dict(
    vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=1, num_attention_heads=HEADS, num_key_value_heads=HEADS,
    intermediate_size=MLP, max_position_embeddings=131072, tie_word_embeddings=False,
)
config = transformers.LlamaConfig(**shape, rope_parameters={"rope_theta": THETA, **scaling})
torch.manual_seed(0)
model = transformers.LlamaForCausalLM(config).float().eval()
with torch.no_grad():
    for parameter in model.parameters():
        parameter.add_(0.3 * torch.randn(parameter.shape))

# Written as llama.cpp's convert_hf_to_gguf.py writes it.
writer = gguf.GGUFWriter("llama3.gguf", "llama")
writer.add_context_length(131072)
writer.add_block_count(1)
writer.add_embedding_length(HIDDEN)
writer.add_feed_forward_length(MLP)
writer.add_head_count(HEADS)
writer.add_head_count_kv(HEADS)
writer.add_rope_dimension_count(HEAD_DIM)
writer.add_rope_freq_base(THETA)
writer.add_layer_norm_rms_eps(config.rms_norm_eps)
writer.add_vocab_size(VOCAB)
names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
for name, tensor in model.state_dict().items():
    values = tensor.numpy()
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        values = values.reshape(HEADS, 2, HEAD_DIM // 2, HIDDEN).swapaxes(1, 2).reshape(HIDDEN, HIDDEN)
    writer.add_tensor(f"{names.get_name(name.removesuffix('.weight'))}.weight", np.ascontiguousarray(values))
turns = 8192 / (2 * np.pi * THETA ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM))
smooth = np.clip((turns - 1) / (4 - 1), 0, 1)
writer.add_tensor("rope_freqs.weight", (1 / ((1 - smooth) / 32 + smooth)).astype(np.float32))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()

read = transformers.AutoModelForCausalLM.from_pretrained(".", gguf_file="llama3.gguf", dtype=torch.float32).eval()
same = all(torch.equal(tensor, read.state_dict()[name]) for name, tensor in model.state_dict().items())
text = torch.arange(48)[None]
with torch.no_grad():
    error = (model(text).logits - read(text).logits).abs().max().item() / model(text).logits.abs().max().item()
print("weights as written:", same)
print("written:", config.rope_parameters)
print("read:   ", read.config.rope_parameters)
print(f"largest difference of the logits, 48 positions: {100 * error:.1f} % of the largest logit")
sys.exit(not (same and read.config.rope_parameters["rope_type"] == "default" and error > 1e-3))
END
