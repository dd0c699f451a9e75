"""The small models of the field reports, and a run of a Trainer with everything that it may choose given."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from memtrain import Constant, Trainer
from memtrain.data.batches import StepBatches
from memtrain.data.rows import IGNORED
from memtrain.data.rowset import alike
from memtrain.job import Sgd
from memtrain.models.build import ModelSource, source
from memtrain.plan import Plan, to_dict
from memtrain.trainer import Result

NAN = float("nan")
LN4 = 1.3862943611198906
"""The loss of a token that is one of four, all of them equally likely."""

REPOSITORY = Path(__file__).parents[2]


class BiasConfig(PretrainedConfig):
    """A vocabulary of four."""

    model_type = "bias"

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.vocab_size = 4


class BiasLM(PreTrainedModel):
    """One parameter b = zeros(4), the logits at every position. The gradient of a token with label y is 0.25 - onehot(y)."""

    config_class = BiasConfig
    shifts = True

    def __init__(self, config: BiasConfig | None = None) -> None:
        super().__init__(config or BiasConfig())
        # By which transformers' own models say which loss they have.
        self.loss_type = "ForCausalLM" if self.shifts else "ForMaskedLM"
        self.b = nn.Parameter(torch.zeros(4))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.b.expand(*input_ids.shape, 4)
        return {"loss": self.loss_function(logits=logits, labels=labels, vocab_size=4)}


class UnshiftedBiasLM(BiasLM):
    """The same without a shift: the label at a position is what is predicted there."""

    shifts = False


def labelled(*labels: int) -> dict[str, Tensor]:
    """A row of these labels."""
    return {"input_ids": torch.zeros(len(labels), dtype=torch.int64), "labels": torch.tensor(labels)}


class ConstGrad(nn.Module):
    """One parameter w = 0. The loss of rows of ones is w, so the gradient of every micro-batch is 1."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x.mean()


def factors(*values: float) -> list[dict[str, Tensor]]:
    """A row for each value; the loss of ConstGrad on it is w times the value, and the gradient the value."""
    return [{"x": torch.tensor(float(value))} for value in values]


_LLAMA = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def tiny_llama(*, tied: bool = True, **changed: Any) -> ModelSource:
    """138048 parameters tied, 202048 untied."""
    return source({"model_type": "llama", "tie_word_embeddings": tied, **_LLAMA, **changed})


def tiny_mixtral() -> ModelSource:
    """547136 parameters, of which 393216 are the experts'."""
    return source({"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, **_LLAMA})


def tiny_gpt2(**changed: Any) -> ModelSource:
    """168192 parameters."""
    config = {"vocab_size": 1000, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return source({"model_type": "gpt2", "bos_token_id": 1, "eos_token_id": 2, **config, **changed})


def tiny_t5() -> ModelSource:
    """44800 parameters."""
    config = {"vocab_size": 100, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    return source({"model_type": "t5", "decoder_start_token_id": 0, **config})


def tokens(length: int, number: int = 0, vocabulary: int = 1000) -> dict[str, Tensor]:
    """A row of text of its own for each number."""
    ids = (torch.arange(length) * 7 + number * 13) % (vocabulary - 3) + 3
    return {"input_ids": ids, "labels": ids.clone()}


def masked(row: Mapping[str, Tensor], counted: int) -> dict[str, Tensor]:
    """The row, of which only the first so many tokens count."""
    labels = row["labels"].clone()
    labels[counted:] = IGNORED
    return {**row, "labels": labels}


def trainer(model: Any, rows: Any, *, micro_batch_size: int, run_dir: Path | None = None, **given: Any) -> Trainer:
    """A Trainer that has nothing to choose: gradient descent at a rate of 1, unclipped, unless said otherwise."""
    plan = Plan(micro_batch_size=micro_batch_size, **given.pop("plan", {}))
    settings: dict[str, Any] = {
        "optimizer": Sgd(learning_rate=1.0, momentum=0.0),
        "schedule": Constant(),
        "max_grad_norm": None,
        "budget": "256MiB",
        "checkpoint_every": None,
        "progress": False,
    }
    return Trainer(
        model=model, data=rows, run_dir=run_dir, constraints=to_dict(plan), **{**settings, **given}
    )  # fmt: skip


def run(model: Any, rows: Any, **given: Any) -> tuple[Result, Trainer]:
    """The result of training, and the Trainer that did it."""
    made = trainer(model, rows, **given)
    return made.train(), made


def column(result: Result, name: str) -> list[float]:
    """A number of each step."""
    return [row[name] for row in result.metrics if "loss" in row]


def weights(made: Trainer) -> dict[str, Tensor]:
    """A copy of the weights."""
    return {name: tensor.detach().clone() for name, tensor in made.model.named_parameters()}


def same(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    """Whether two models are equal, bit for bit."""
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def steps_in(run_dir: Path) -> list[int]:
    """The steps of the checkpoints of a run; whatever else lies there is an error."""
    return sorted(int(place.name.removeprefix("step-")) for place in (run_dir / "checkpoints").iterdir())


def in_order(rows: list[dict[str, Tensor]], global_batch_size: int = 1, seed: int = 0) -> list[dict[str, Tensor]]:
    """The rows so laid out that the first epoch of a run takes them in the order in which they are given."""
    batches = StepBatches(alike(rows), global_batch_size=global_batch_size, seed=seed)
    numbers = [number for step in range(batches.steps_per_epoch) for number in batches.indices(step)]
    return [rows[numbers.index(place)] for place in range(len(rows))]


# ---------------------------------------------------------------------- other processes


def environment() -> dict[str, str]:
    """For a process that runs one of these files."""
    paths = os.pathsep.join(str(REPOSITORY / name) for name in (".", "tests", "tests/cpu"))
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def command(file: str, *arguments: object) -> list[str]:
    """What runs a file of these in a process of its own."""
    return [sys.executable, "-W", "ignore", file, *map(str, arguments)]


def two_processes(file: str, *arguments: object, seconds: float = 60) -> list[tuple[int, list[dict[str, Any]], str]]:
    """Of each of two processes that run a file: its exit code, what it printed as JSON, and its errors."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {**environment(), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with ExitStack() as leaving:
        children = []
        for rank in range(2):
            child = subprocess.Popen(
                command(file, *arguments),
                env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            children.append(leaving.enter_context(child))
            # One that hangs does not outlive the test.
            leaving.callback(child.kill)
        said = [child.communicate(timeout=seconds) for child in children]
    return [
        (child.returncode, [json.loads(line) for line in out.splitlines() if line.startswith("{")], errors)
        for child, (out, errors) in zip(children, said, strict=True)
    ]
