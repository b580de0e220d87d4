"""config.json is read and written, and unsupported configs are refused."""

import dataclasses

import numpy as np
import pytest

from rrl.errors import UserError
from rrl.models.config import DecoderConfig, EncoderConfig, Pooling
from rrl.models.rope import frequencies
from rrl.models.rope_scaling import LinearScaling, Llama3Scaling, YarnScaling

# https://huggingface.co/Qwen/Qwen2.5-7B/blob/main/config.json
QWEN25_7B = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
    "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02, "intermediate_size": 18944,
    "max_position_embeddings": 131072, "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 28,
    "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
    "use_sliding_window": False, "vocab_size": 152064,
}  # fmt: skip


def test_qwen25_7b_is_read_as_published():
    config = DecoderConfig.from_hf(QWEN25_7B)
    assert (config.head_dim, config.heads, config.kv_heads, config.rope_theta) == (128, 28, 4, 1e6)
    assert config.qkv_bias
    assert not config.qk_norm
    assert not config.tie_embeddings


def test_config_survives_export_and_import(config, encoder_config):
    assert DecoderConfig.from_hf(config.to_hf()) == config
    assert EncoderConfig.from_hf(encoder_config.to_hf()) == encoder_config


def test_transformers_5_rope_parameters_are_read():
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    rope = {"rope_type": "llama3", "rope_theta": 5e5, **scaling}
    hf = {k: v for k, v in QWEN25_7B.items() if k != "rope_theta"} | {
        "model_type": "llama",
        "rope_parameters": rope,
    }
    config = DecoderConfig.from_hf(hf)
    assert config.rope_theta == 5e5
    assert config.rope_scaling == Llama3Scaling(**scaling)


# The rope_scaling that the model card of Qwen2.5-7B-Instruct prints for texts of more than 32,768 tokens.
QWEN25_YARN = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}


@pytest.mark.parametrize("positions", [32768, 40960, 131072])
def test_yarn_of_qwen25_is_read_and_extends_the_context_to_131072_tokens(positions):
    config = DecoderConfig.from_hf(
        QWEN25_7B | {"rope_scaling": QWEN25_YARN, "max_position_embeddings": positions}
    )
    assert config.rope_scaling == YarnScaling(4.0, 32768)
    assert config.rope_scaling.rotation_scale == pytest.approx(1.13862943611)  # 0.1 ln 4 + 1
    assert config.max_context == 131072


def test_missing_fields_of_yarn_are_those_of_transformers():
    scaling = {
        "rope_type": "yarn",
        "factor": None,
        "original_max_position_embeddings": 32768,
        "beta_fast": None,
    }
    assert DecoderConfig.from_hf(QWEN25_7B | {"rope_parameters": scaling}).rope_scaling == YarnScaling(
        4.0, 32768
    )
    scaling = {"rope_type": "yarn", "factor": 2.0}
    assert DecoderConfig.from_hf(QWEN25_7B | {"rope_parameters": scaling}).rope_scaling == YarnScaling(
        2.0, 131072
    )


def test_qwen_layers_from_max_window_layers_on_have_the_window():
    config = DecoderConfig.from_hf(
        QWEN25_7B | {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 21}
    )
    assert config.sliding_layers == (False,) * 21 + (True,) * 7
    assert set(config.windows[21:]) == {4096} and min(config.windows[:21]) > config.max_positions
    assert config.first_layers(21).windows == ()
    # As in transformers, the default of max_window_layers is 28, and this model has 28 layers.
    unset = {key: value for key, value in QWEN25_7B.items() if key != "max_window_layers"}
    assert DecoderConfig.from_hf(unset | {"use_sliding_window": True}).windows == ()


# https://huggingface.co/google/gemma-3-4b-it/blob/main/config.json, without the image part's fields.
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "image_token_index": 262144,
    "initializer_range": 0.02, "mm_tokens_per_image": 256, "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}  # fmt: skip


def test_gemma_3_4b_is_read_as_published():
    config = DecoderConfig.from_hf(GEMMA3_4B)
    assert (config.head_dim, config.heads, config.kv_heads, config.vocab_size) == (256, 8, 4, 262208)
    assert (config.rope_theta, config.rope_scaling, config.local_rope_theta) == (1e6, LinearScaling(8.0), 1e4)
    assert config.sliding_window == 1024
    assert [layer for layer, slides in enumerate(config.sliding_layers) if not slides] == [5, 11, 17, 23, 29]
    assert (config.tie_embeddings, config.eos_token_id, config.max_positions) == (True, (1, 106), 131072)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=true"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        (
            {"hidden_activation": "silu"},
            "hidden_activation='silu' is not supported; it must be 'gelu_pytorch_tanh'",
        ),
        ({"sliding_window": 0}, "set no window"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "scales RoPE of 'sliding_attention' layers",
        ),
    ],
)
def test_unsupported_gemma_3_configs_are_refused_by_field(change, message):
    with pytest.raises(UserError, match=message):
        DecoderConfig.from_hf(GEMMA3_4B["text_config"] | change)
    with pytest.raises(UserError, match="needs the object text_config"):
        DecoderConfig.from_hf({"model_type": "gemma3"})


