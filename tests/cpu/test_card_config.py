"""The keys for cards: device, budget, precision, approximations, and a job that names no text yet."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from memtrain import machine
from memtrain.__main__ import main
from memtrain.command_line import compose_jobs
from memtrain.config import settings
from memtrain.device import Cuda
from memtrain.job import AdamW, Approximation, Cosine
from memtrain.plan import EightBit
from memtrain.precision import Bf16, Fp32
from memtrain.settings import Settings

ON_L4 = ("device=l4", "budget=null")
MY_CARD = """
# A recipe for a card that has no file.
model: llama_5m
steps: 20
global_batch_size: 4
precision: bf16
allow: [eight_bit_state]
data: {sequence_length: 64, tokenizer: {train_vocab_size: 300}}
device:
  name: mine
  kind: cuda
  compute_capability: [8, 6]
  multiprocessors: 10
  usable_bytes: 8GiB
  context_bytes: 300MiB
  flops_per_second: {float32: 1e13, bfloat16: 2e13}
  bytes_per_second: 3e11
  operator_seconds: 1e-5
  link_bytes_per_second: 1e10
  host_bytes_per_second: 2e10
"""
MINE = Cuda(
    name="mine",
    compute_capability=(8, 6),
    multiprocessors=10,
    usable_bytes=8 * 2**30,
    context_bytes=300 * 2**20,
    flops_per_second={"float32": 1e13, "bfloat16": 2e13},
    bytes_per_second=3e11,
    operator_seconds=1e-5,
    link_bytes_per_second=1e10,
    host_bytes_per_second=2e10,
)


def one(*overrides: str) -> Settings:
    (cfg,) = compose_jobs(overrides, multirun=False)
    return settings(cfg)


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the recipe ``mine.yaml`` in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(MY_CARD)
    return tmp_path


@pytest.mark.parametrize("name", [name for name in machine.described_devices() if name != "auto"])
def test_a_device_that_is_chosen_is_the_one_that_is_described(name: str) -> None:
    assert machine.describe(**one(f"device={name}").device) == machine.named(name)


def test_a_card_can_be_described_in_a_recipe(mine: Path) -> None:
    job = one("recipe=mine.yaml")
    assert machine.describe(**job.device) == MINE
    assert (job.precision, job.allow) == (Bf16(), {Approximation.EIGHT_BIT_STATE})


def test_a_device_of_the_command_line_takes_the_place_of_the_recipes(mine: Path) -> None:
    assert machine.describe(**one("recipe=mine.yaml", "device=l4").device) == machine.named("l4")
    assert one("recipe=7b_24gb", "mode=plan", "device=l4").device["name"] == "l4"


def test_a_single_key_of_a_device_can_be_changed() -> None:
    assert one(*ON_L4, "device.usable_bytes=20GiB").device["usable_bytes"] == "20GiB"
    changed = machine.describe(**one(*ON_L4, "device.flops_per_second.float32=2e13").device)
    assert changed.flops("float32") == 2e13


def test_what_auto_is_is_not_asked_before_the_configuration_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_this_machine", lambda: pytest.fail("asked"))
    assert one("device=auto", "budget=null").device == {"name": "auto", "kind": "auto"}


def test_a_saved_configuration_of_a_card_is_a_recipe(mine: Path) -> None:
    (cfg,) = compose_jobs(["recipe=7b_24gb", "mode=plan", "run.dir=out"], multirun=False)
    (mine / "7b_24gb.yaml").write_text(OmegaConf.to_yaml(cfg, resolve=True))
    assert one("recipe=./7b_24gb.yaml") == settings(cfg)


def test_bytes_that_are_not_asked_for_are_left_to_the_card() -> None:
    job = one(*ON_L4)
    assert (job.budget_bytes, job.headroom_bytes, job.host_bytes) == (None, 0, None)
    job = one("device=l4", "budget=20GiB", "headroom=1GiB", "host_bytes=64GiB")
    assert (job.budget_bytes, job.headroom_bytes, job.host_bytes) == (20 * 2**30, 2**30, 64 * 2**30)


def test_precision_and_approximations_are_chosen_by_name() -> None:
    assert (one().precision, one().allow) == (Fp32(), frozenset())
    job = one("precision=bf16", "allow=[eight_bit_state]", "plan.optimizer_state=eight_bit")
    assert (job.precision, job.allow) == (Bf16(), {Approximation.EIGHT_BIT_STATE})
    assert job.constraints == {"optimizer_state": EightBit()}


def test_weights_may_come_from_a_path_and_the_architecture_from_a_configuration() -> None:
    job = one("model.path=./llama", "data.tokenizer.train_vocab_size=null")
    assert job.model.path == "./llama"
    assert job.model.config is not None
    assert job.model.config["model_type"] == "llama"
    assert (job.data.tokenizer.path, job.data.tokenizer.train_vocab_size) == (None, None)


def test_a_plan_needs_no_text_and_no_tokenizer() -> None:
    job = one("data=none", "mode=plan", "data.tokenizer.train_vocab_size=null")
    assert (job.data.source, job.data.path, job.data.options.sequence_length) == (None, (), 256)


def test_the_recipe_for_24_gb_says_all_but_the_text() -> None:
    job = one("recipe=7b_24gb", "mode=plan")
    assert machine.describe(**job.device) == machine.named("rtx_4090")
    assert (job.budget_bytes, job.host_bytes) == (None, 64 * 2**30)
    assert (job.precision, job.max_grad_norm, job.global_batch_size, job.steps) == (Bf16(), 1.0, 16, 1000)
    assert job.optimizer == AdamW(learning_rate=1e-5, betas=(0.9, 0.95), weight_decay=0.1)
    assert job.schedule == Cosine(warmup_steps=50, final_fraction=0.1)
    assert job.constraints == {"micro_batch_size": 1}
    assert job.model.path == "meta-llama/Llama-2-7b-hf"
    assert job.model.config is not None
    assert (job.model.config["num_hidden_layers"], job.model.config["rms_norm_eps"]) == (32, 1e-5)
    trained = one("recipe=7b_24gb", "data.path=book.txt")
    assert (trained.data.path, trained.data.options.sequence_length) == (("book.txt",), 2048)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ("device=rtx_3080", "device 'rtx_3080' is not described: the nearest are rtx_4080, rtx_3090; describe a card in the"),
        (
            "device=null",
            "device is null, and it must be one of a100_40gb, a100_80gb, a10g, auto, b200, cpu, gh200, h100, h200, l4, l40s, rtx_3060, rtx_3070",
        ),
        ("device.kind=tpu", "device cpu: kind is 'tpu', and it must be one of cpu, cuda."),
        ("device.usable_bytes=1GiB", "device cpu is of kind cpu, which has no key 'usable_bytes': it has name, threads, flops"),
        ("device=l4 device.threads=2", "device l4 is of kind cuda, which has no key 'threads': it has name, compute_capab"),
        ("device=l4 device.multiprocessors=null", "device l4 is of kind cuda and has no multiprocessors: add it to the"),
        ("device.flops_per_second=fast", "device cpu: flops_per_second is 'fast', and it must be a number."),
        ("device=l4 device.flops_per_second=3e13", "device l4: flops_per_second is 30000000000000.0, and it must be a rate"),
        ("budget=null", "budget has no value: say how much memory of a processor training may take, such as 8GiB."),
        ("host_bytes=64", "host_bytes: '64' is not an amount of memory: give"),
        ("host_bytes=1GiB", "host_bytes is set and device cpu has no memory beside the host's: leave host_bytes out."),
        ("device=l4 budget=null headroom=30GiB", "headroom 30.0 GiB leaves nothing of the 22.0 GiB that are usable on l4: "),
        ("precision=fp16", "precision is 'fp16', and it must be one of fp32, autocast_bf16, autocast_fp16, bf16, bf16_master."),
        ("allow=eight_bit_state", "allow must be a list: write allow=[a,b]."),
        ("allow=[8bit]", "allow has '8bit', which is none of the approximations that there are: eight_bit_state."),
        ("device=l4 plan.optimizer_state=eight_bit", "optimizer_state eight_bit rounds the optimizer's state to 8 bits"),
        ("plan.optimizer_state=on_host", "optimizer state on the host frees nothing on a processor"),
        ("device=l4 precision=bf16 plan.optimizer_state=paged", "paged state has 32 bits and what is trained has 16: "),
        (
            "data=none mode=plan epochs=2",
            "epochs is 2, and without a text nothing says how many steps that is: set steps instead.",
        ),
    ],
)
def test_a_mistake_is_one_sentence(overrides: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(overrides.split()) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"memtrain: {sentence}")
    assert (printed.err.count("\n"), printed.out) == (1, "")


def test_a_recipe_that_names_an_unknown_device_is_told_the_nearest(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (mine / "mine.yaml").write_text(yaml.safe_dump({**yaml.safe_load(MY_CARD), "device": "rtx_3080"}))
    assert main(["recipe=mine.yaml"]) == 2
    assert capsys.readouterr().err.startswith(
        "memtrain: device 'rtx_3080' is not described: the nearest are rtx_4080, rtx_3090;"
    )


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            "recipe=7b_24gb",
            "device rtx_4090 is not in this machine, which has no CUDA card: plan for it here (mode=plan, "
            "or Trainer.choice) and train on a machine that has it.",
        ),
        (
            "data=none",
            "neither data.source nor data.path is set: write data.path=PATH or choose data=python_docs, "
            "or only plan with mode=plan.",
        ),
    ],
)
def test_what_cannot_be_trained_here_is_said_before_anything_is_read(
    overrides: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main([*overrides.split(), f"run.dir={tmp_path / 'run'}"]) == 1
    assert capsys.readouterr().err == f"memtrain: {sentence}\n"
    assert not (tmp_path / "run").exists()
