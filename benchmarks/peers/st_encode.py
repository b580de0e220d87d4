"""sentence-transformers over a folder: python st_encode.py FOLDER TEXTS.

Each line of input is answered with the seconds as JSON; the embeddings are written to a file.
"""

import json
import os
import pathlib
import sys
import time

import numpy as np
import sentence_transformers
import torch
from sentence_transformers import SentenceTransformer, models

folder, texts = sys.argv[1], json.loads(pathlib.Path(sys.argv[2]).read_text())
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
body = models.Transformer(folder, max_seq_length=256)
width = body.get_word_embedding_dimension()
model = SentenceTransformer(modules=[body, models.Pooling(width), models.Normalize()])
for line in sys.stdin:
    if line.strip() == "ready":
        name = f"sentence-transformers {sentence_transformers.__version__}, torch {torch.__version__}"
        print(json.dumps({"versions": f"{name}, {model.device}"}))
    else:
        began = time.perf_counter()
        embeddings = model.encode(texts, batch_size=32, convert_to_numpy=True, show_progress_bar=False)
        took = time.perf_counter() - began
        np.save(sys.argv[2] + ".npy", embeddings)
        print(json.dumps({"seconds": took}))
    sys.stdout.flush()
