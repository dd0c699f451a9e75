"""The table of optimizers: its numbers by hand for a tiny model, what it leaves out, and how it is printed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from rich.console import Console
from torch import Tensor, nn

from memtrain.__main__ import main
from memtrain.device import Cpu, Cuda
from memtrain.job import Adam, AdamW, Job, Optimizer, Sgd
from memtrain.models.build import source
from memtrain.plan import Foreach, Plan
from memtrain.planner.optimizers import OptimizerBytes, OptimizerTable
from memtrain.planner.updates import optimizer_table, update_bytes
from memtrain.precision import Bf16, Fp32
from memtrain.report.optimizers import optimizers_json, optimizers_view
from memtrain.trace.simulate import dataless_model

PROCESSOR = Cpu(name="cpu", threads=2, flops_per_second=1e11, bytes_per_second=2e10, operator_seconds=1e-5)
# Compute capability 7.5 has no bfloat16.
CARD = Cuda(
    name="old",
    compute_capability=(7, 5),
    multiprocessors=40,
    usable_bytes=2**34,
    context_bytes=2**28,
    flops_per_second={"float32": 8e12},
    bytes_per_second=3e11,
    operator_seconds=1e-5,
    link_bytes_per_second=1e10,
    host_bytes_per_second=4e10,
)


class Layer(nn.Module):
    """A matrix of 8 × 4 and its 8 biases, and a frozen matrix, which no optimizer updates."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.frozen = nn.Linear(4, 8), nn.Linear(8, 2, bias=False)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.linear(x)).square().mean()  # type: ignore[no-any-return]


def by_name(table: OptimizerTable, precision: str) -> dict[tuple[str, str, str], OptimizerBytes]:
    return {(row.optimizer, row.kernel, row.state): row for row in table.rows if row.precision == precision}


def test_the_numbers_are_those_of_a_count_by_hand() -> None:
    pytest.importorskip("bitsandbytes")
    model = Layer()
    found = by_name(optimizer_table(source(model), PROCESSOR, (Fp32(),)), "fp32")
    assert {(row.parameters, row.weights, row.gradients) for row in found.values()} == {(40, 160, 160)}
    # In bytes: 4 × 32 of the matrix, 4 × 8 of the biases, 4 of each count of steps.
    expected = {
        ("AdamW", "fused", "on_device"): (2 * 160 + 8, 0),
        # One group of decay after the other: at most the roots of the matrix' second moment exist.
        ("AdamW", "foreach", "on_device"): (2 * 160 + 8, 128),
        # Below 4096 elements 8-bit state has 32 bits, and the update three copies.
        ("AdamW", "fused", "eight_bit"): (2 * 160, 3 * 128),
        ("Adam", "fused", "on_device"): (2 * 160 + 8, 0),
        ("Adam", "foreach", "on_device"): (2 * 160 + 8, 128),
        ("Adam", "fused", "eight_bit"): (2 * 160, 3 * 128),
        ("Sgd", "fused", "on_device"): (160, 0),
        ("Sgd", "foreach", "on_device"): (160, 0),
        # A row of 8 and a column of 4, and the biases; the means of the same shapes, the estimate and a scalar.
        ("Adafactor", "fused", "on_device"): (4 * (8 + 4) + 32 + 8, 4 * (8 + 4) + 128 + 4),
        ("Lion", "fused", "on_device"): (160, 128),
        ("Lion", "fused", "eight_bit"): (160, 3 * 128),
        # One momentum of the matrix, two moments of the biases. The mixture in 32 bits; in 16 the matrix before and after an
        # iteration and two products of 4 × 4.
        ("Muon", "fused", "on_device"): (128 + 2 * 32 + 4, 128 + 2 * 64 + 2 * 32),
    }
    assert {name: (row.optimizer_state, row.temporaries) for name, row in found.items()} == expected
    assert found["Lion", "fused", "on_device"].total == 160 + 160 + 160 + 128
    # The model is the user's own and stays as it was.
    assert all(weight.grad is None and not weight.is_meta for weight in model.parameters())


@pytest.mark.parametrize(
    ("optimizer", "state", "copies"),
    [
        (AdamW(weight_decay=0.1), 328, 1),
        # torch frees the sum before it takes the roots.
        (Adam(weight_decay=0.1), 328, 1),
        (Sgd(weight_decay=0.1), 160, 1),
        (Sgd(momentum=0.0), 0, 0),
    ],
    ids=str,
)
def test_a_decay_of_sgd_takes_a_copy_of_the_gradients_in_the_foreach_form(
    optimizer: Optimizer, state: int, copies: int
) -> None:
    job = Job(model="layer", global_batch_size=1, steps=2, optimizer=optimizer, max_grad_norm=None)
    plan = Plan(micro_batch_size=1, optimizer_kernel=Foreach())
    found = update_bytes(job, plan, dataless_model(source(Layer())), PROCESSOR)
    assert (found.optimizer_state, found.temporaries) == (state, copies * 128)


