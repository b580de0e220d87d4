"""Measures encoder speed: `python -m benchmarks.encoding [--passages=256] [--rounds=5] [--st_python=PYTHON]`.

A BERT-base-shaped encoder with random weights embeds passages of the built-in world; the peer is sentence-transformers.
Rows go to RESULTS.md.
"""

import argparse
import json
import pathlib
import sys
import tempfile

import numpy as np
from flax import nnx

from benchmarks.measure import BenchmarkRow, PeerProcess, elapsed, imports, interleaved_medians, write
from rrl.miniwiki import generate
from rrl.models.config import EncoderConfig
from rrl.models.encoder import Encoder
from rrl.models.tokenizer import load_tokenizer
from rrl.retrieval.encode import TextEncoder
from rrl.retrieval.encoder_folder import save_text_encoder
from rrl.retrieval.settings import TextSettings

BERT_BASE = {
    "model_type": "bert",
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
}


def measure(args: argparse.Namespace) -> list[BenchmarkRow]:
    """Measure passages per second of this library and of sentence-transformers, and compare the embeddings."""
    what = f"BERT-base shape, float32, {args.passages} passages, passages/s"
    if not imports(args.st_python, "sentence_transformers"):
        return [BenchmarkRow(what, "", "", "not measured: no sentence_transformers", "at least 0.9x")]
    encoder = Encoder(EncoderConfig.from_hf(BERT_BASE), rngs=nnx.Rngs(0))
    settings = TextSettings(query_prefix="", passage_prefix="", query_tokens=64, passage_tokens=256)
    passages = generate("train", 3, max(50, args.passages), 1).passages[: args.passages]
    tokenizer = load_tokenizer("assets/miniwiki-encoder")
    tokenizer.chat_template = None  # otherwise sentence-transformers would apply it to the texts
    with tempfile.TemporaryDirectory() as folder:
        model = save_text_encoder(folder, TextEncoder(encoder, tokenizer, settings))
        texts = pathlib.Path(folder, "texts.json")
        texts.write_text(json.dumps([f"{p.title} {p.text}" for p in passages]))
        peer = PeerProcess(args.st_python, "st_encode.py", folder, str(texts))
        ours = model.embed_passages(passages)
        seconds_of = interleaved_medians(
            {
                "ours": lambda: elapsed(lambda: model.embed_passages(passages)),
                "theirs": lambda: peer.ask("encode")["seconds"],
            },
            args.rounds,
        )
        # The peer has saved its embeddings beside the texts.
        largest_difference = float(np.abs(ours - np.load(f"{texts}.npy")).max())
        peer.close()
    rate = {side: len(passages) / value for side, value in seconds_of.items()}
    lengths = [len(row) for row in model.tokenize_passages(passages)[0]]
    return [
        BenchmarkRow(
            f"{what} ({min(lengths)} to {max(lengths)} tokens, mean {np.mean(lengths):.0f})",
            f"{rate['ours']:.1f}",
            f"{rate['theirs']:.1f} ({peer.info['versions']})",
            f"{rate['ours'] / rate['theirs']:.2f}x",
            "at least 0.9x",
        ),
        BenchmarkRow(
            "largest difference of an embedding's entries", f"{largest_difference:.0e}", "", "", "1e-5"
        ),
    ]


def main() -> None:
    """Run the measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passages", type=int, default=256, help="number of passages")
    parser.add_argument("--rounds", type=int, default=5, help="number of timed rounds")
    parser.add_argument(
        "--st_python", default=sys.executable, help="Python interpreter with sentence-transformers"
    )
    args = parser.parse_args()
    write("Encoding passages", "python -m benchmarks.encoding", measure(args), [])


if __name__ == "__main__":
    main()
