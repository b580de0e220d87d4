"""faiss-cpu over stored vectors. Each line "flat K" or "ivf NPROBE K" is answered with the seconds; the
ids are written to a file."""

import json
import sys
import time

import faiss
import numpy as np

vectors = np.load(sys.argv[1] + "/index/embeddings.npy")
queries = np.load(sys.argv[1] + "/queries.npy")
leaves = round(len(vectors) ** 0.5)
flat = faiss.IndexFlatIP(vectors.shape[1])
flat.add(vectors)
began = time.perf_counter()
ivf = faiss.IndexIVFFlat(
    faiss.IndexFlatIP(vectors.shape[1]), vectors.shape[1], leaves, faiss.METRIC_INNER_PRODUCT
)
ivf.train(vectors[:: max(1, len(vectors) // (100 * leaves))].copy())
ivf.add(vectors)
built = time.perf_counter() - began

for line in sys.stdin:
    kind, *numbers = line.split()
    answer = {"version": faiss.__version__, "leaves": leaves, "build_seconds": built}
    if kind != "ready":
        index, k = (flat, int(numbers[0])) if kind == "flat" else (ivf, int(numbers[1]))
        if kind == "ivf":
            ivf.nprobe = int(numbers[0])
        began = time.perf_counter()
        _, ids = index.search(queries, k)
        answer = {"seconds": time.perf_counter() - began}
        np.save(sys.argv[1] + "/found.npy", ids)
    print(json.dumps(answer), flush=True)
