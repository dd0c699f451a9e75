"""The process of one trainer: ``python benchmarks/peer_trainers.py REQUEST``, started and talked to by peers.py.

Weights, rows and their order are made here, the same for all. What is left to each trainer is its own way from there.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import IO, Any

from peers import MAX_GRAD_NORM, WEIGHT_DECAY, Contender, Run, Task

MODEL_SEED = 7
ROW_SEED = 11


@dataclass(frozen=True)
class _Trainer:
    """A trainer that is ready.

    Attributes:
        train: trains, and returns the loss of each step, unrounded.
        plan, predicted_bytes: memtrain's.
    """

    train: Callable[[], list[float]]
    plan: str | None = None
    predicted_bytes: int | None = None


class _Turns:
    """Waits for its turn before each update, and keeps the time between two waits."""

    def __init__(self, channel: IO[str]) -> None:
        self.cpu_seconds: list[float] = []
        self.seconds: list[float] = []
        self._channel = channel
        self._began: tuple[float, float] | None = None

    def __call__(self, optimizer: Any, *_: Any) -> None:
        # accelerate's wrapper is an optimizer too, around the one that updates.
        if type(optimizer).__name__ != "AdamW":
            return
        cpu, now = time.process_time(), time.perf_counter()
        if self._began is not None:
            self.cpu_seconds.append(cpu - self._began[0])
            self.seconds.append(now - self._began[1])
        print("step", file=self._channel, flush=True)
        sys.stdin.readline()
        self._began = time.process_time(), time.perf_counter()


class _Unmeasured:
    """In place of memtrain's own meter where the profiler already watches all of ``train()``."""

    peak_bytes = 0

    def window(self, name: str, phase: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def in_update(self, update: Callable[[], Any]) -> Callable[[], Any]:
        return update

    def held_bytes(self) -> int:
        return 0

    def side(self, step_seconds: float) -> Any:
        from memtrain.planner.compare import counted_side

        return counted_side({"update": 1}, 0, 0, step_seconds)

    def trace(self, name: str) -> None:
        return None

    def note_failure(self) -> None:
        return None


def _module(task: Task) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(MODEL_SEED)
    return LlamaForCausalLM(LlamaConfig(**task.model, attention_dropout=0.0, use_cache=False)).train()


def _rows(task: Task) -> list[dict[str, Any]]:
    """Rows of tokens in which the next one can be learnt: each goes up by one of three numbers."""
    import torch

    generator = torch.Generator().manual_seed(ROW_SEED)
    shape = (task.batch * task.steps, task.length)
    ups = torch.randint(1, 4, shape, generator=generator)
    starts = torch.randint(task.model["vocab_size"], (shape[0], 1), generator=generator)
    tokens = (starts + ups.cumsum(1)) % task.model["vocab_size"]
    return [{"input_ids": row, "labels": row} for row in tokens.unbind()]


def _ordered(task: Task, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows in the order in which memtrain trains on them."""
    from memtrain.data.batches import StepBatches
    from memtrain.data.rowset import alike

    batches = StepBatches(alike(rows), global_batch_size=task.batch, seed=0)
    return [rows[index] for step in range(task.steps) for index in batches.indices(step)]


def _job(task: Task) -> Any:
    from memtrain.job import AdamW, Constant, Cosine, Job

    return Job(
        model="Llama",
        global_batch_size=task.batch,
        steps=task.steps,
        optimizer=AdamW(learning_rate=task.learning_rate, weight_decay=WEIGHT_DECAY),
        schedule=Cosine() if task.schedule == "cosine" else Constant(),
        max_grad_norm=MAX_GRAD_NORM,
    )


def _loop(task: Task, model: Any) -> _Trainer:
    """What a careful person writes by hand, with what the trainers do in each step and nothing else."""
    import torch

    from memtrain.schedule import learning_rate

    job, rows = _job(task), _ordered(task, _rows(task))
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]

    def train() -> list[float]:
        optimizer = torch.optim.AdamW(groups, lr=task.learning_rate, fused=True)
        losses, norms, rates = [], [], []
        for step in range(task.steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(job, step)
            chosen = rows[step * task.batch : (step + 1) * task.batch]
            batch = {name: torch.stack([row[name] for row in chosen]) for name in chosen[0]}
            loss = model(**batch).loss
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM, foreach=True)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
            norms.append(norm.item())
            rates.append(optimizer.param_groups[0]["lr"])
        return losses

    return _Trainer(train)


def _peer(task: Task, contender: Contender, model: Any) -> _Trainer:
    """transformers' Trainer or TRL's SFTTrainer: their defaults, but for what the job says and for writing files."""
    import torch
    import transformers

    is_sft = contender.kind == "sft"
    library = importlib.import_module("trl") if is_sft else transformers
    rows = _ordered(task, _rows(task))
    # Nothing is written, but a folder has to be named.
    folder = tempfile.TemporaryDirectory()
    settings: dict[str, Any] = {
        "output_dir": folder.name,
        "per_device_train_batch_size": task.batch // contender.accumulation,
        "gradient_accumulation_steps": contender.accumulation,
        "max_steps": task.steps,
        "learning_rate": task.learning_rate,
        "weight_decay": WEIGHT_DECAY,
        "max_grad_norm": MAX_GRAD_NORM,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "gradient_checkpointing": contender.checkpointing,
        "bf16": False,
        "use_cpu": True,
        "train_sampling_strategy": "sequential",
        "dataloader_pin_memory": False,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    if is_sft:
        datasets = importlib.import_module("datasets")
        data: Any = datasets.Dataset.from_list([{name: row[name].tolist() for name in row} for row in rows])
        # Rows as they are: no packing (the default), nothing cut, no column made.
        arguments = library.SFTConfig(**settings, max_length=None, packing=False, loss_type="nll")
        trainer = library.SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=_tokenizer(task))
    else:
        trainer = library.Trainer(model=model, args=library.TrainingArguments(**settings), train_dataset=rows)
    if task.schedule == "cosine":
        # Theirs would reach 0 one step after the last: with one step less it is memtrain's.
        trainer.create_optimizer()
        trainer.lr_scheduler = transformers.get_cosine_schedule_with_warmup(trainer.optimizer, 0, task.steps - 1)
    # What is logged is rounded to four digits.
    losses: list[torch.Tensor] = []
    training_step = trainer.training_step

    def kept(*given: Any, **named: Any) -> torch.Tensor:
        loss: torch.Tensor = training_step(*given, **named)
        losses.append(loss)
        return loss

    trainer.training_step = kept
    # Without a bar it prints each step.
    trainer.remove_callback(transformers.PrinterCallback)

    def train() -> list[float]:
        with folder:
            trainer.train()
        size = contender.accumulation
        return [torch.stack(losses[at : at + size]).sum().item() for at in range(0, len(losses), size)]

    return _Trainer(train)


def _tokenizer(task: Task) -> Any:
    """A tokenizer, which SFTTrainer asks for and has no use for: the rows are tokens already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({"<eos>": 0}, unk_token="<eos>")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="<eos>", pad_token="<eos>")


def _memtrain(task: Task, contender: Contender, model: Any, measures: bool) -> _Trainer:
    """memtrain's Trainer; the plan is made before ``train()``."""
    from memtrain.job import Budget, Limit
    from memtrain.loop import Loop
    from memtrain.trainer import Trainer

    assert contender.budget_bytes is not None
    job = _job(task)
    trainer = Trainer(
        model=model,
        data=_rows(task),
        budget=Budget(limits=(Limit("given to this contender", contender.budget_bytes),)),
        global_batch_size=task.batch,
        steps=task.steps,
        optimizer=job.optimizer,
        schedule=job.schedule,
        max_grad_norm=job.max_grad_norm,
        seed=0,
        constraints=contender.constraints,
        progress=False,
    )
    choice = trainer.choice
    if measures:
        # Two steps once, before the first, are none of those that are compared.
        Loop.rehearse = lambda self: None  # type: ignore[method-assign]
    else:
        trainer._session.meter = _Unmeasured()

    def train() -> list[float]:
        return [row["loss"] for row in trainer.train().metrics if "loss" in row]

    return _Trainer(train, str(choice.plan), choice.footprint.peak_allocated_bytes)


def _child(request: dict[str, Any]) -> None:
    """Run one contender and write what came of it."""
    # What libraries print goes to standard error; standard output is the line to the parent.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch
    import transformers
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from memtrain.trace.event import Phase
    from memtrain.trace.profile import MemoryProfiler, held_by

    torch.set_num_threads(request["threads"])
    transformers.logging.set_verbosity_error()
    task, contender = Task(**request["task"]), Contender(**request["contender"])
    model = _module(task)
    measures_peak = request["measure"] == "peak"
    match contender.kind:
        case "loop":
            trainer = _loop(task, model)
        case "memtrain":
            trainer = _memtrain(task, contender, model, measures=not measures_peak)
        case _:
            trainer = _peer(task, contender, model)
    turns, profiler = _Turns(channel), MemoryProfiler(lambda: held_by(model, None))
    if measures_peak:
        with profiler.window("train", Phase.FORWARD):
            losses = trainer.train()
    else:
        register_optimizer_step_pre_hook(turns)
        losses = trainer.train()
    libraries = ("torch", "transformers", "accelerate", *(("trl", "datasets") if contender.kind == "sft" else ()))
    run = Run(
        losses=losses,
        peak_bytes=profiler.peak_bytes if measures_peak else None,
        cpu_seconds=turns.cpu_seconds,
        seconds=turns.seconds,
        plan=trainer.plan,
        predicted_bytes=trainer.predicted_bytes,
        versions={name: version(name) for name in libraries},
    )
    print(json.dumps(asdict(run)), file=channel, flush=True)


if __name__ == "__main__":
    _child(json.loads(sys.argv[1]))
