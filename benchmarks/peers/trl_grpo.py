"""TRL's GRPOTrainer with LoRA: python trl_grpo.py FOLDER DTYPE QUESTIONS SAMPLES PROMPT NEW CHECKPOINTING.

Each line of input is answered, as JSON, with the seconds of one optimiser step; its loss, gradient norm and KL; the numbers of
tokens that were written and that the update contained; and the peak memory in GB since the model was loaded.

- `step` samples NEW tokens SAMPLES times after each of QUESTIONS prompts, and updates the adapters.
- `update` takes the completions of completions.npy instead of sampling, so that its seconds are those of the update alone.
- `ready` takes no step.

FOLDER holds the model and
- adapters.npz: "LAYER/MODULE/A" [rank, inputs] and "LAYER/MODULE/B" [outputs, rank];
- grpo.json: alpha, beta and lr;
- rewards.npy [QUESTIONS * SAMPLES] and completions.npy [QUESTIONS * SAMPLES, NEW].

If DTYPE is bfloat16, the frozen weights are bfloat16 and the update uses autocast. The adapters are always float32. CHECKPOINTING
is 1 or 0: whether the backward pass recomputes activations, which is TRL's default.
"""

import importlib.metadata
import json
import os
import pathlib
import re
import sys
import tempfile
import time

import datasets
import numpy as np
import peft
import torch
import transformers
import trl

folder, dtype = pathlib.Path(sys.argv[1]), sys.argv[2]
questions, samples, prompt, new, checkpointing = map(int, sys.argv[3:8])
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
# The trainer prints its metrics. Only answers may go to the standard output.
answers, sys.stdout = sys.stdout, sys.stderr
settings = json.loads((folder / "grpo.json").read_text())
adapters = np.load(folder / "adapters.npz")
rewards = np.load(folder / "rewards.npy")
completions = np.load(folder / "completions.npy")
vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
prompts = np.random.default_rng(0).integers(1, vocabulary, (questions, prompt)).tolist()


class Prompts(transformers.PreTrainedTokenizerFast):
    """A tokenizer for which the text "7" is prompt 7. No token ends a sequence."""

    def __call__(self, text: list[str], **_: object) -> dict[str, list[list[int]]]:
        return {"input_ids": [prompts[int(number)] for number in text]}

    @property
    def eos_token_id(self) -> int:
        return -1

    @property
    def pad_token_id(self) -> int:
        return 0


class Tokens(transformers.TrainerCallback):
    """Waits for a line before each optimiser step, and answers it afterwards."""

    def __init__(self) -> None:
        self.counts = {"written": 0, "updated": 0}

    def on_step_begin(self, *_: object, **__: object) -> None:
        trainer.rollout_func = given_rollouts if next_step() == "update" else None
        self.counts = {"written": 0, "updated": 0}
        self.began = time.perf_counter()

    def on_step_end(self, *_: object, **__: object) -> None:
        self.seconds = time.perf_counter() - self.began

    def on_log(self, args: object, state: object, control: object, logs: dict, **_: object) -> None:
        if "grad_norm" in logs:
            metrics = {name: logs[name] for name in ("loss", "grad_norm", "kl")}
            reply({"seconds": self.seconds} | metrics | self.counts | peak())


class Trainer(trl.GRPOTrainer):
    """Counts the tokens that the model computes in the updates."""

    def training_step(self, model: torch.nn.Module, inputs: object, items: object) -> torch.Tensor:
        loss = super().training_step(model, inputs, items)
        batch = self._buffered_inputs[(self._step - 1) % self.args.steps_per_generation]
        tokens.counts["written"] += int(batch["completion_mask"].sum())
        tokens.counts["updated"] += int(batch["prompt_mask"].sum() + batch["completion_mask"].sum())
        return loss


def reply(answer: dict) -> None:
    print(json.dumps(answer), file=answers, flush=True)


def next_step() -> str:
    """Return the next line that asks for a step, and answer the others. Ends the process if there is none."""
    for line in sys.stdin:
        if line.strip() in ("step", "update"):
            return line.strip()
        reply(info | peak())
    sys.exit()


def peak() -> dict[str, float]:
    """Return the peak memory in GB since the last reset."""
    status = pathlib.Path("/proc/self/status").read_text()
    return {"peak_gb": 1024 * int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1e9}


def given_rollouts(texts: list[str], trainer: trl.GRPOTrainer) -> dict:
    """Return the given completions in place of sampled ones."""
    ids = [prompts[int(number)] for number in texts]
    return {"prompt_ids": ids, "completion_ids": completions.tolist(), "logprobs": None}


def given_rewards(**_: object) -> list[float]:
    return rewards.tolist()


def load_adapters(model: torch.nn.Module) -> None:
    """Set the adapters to those of adapters.npz. The trainer's reference is a copy of them."""
    parameters, left = dict(model.named_parameters()), set(adapters.files)
    for name in adapters.files:
        layer, module, part = name.split("/")
        parameter = parameters[f"base_model.model.model.layers.{layer}.{module}.lora_{part}.default.weight"]
        parameter.data.copy_(torch.tensor(adapters[name]))
        left.remove(name)
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    if left or len(trained) != len(adapters.files):
        raise RuntimeError(f"{len(trained)} trained parameters, {len(adapters.files)} given, {left} not used")


rows = questions * samples
modules = sorted({name.split("/")[1].rpartition(".")[2] for name in adapters.files})
rank = adapters[adapters.files[0]].shape[0]
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
model.generation_config = transformers.GenerationConfig(pad_token_id=0)
model = peft.get_peft_model(
    model, peft.LoraConfig(r=rank, lora_alpha=settings["alpha"], target_modules=modules)
)
load_adapters(model)
config = trl.GRPOConfig(
    output_dir=tempfile.mkdtemp(),
    use_cpu=True,
    bf16=dtype == "bfloat16",
    per_device_train_batch_size=samples,
    gradient_accumulation_steps=questions,
    num_generations=samples,
    max_completion_length=new,
    gradient_checkpointing=bool(checkpointing),
    beta=settings["beta"],
    use_bias_correction_kl=False,  # the KL of DeepSeekMath, as in the compared library
    learning_rate=settings["lr"],
    lr_scheduler_type="constant",
    max_grad_norm=1.0,
    max_steps=10**6,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    shuffle_dataset=False,
)
tokens = Tokens()
trainer = Trainer(
    model=model,
    reward_funcs=given_rewards,
    args=config,
    train_dataset=datasets.Dataset.from_dict({"prompt": [str(number) for number in range(questions)]}),
    processing_class=Prompts.from_pretrained(folder),
    callbacks=[tokens],
)
names = ("trl", "transformers", "peft", "torch")
info = {
    "versions": ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names),
    "device": "cpu",
}
pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets the peak memory
trainer.train()