def test_linear_scaling_divides_all_frequencies():
    config = DecoderConfig.from_hf(QWEN25_7B | {"rope_scaling": {"type": "linear", "factor": 8}})
    plain = dataclasses.replace(config, rope_scaling=None)
    np.testing.assert_array_equal(frequencies(config), frequencies(plain) / 8)
    assert config.max_context == config.max_positions


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "mamba"},
            "model_type='mamba'.*state space layers.*llama, qwen2, qwen3, gemma3_text, gemma3",
        ),
        ({"model_type": "qwen3_moe"}, "'qwen3_moe' is not supported .mixtures of experts are not"),
        ({"model_type": "mixtral"}, "mixtures of experts"),
        ({"model_type": "qwen3_next"}, "'qwen3_next' is not supported .gated delta nets are not"),
        ({"model_type": "gemma2"}, "'gemma2' is not supported .softcapped"),
        ({"model_type": "gemma3n"}, "'gemma3n' is not supported; choose one of"),
        ({"num_experts": 8}, "num_experts=8: mixtures of experts"),
        ({"model_type": "llama", "use_sliding_window": True}, "sliding-window attention.*'llama'"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types has 2 entries for num_hidden_layers=28",
        ),
        (
            {"layer_types": ["sliding_attention"] * 28},
            "use_sliding_window=False and sliding_window=131072 set no window",
        ),
        ({"layer_types": ["linear_attention"] * 28}, "layer_types contains linear_attention"),
        ({"rope_scaling": {"type": "longrope", "factor": 4.0}}, "'longrope'.*default, linear, llama3, yarn"),
        ({"rope_scaling": {"type": "yarn", "factor": -4.0}}, "factor=-4.0 must be a number above 0"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": 1, "beta_slow": 2}},
            "beta_fast=1.*beta_slow=2",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": "no"}}, "truncate='no'"),
        ({"rope_scaling": {"type": "linear"}}, "factor=None must be a number above 0"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks the fields high_freq_factor"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"num_key_value_heads": 3}, "heads=28 is not a multiple of kv_heads=3"),
        ({"head_dim": 7}, "head_dim=7 is odd"),
        ({"layer_types": ["chunked_attention"]}, "layer_types contains chunked_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor=0.25"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "one object for all layers"),
        ({"rope_scaling": "yarn"}, "rope_scaling='yarn'"),
        ({"rope_theta": "big"}, "rope_theta='big' must be a number above 0"),
        ({"rms_norm_eps": 0}, "rms_norm_eps=0 must be a number above 0"),
        ({"hidden_size": "3584"}, "hidden_size='3584' must be a whole number"),
        ({"num_attention_heads": 0}, "num_attention_heads=0 must be a whole number of at least 1"),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0 must be"),
        ({"eos_token_id": [1, "end"]}, r"eos_token_id=\[1, 'end'\] must be a token id"),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
            "high_freq_factor=4, which must be above low_freq_factor=4",
        ),
    ],
)
def test_unsupported_decoder_configs_are_refused_by_field(change, message):
    with pytest.raises(UserError, match=message):
        DecoderConfig.from_hf(QWEN25_7B | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "t5"}, "model_type='t5'.*bert, roberta, xlm-roberta"),
        ({"hidden_act": "relu"}, "hidden_act='relu'"),
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"model_type": "roberta", "pad_token_id": 50}, "no position after pad_token_id=50"),
        ({"num_attention_heads": 5}, "multiple of heads=5"),
        ({"num_attention_heads": 0}, "num_attention_heads=0 must be"),
        ({"is_decoder": True}, "is_decoder=true is not supported"),
        ({"pad_token_id": -1}, "pad_token_id=-1 must be a whole number of at least 0"),
        ({"layer_norm_eps": "small"}, "layer_norm_eps='small' must be a number"),
    ],
)
def test_unsupported_encoder_configs_are_refused_by_field(change, message, encoder_config):
    with pytest.raises(UserError, match=message):
        EncoderConfig.from_hf(encoder_config.to_hf() | change)


def test_a_missing_padding_id_is_that_of_the_family():
    hf = EncoderConfig(vocab_size=9, hidden=4, layers=1, heads=1, mlp=4).to_hf() | {"pad_token_id": None}
    assert EncoderConfig.from_hf(hf).pad_token_id == 0
    assert EncoderConfig.from_hf(hf | {"model_type": "xlm-roberta"}).pad_token_id == 1


def test_unknown_pooling_is_refused_by_name():
    with pytest.raises(UserError, match="pooling mode='max' is unknown; choose one of mean, cls"):
        Pooling("max")
    with pytest.raises(UserError, match="normalize='yes' must be true or false"):
        Pooling(normalize="yes")
