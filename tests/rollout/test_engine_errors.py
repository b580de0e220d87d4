"""The engine refuses sizes, prompts, environments and models that do not fit, by the name of the field."""

import dataclasses
import os
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx

from rrl.errors import UserError
from rrl.models.decoder import Decoder
from rrl.parallel.mesh import make_mesh
from rrl.rollout.engine import Engine
from rrl.rollout.episodes import Request
from rrl.rollout.protocol import SingleTurn
from tests.rollout.scripted import CONFIG, KEY, SCRIPTED


def test_workers_must_divide_the_rows_and_exist_on_one_cpu_only(world):
    decoder, tokenizer, *_ = world
    cores = len(os.sched_getaffinity(0))
    for workers in (3, 4 * cores):
        with pytest.raises(
            UserError, match=rf"rollout\.workers={workers} must divide rollout\.rows=8, and be at most"
        ):
            Engine(decoder, tokenizer, dataclasses.replace(CONFIG, workers=workers))
    mesh = make_mesh(2, 1, 1, devices=jax.devices()[:2])
    assert Engine(decoder, tokenizer, dataclasses.replace(CONFIG, workers=3), mesh=mesh).programs.workers == 1
    assert Engine(decoder, tokenizer, dataclasses.replace(CONFIG, rows=24)).programs.workers == min(3, cores)


def test_parameters_on_another_device_are_an_error(world):
    decoder, tokenizer, _, requests = world
    engine = Engine(decoder, tokenizer, CONFIG, mesh=make_mesh(2, devices=jax.devices()[:2]))
    with pytest.raises(Exception, match="Disallowed device-to-device transfer"):
        engine.run(nnx.state(decoder), requests[:1], SingleTurn(turn_tokens=4), KEY)


@pytest.mark.parametrize("token", [-1, 416])
def test_a_prompt_with_a_token_outside_the_vocabulary_is_refused(world, token):
    strange = Request(world[3][0].question, np.array([1, token, 2], np.int32), 0)
    with pytest.raises(UserError, match=rf"has token {token}; the model's token ids are 0 to 415"):
        Engine(*world[:2], CONFIG).run(nnx.state(world[0]), [strange], SingleTurn(), KEY)


def test_a_stop_string_with_a_special_token_is_refused(world):
    decoder, tokenizer, _, requests = world
    engine = Engine(decoder, tokenizer, CONFIG)
    for strings in (("<|im_end|>",), ("e", "x<|im_start|>")):
        with pytest.raises(
            UserError, match=r"the stop string '.*' would never match: '<\|im_\w+\|>' is a special token"
        ):
            engine.run(nnx.state(decoder), [dataclasses.replace(requests[0], stops=strings)], SCRIPTED, KEY)


@pytest.mark.parametrize(
    ("invalid", "message"),
    [
        ({"sample_top_k": 417}, r"rollout\.sample_top_k=417 must be at most 416, the model's vocab_size"),
        ({"rows": 3}, r"rollout\.rows=3 must be a multiple of data x fsdp = 2 shards"),
        ({"search_seconds": None}, r"search_seconds=None must be a number"),
        ({"top_p": "0.9"}, r"top_p='0\.9' must be a number"),
        ({"search_seconds": 0}, r"search_seconds=0 must be above 0"),
        ({"search_seconds": float("nan")}, r"search_seconds=nan must be above 0"),
        ({"stall_seconds": float("nan")}, r"stall_seconds=nan must be at least 0"),
        ({"context": float("nan")}, r"context=nan must be a whole number"),
        ({"rows": 8.0}, r"rows=8\.0 must be a whole number"),
    ],
)
def test_an_invalid_size_is_refused_with_the_name_of_its_field(world, invalid, message):
    with pytest.raises(UserError, match=message):
        Engine(
            *world[:2], dataclasses.replace(CONFIG, **invalid), mesh=make_mesh(2, devices=jax.devices()[:2])
        )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"turn_tokens": 0}, r"SimpleNamespace\.turn_tokens=0 must be at least 1"),
        (
            {"observation_tokens": float("nan")},
            r"SimpleNamespace\.observation_tokens=nan must be a whole number",
        ),
        ({"stops": ["e"]}, r"SimpleNamespace\.stops: \['e'\] must be a tuple of strings"),
        (
            {"stops": ("e", "<eos>")},
            r"SimpleNamespace\.stops: '<eos>' is reserved",
        ),
    ],
)
def test_an_invalid_environment_is_refused_with_the_name_of_its_field(world, engine, fields, message):
    environment = SimpleNamespace(**{"turn_tokens": 1, "observation_tokens": 0, "stops": ()} | fields)
    with pytest.raises(UserError, match=message):
        engine.run(nnx.state(world[0]), world[3], environment, KEY)


def test_a_retriever_with_another_query_encoder_is_refused(world, engine):
    other = SimpleNamespace(needs_embeddings=True, text_encoder=SimpleNamespace(dim=24), kind="exact")
    with pytest.raises(
        UserError, match=r"retriever: its exact index needs queries of 24 .* encoder gives none"
    ):
        engine.run(nnx.state(world[0]), world[3], SCRIPTED, KEY, retriever=other)


def test_a_tokenizer_larger_than_the_model_is_refused(world):
    decoder, tokenizer, _, _ = world
    small = Decoder(dataclasses.replace(decoder.config, vocab_size=100), rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match="vocab_size is 100"):
        Engine(small, tokenizer, CONFIG)
