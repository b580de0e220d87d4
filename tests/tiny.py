"""The shape of a decoder so small that a test makes one in no time."""

from rrl.models.config import DecoderConfig


def tiny_shape(vocabulary: int, positions: int, **changed: object) -> DecoderConfig:
    """One layer of 16 dimensions, Qwen2's kind; `changed` are other fields of its config.json."""
    return DecoderConfig.from_hf(
        {
            "model_type": "qwen2",
            "vocab_size": vocabulary,
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "intermediate_size": 32,
            "rope_theta": 10000.0,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "max_position_embeddings": positions,
            **changed,
        }
    )
