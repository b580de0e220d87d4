"""Configs of small models with unusual shapes."""

import pytest

from rrl.models.config import DecoderConfig, EncoderConfig
from rrl.models.rope_scaling import LinearScaling, Llama3Scaling, YarnScaling

ODD = {
    "qwen2-tied": DecoderConfig(
        vocab_size=97, hidden=24, layers=3, heads=4, kv_heads=1, head_dim=6, mlp=40, max_positions=512
    ),
    "qwen2-untied-grouped": DecoderConfig(
        vocab_size=61, hidden=30, layers=2, heads=6, kv_heads=2, head_dim=8, mlp=50, tie_embeddings=False,
        rope_theta=1e6, eos_token_id=3, pad_token_id=0, max_positions=512,
    ),
    "llama-wide-heads": DecoderConfig(
        vocab_size=89, hidden=24, layers=2, heads=3, kv_heads=3, head_dim=14, mlp=33, model_type="llama",
        tie_embeddings=False, rms_eps=1e-5, max_positions=512,
    ),
    "llama3-scaled": DecoderConfig(
        vocab_size=89, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=16, mlp=48, model_type="llama",
        rope_theta=500.0, rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 64), bos_token_id=1, eos_token_id=(2, 5),
        max_positions=512,
    ),
    "qwen3": DecoderConfig(
        vocab_size=101, hidden=24, layers=2, heads=4, kv_heads=2, head_dim=16, mlp=40, model_type="qwen3",
        max_positions=512,
    ),
    "qwen2-yarn": DecoderConfig(
        vocab_size=71, hidden=24, layers=2, heads=4, kv_heads=2, head_dim=22, mlp=33, rope_theta=2000.0,
        rope_scaling=YarnScaling(4.0, 64), max_positions=512,
    ),
    "qwen3-yarn-with-all-fields": DecoderConfig(
        vocab_size=71, hidden=24, layers=2, heads=2, kv_heads=1, head_dim=32, mlp=35, model_type="qwen3",
        rope_scaling=YarnScaling(5.5, 100, 17.0, 2.5, mscale=0.7, mscale_all_dim=0.3, truncate=False), max_positions=512,
    ),
    "llama-yarn-with-attention-factor": DecoderConfig(
        vocab_size=71, hidden=24, layers=2, heads=2, kv_heads=1, head_dim=32, mlp=35, model_type="llama",
        rope_scaling=YarnScaling(3.0, 48, attention_factor=1.37), max_positions=512,
    ),
    "gemma3": DecoderConfig(
        vocab_size=71, hidden=28, layers=4, heads=4, kv_heads=2, head_dim=10, mlp=33, model_type="gemma3_text",
        rope_theta=5e4, rope_scaling=LinearScaling(8.0), local_rope_theta=300.0, sliding_window=5,
        sliding_layers=(True, True, False, True), query_pre_attn_scalar=7, max_positions=512,
    ),
    "qwen2-sliding-from-layer-1": DecoderConfig(
        vocab_size=61, hidden=24, layers=3, heads=4, kv_heads=1, head_dim=6, mlp=29, tie_embeddings=False,
        sliding_window=4, sliding_layers=(False, True, True), max_positions=512,
    ),
    "qwen3-all-sliding": DecoderConfig(
        vocab_size=61, hidden=24, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=29, model_type="qwen3",
        sliding_window=7, sliding_layers=(True, True), max_positions=512,
    ),
    "qwen2-linear": DecoderConfig(
        vocab_size=71, hidden=24, layers=2, heads=3, kv_heads=1, head_dim=12, mlp=33,
        rope_scaling=LinearScaling(2.5), max_positions=512,
    ),
}  # fmt: skip


@pytest.fixture(params=ODD)
def config(request) -> DecoderConfig:
    return ODD[request.param]


ENCODERS = {
    "bert": EncoderConfig(vocab_size=83, hidden=24, layers=2, heads=3, mlp=44, max_positions=40),
    "xlm-roberta": EncoderConfig(
        vocab_size=37, hidden=28, layers=2, heads=4, mlp=33, max_positions=42, type_vocab_size=1,
        layer_norm_eps=1e-5, pad_token_id=1, model_type="xlm-roberta",
    ),
    "roberta": EncoderConfig(
        vocab_size=29, hidden=16, layers=1, heads=2, mlp=21, max_positions=44, pad_token_id=3, model_type="roberta"
    ),
}  # fmt: skip


@pytest.fixture(params=["bert", "xlm-roberta"])
def encoder_config(request) -> EncoderConfig:
    return ENCODERS[request.param]