def test_in_16_bits_weights_gradients_and_state_take_half() -> None:
    found = by_name(optimizer_table(source(tiny_llama()), PROCESSOR, (Fp32(), Bf16())), "bf16")
    whole = by_name(optimizer_table(source(tiny_llama()), PROCESSOR, (Fp32(),)), "fp32")
    assert found.keys() == whole.keys()
    lion = ("Lion", "fused", "on_device")
    assert found[lion].total * 2 == whole[lion].total
    adamw = ("AdamW", "fused", "on_device")
    # One count of steps for each of the parameters, in fp32 both times.
    counts = 4 * 21
    assert 2 * (found[adamw].optimizer_state - counts) == whole[adamw].optimizer_state - counts == 8 * whole[adamw].parameters


def tiny_llama() -> dict[str, object]:
    return {
        "model_type": "llama",
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }


def test_what_a_device_does_not_compute_in_is_left_out_with_the_reason() -> None:
    table = optimizer_table(source(Layer()), CARD, (Fp32(), Bf16()))
    assert {row.precision for row in table.rows} == {"fp32"}
    assert table.left_out == ("old does not compute in bf16.",)


def test_without_bitsandbytes_its_rows_are_left_out_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    table = optimizer_table(source(Layer()), PROCESSOR, (Fp32(),))
    assert {row.state for row in table.rows} == {"on_device"}
    (reason,) = table.left_out
    assert reason.startswith("8-bit and paged optimizer state need bitsandbytes")


def row(optimizer: str, kernel: str, state: str, sizes: tuple[int, int]) -> OptimizerBytes:
    held, temporary = sizes
    return OptimizerBytes(
        optimizer=optimizer,
        kernel=kernel,
        state=state,
        precision="fp32",
        parameters=1000,
        weights=4000,
        gradients=4000,
        optimizer_state=held,
        temporaries=temporary,
    )


def test_the_table_fits_80_columns() -> None:
    rows = (row("AdamW", "foreach", "on_device", (8000, 4000)), row("Lion", "fused", "eight_bit", (1020, 0)))
    console = Console(width=80)
    with console.capture() as captured:
        console.print(optimizers_view("tiny", OptimizerTable(rows, ("old does not compute in bf16.",))))
    assert [line.rstrip() for line in captured.get().splitlines()] == [
        "tiny, 1.0 k parameters in fp32: bytes per parameter",
        "optimizer      weights gradients state temporary together × weights   in all",
        "AdamW foreach     4.00      4.00  8.00      4.00    20.00      5.00 19.5 KiB",
        "Lion eight_bit    4.00      4.00  1.02      0.00     9.02      2.25 8.81 KiB",
        "",
        "At the peak of an update after backward, without activations and clipping.",
        "Left out: old does not compute in bf16.",
    ]


def test_the_file_of_a_run_has_the_bytes() -> None:
    written = optimizers_json("tiny", OptimizerTable((row("Lion", "fused", "on_device", (4000, 10)),), ()))
    assert written == {
        "model": "tiny",
        "optimizers": [
            {
                "optimizer": "Lion",
                "kernel": "fused",
                "state": "on_device",
                "precision": "fp32",
                "parameters": 1000,
                "weights": 4000,
                "gradients": 4000,
                "optimizer_state": 4000,
                "temporaries": 10,
                "total": 12010,
            }
        ],
        "left_out": [],
    }


def test_the_mode_prints_the_table_and_keeps_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a model that names weights, which none are loaded of, and neither text nor budget."""
    folder = tmp_path / "run"
    arguments = ["mode=optimizers", "model.path=nowhere", "data=none", "budget=null", f"run.dir={folder}"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "parameters in fp32: bytes per parameter" in printed
    assert "parameters in bf16: bytes per parameter" in printed
    written = json.loads((folder / "optimizers.json").read_text(encoding="utf-8"))
    adamw = written["optimizers"][0]
    assert (adamw["optimizer"], adamw["weights"]) == ("AdamW", 4 * adamw["parameters"])
    assert (folder / "config.yaml").is_file()
    assert main(arguments) == 2
