"""A run of the xMem study told as a run of memtrain: model, loop, rows and card, by rule from the fields of a record.

What the study's loop does otherwise than ``Run.step`` is a habit of the model handed in (``AsInTheLoop``): the last outputs,
loss and batch stay bound until the next forward has returned, and so do the gradients where they are zeroed only then.

Lengths. A batch is padded to its longest row, at most 128 tokens, and rows are drawn at random from wikitext-2-raw. By the
study's data description about a third of its rows are empty and a quarter reach 128 tokens; the lengths between are taken to
be spread evenly. Two steps stand for the run's four. The first has the length that the shortest of four batches has in the
median, which from 7 rows on is 128; the second has 128. A first step that is shorter leaves segments that the second cannot
use, so its length matters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from memtrain.data.rows import Batch
from memtrain.device import Cuda
from memtrain.job import Adafactor, Adam, AdamW, Job, Optimizer, Sgd
from memtrain.machine import named
from memtrain.models.build import FromModule
from memtrain.plan import AfterBackward, Foreach, Fused, Keep, OnDevice, Plan, WholeLogits
from memtrain.precision import Fp32
from memtrain.trace.simulate import RowShapes
from published.run import NotExpressible, PublishedRun
from published.xmem_models import language_model, network

_STEPS = 4
_EMPTY = 1 / 3
_LONGEST = 1 / 4
_CARDS = {
    "NVIDIA GeForce RTX 3060": "rtx_3060",
    "NVIDIA GeForce RTX 4060": "rtx_4060",
    "NVIDIA A100-SXM4-40GB": "a100_40gb",
}
# Learning rates are the study's 1e-3; they and weight decay allocate nothing.
_OPTIMIZERS: Mapping[str, Callable[[], Optimizer]] = {
    "AdamW": lambda: AdamW(learning_rate=1e-3),
    "Adam": lambda: Adam(learning_rate=1e-3),
    "SGD": lambda: Sgd(learning_rate=1e-3, momentum=0.0),
    "Adafactor": lambda: Adafactor(learning_rate=1e-3),
}


@dataclass(frozen=True)
class Setting:
    """What of a record decides its memory.

    Attributes:
        seq_len: the most tokens of a row; None for images.
        seq_padding: begins with "fixed" where every batch has ``seq_len`` tokens.
        effective_zero_grad: "grads_freed_before_forward", or "after_forward…" where they live through the next forward.
        input_size, num_classes: of networks for images, else None.
    """

    id: str
    model: str
    optimizer: str
    batch_size: int
    gpu: str
    total_gpu_memory: int
    effective_zero_grad: str = "grads_freed_before_forward"
    seq_len: int | None = None
    seq_padding: str = ""
    attn_impl_inferred: str = "eager"
    input_size: tuple[int, ...] | None = None
    num_classes: int | None = None

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Setting:
        """The setting of one parsed line; other keys are left out, and nulls are the defaults."""
        known = {one.name for one in fields(cls)}
        said = {name: value for name, value in line.items() if name in known and value is not None}
        size = said.pop("input_size", None)
        return cls(**said, input_size=None if size is None else tuple(size))


class AsInTheLoop(nn.Module):
    """A model that holds what the study's loop leaves bound.

    Args:
        model: called with the batch, or with its images.
        keeps_gradients: whether the gradients of a step live until the next forward has returned.
        lengths: tokens of the first forwards, in order; later ones take the batch as it is.
    """

    def __init__(self, model: nn.Module, *, keeps_gradients: bool = False, lengths: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.model = model
        self._keeps_gradients = keeps_gradients
        self._lengths = list(lengths)
        self._gradients: list[Tensor | None] = []
        self._watched = False
        self._bound: tuple[Any, ...] = ()
        self._batch: Batch | None = None

    def forward(self, **batch: Tensor) -> Tensor:
        """The mean loss of a batch."""
        # The data-less copy of a parameter has no hooks, so they are added where it is first used.
        if self._keeps_gradients and not self._watched:
            self._watched = True
            for parameter in self.model.parameters():
                parameter.register_post_accumulate_grad_hook(lambda trained: self._gradients.append(trained.grad))
        if self._lengths:
            length = self._lengths.pop(0)
            batch = {name: tensor[:, :length].contiguous() for name, tensor in batch.items()}
        # The next batch is on the card before the last one is let go of.
        self._batch = batch
        outputs, loss = self._outputs_and_loss(batch)
        self._bound = outputs, loss
        self._gradients.clear()
        return loss

    def _outputs_and_loss(self, batch: Batch) -> tuple[Any, Tensor]:
        if "images" not in batch:
            outputs = self.model(**batch)
            return outputs, outputs.loss
        outputs = self.model(batch["images"])
        return outputs, nn.functional.cross_entropy(outputs, batch["labels"])


def express(setting: Setting) -> PublishedRun:
    """The run that a record tells of.

    Raises:
        NotExpressible: memtrain has no such model, optimizer or card.
    """
    if setting.optimizer not in _OPTIMIZERS:
        raise NotExpressible(f"memtrain has no optimizer {setting.optimizer}.")
    job = Job(
        model=setting.model,
        global_batch_size=setting.batch_size,
        steps=_STEPS,
        optimizer=_OPTIMIZERS[setting.optimizer](),
        precision=Fp32(),
        max_grad_norm=None,
    )
    plan = Plan(
        micro_batch_size=setting.batch_size,
        activations=Keep(),
        loss=WholeLogits(),
        update=AfterBackward(),
        # torch's default on a card; Adafactor's is weight by weight, which memtrain calls fused.
        optimizer_kernel=Fused() if setting.optimizer == "Adafactor" else Foreach(),
        optimizer_state=OnDevice(),
    )
    rows: RowShapes
    first: tuple[int, ...] = ()
    assumed: tuple[str, ...] = ()
    if setting.input_size is not None:
        module = network(setting.model, setting.num_classes or 1000)
        rows = {"images": (setting.input_size, torch.float32), "labels": ((), torch.int64)}
    else:
        module = language_model(setting.model, setting.attn_impl_inferred)
        longest = setting.seq_len or 128
        rows = dict.fromkeys(("input_ids", "attention_mask", "labels"), ((longest,), torch.int64))
        length = longest if setting.seq_padding.startswith("fixed") else shortest_expected(setting.batch_size, longest)
        if length < longest:
            first = (length,)
            assumed = (f"the first batch has {length} tokens a row",)
    keeps = setting.effective_zero_grad.startswith("after_forward")
    source = FromModule(AsInTheLoop(module, keeps_gradients=keeps, lengths=first))
    return PublishedRun(job, plan, source, rows, card(setting.gpu, setting.total_gpu_memory), assumed=assumed)


def shortest_expected(rows: int, longest: int = 128) -> int:
    """Tokens of the shortest of four batches of so many rows, in the median.

    >>> [shortest_expected(rows) for rows in (1, 5, 6, 7)]
    [1, 110, 124, 128]
    """
    # Each batch is at least so long with the chance that makes it half for all four.
    share = (1 - 0.5 ** (1 / _STEPS)) ** (1 / rows)
    if share >= 1 - _LONGEST:
        return longest
    between: float = (share - _EMPTY) / (1 - _LONGEST - _EMPTY)
    return max(1, round(between * longest))


def card(name: str, total_bytes: int) -> Cuda:
    """The card of that name with the memory that the record gives it.

    Raises:
        NotExpressible: it is not described.
    """
    if name not in _CARDS:
        raise NotExpressible(f"the card {name} is not described.")
    described = named(_CARDS[name])
    assert isinstance(described, Cuda)
    return replace(described, usable_bytes=total_bytes)
