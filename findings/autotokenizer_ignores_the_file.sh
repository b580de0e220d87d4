#!/usr/bin/env bash
# AutoTokenizer ignores parts of tokenizer.json if the folder has a config.json of model_type qwen2.
#
# Expected: `AutoTokenizer.from_pretrained(FOLDER)` returns the tokenizer of FOLDER/tokenizer.json, in particular if
#           tokenizer_config.json names the generic class, which does so.
# Actual:   transformers 5.24.0 with tokenizers 0.23.3 (November 2026): with a config.json of model_type qwen2, Qwen2Tokenizer
#           is used. It keeps the vocabulary and merges of the file, but replaces its pre-tokenizer and normalizer by Qwen's
#           own pre-tokenizer and NFC. After saving and loading, the same text becomes other tokens, without a warning.
#           Without the config.json this does not happen.
# Impact:   a policy with its own tokenizer (a small one, a cut or extended vocabulary) is trained with one tokenizer and served
#           with another. It also hides a missing normalizer, as in tokenizer.json files converted from GGUF: transformers adds
#           NFC, programs that read only the file do not.
# In rrl:   rrl/models/tokenizer.py (`_declared_class`) loads a folder that declares the generic class with that class, and warns
#           if Qwen's vocabulary comes with a tokenizer.json without a normalizer.
#
# Exit code 0 while the behaviour persists, 1 otherwise.
set -euo pipefail
unset PYTHONPATH
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q 'transformers==5.24.0' 'tokenizers==0.23.3'
cd "$folder"
HF_HUB_OFFLINE=1 TRANSFORMERS_NO_ADVISORY_WARNINGS=1 "$folder/venv/bin/python" - <<'END'
import json
import pathlib
import sys

import tokenizers
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

print("transformers", transformers.__version__, "tokenizers", tokenizers.__version__)
made = Tokenizer(models.BPE())
made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
made.decoder = decoders.ByteLevel()
alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False)
made.train_from_iterator(["born in 1931, 1942, 1953 and 1964"] * 9, trainer)
saved = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")
saved.save_pretrained("folder")
print("declared:", json.loads(pathlib.Path("folder/tokenizer_config.json").read_text())["tokenizer_class"])

TEXTS = ("born in 1931", "cafe\u0301")
before = transformers.AutoTokenizer.from_pretrained("folder")
pathlib.Path("folder/config.json").write_text('{"model_type": "qwen2"}')
after = transformers.AutoTokenizer.from_pretrained("folder")
changed = []
for name, loaded in (("without config.json", before), ("beside a config.json of qwen2", after)):
    same = [loaded.encode(text) == saved.encode(text) for text in TEXTS]
    changed.append(not all(same))
    print(f"{name}: {type(loaded).__name__}, normalizer {loaded.backend_tokenizer.normalizer}")
    for text, equal in zip(TEXTS, same):
        print(f"    {text!r}: {loaded.convert_ids_to_tokens(loaded.encode(text))} {'as saved' if equal else 'NOT AS SAVED'}")
sys.exit(changed != [False, True])
END
