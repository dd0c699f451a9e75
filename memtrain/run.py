"""The training step, and putting it together from a job and a plan.

``prepare`` is the one function that turns a plan into a step; ``Run.step`` is the one step. The simulation calls both on a
data-less model, the Trainer on the real one, the benchmarks on either (rule 1). Features are functions applied here, in
one order; the step has no branch for any of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from memtrain.check import PlanRefused, check
from memtrain.data.rows import Batch
from memtrain.features.attention import set_attention_
from memtrain.features.autocast import autocast_, tf32_
from memtrain.features.bitsandbytes_adamw import bitsandbytes_adamw, bitsandbytes_lion, embedding_weights
from memtrain.features.chunked_loss import chunk_loss_
from memtrain.features.data_parallel import Sharded, data_parallel, single
from memtrain.features.host_state import step_on_host, update_on_host_
from memtrain.features.lion import lion
from memtrain.features.loss_scale import loss_factor, loss_scaler, no_scaler, update_unscaled
from memtrain.features.muon import muon
from memtrain.features.optimizers import adafactor, adam, adamw, sgd
from memtrain.features.packed_flash import separate_rows_
from memtrain.features.recompute import recompute_blocks_, recompute_first_, recompute_selectively_
from memtrain.features.update import Update, nothing_left, step_one_by_one, update_after_backward, update_during_backward_
from memtrain.features.wide_update import wide_step
from memtrain.job import Adafactor, Adam, AdamW, Job, Lion, Muon, NotFinite, Sgd
from memtrain.models.blocks import blocks, parts
from memtrain.models.objective import Objective, See, objective, ties_rows
from memtrain.plan import (
    Activations,
    Attention,
    ChunkedLogits,
    DataParallel,
    DuringBackward,
    Eager,
    EightBit,
    FlashAttention,
    Fused,
    Keep,
    ModelDefault,
    OnDevice,
    OnHost,
    Paged,
    Plan,
    Recompute,
    RecomputeAttention,
    RecomputeFirst,
    RecomputeMlp,
    RecomputeSelective,
    Sdpa,
)
from memtrain.precision import AutocastBf16, AutocastFp16, Bf16, Bf16Master, Fp32, Precision, Rounding


@dataclass(frozen=True)
class StepResult:
    """What a step computed; still on the device.

    Attributes:
        loss: mean over the counted items of all micro-batches, a scalar.
        grad_norm: 2-norm of the whole gradient before clipping, a scalar; None where it was not computed.
        updated: whether weights were changed. False where the gradient is known not to be finite: then weights, state and
            step counts are what they were. True with a loss that is not finite: where no norm is computed, the gradient was
            not looked at and has most likely spoilt the weights.
    """

    loss: Tensor
    grad_norm: Tensor | None
    updated: bool


@dataclass
class Run:
    """A model, its optimizer and the step that trains it.

    Attributes:
        model: the prepared model, in training mode.
        optimizer: holds the learning rate in its param_groups.
        scaler: of the loss; one that is not enabled leaves losses as they are.
        objective: what the loss is a mean over.
        sharded: what of the training this process has.
        forward_backward: adds up the gradients of the micro-batches and returns their loss.
        update: changes the weights, unless the gradient is known not to be finite, and frees the gradients.
        release: gives the model back as it was, but for its weights; the run is over.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    objective: Objective
    sharded: Sharded
    forward_backward: Callable[[Sequence[Batch]], Tensor]
    update: Callable[[], Update]
    release: Callable[[], None]

    def step(self, micro_batches: Sequence[Batch]) -> StepResult:
        """One optimizer step over the micro-batches of one effective batch."""
        loss = self.forward_backward(micro_batches)
        return StepResult(loss, *self.update())

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch], see: See | None = None) -> Tensor:
        """The mean loss over the counted items of all batches of all processes, a scalar, with dropout off.

        Args:
            batches: those of this process, at least one.
            see: is shown each batch and what the model returned for it, which is gone when the next one comes.
        """
        losses, counts = [], []
        restore = _modes_of(self.model)
        self.model.eval()
        try:
            for batch in batches:
                counts.append(self.objective.count(batch))
                shown = () if see is None else (see,)
                losses.append(self.objective.loss(self.model, batch, *shown) * counts[-1])
        finally:
            restore()
        total = self.sharded.sum_over_ranks
        return total(torch.stack(losses).sum()) / total(torch.stack(counts).sum())


def _modes_of(model: nn.Module) -> Callable[[], None]:
    """What gives each module its present mode, training or evaluation, back."""
    modes = [(module, module.training) for module in model.modules()]

    def restore() -> None:
        for module, mode in modes:
            module.training = mode

    return restore


def _rests(model: nn.Module) -> set[nn.Module]:
    """The modules that stay in evaluation mode: parts of a model in training mode that are not, and have only frozen parameters."""
    found: set[nn.Module] = set()
    # A model that was loaded is in evaluation mode as a whole, which says nothing about its parts.
    for module in model.modules() if model.training else ():
        trains = [] if module.training else [parameter.requires_grad for parameter in module.parameters()]
        if trains and not any(trains):
            found.update(part for part in module.modules() if not part.training)
    return found


def prepare(job: Job, plan: Plan, model: nn.Module) -> Run:
    """Apply a plan to a model and return the run that trains it. The model is changed in place until the run is released.

    The whole model trains: parts in evaluation mode are set to training mode, and gradients that are there are freed. What stays
    in evaluation mode are parts of a model in training mode that were set so and have parameters all of which are frozen.

    Raises:
        PlanRefused: the plan would not train what the job says, or cannot be applied to this model; nothing is changed.
    """
    check(plan, job)
    _check_model(plan, job, model)
    what = objective(model, job.loss)
    scaler = _scaler(job.precision, model)
    update: Callable[[], Update]
    # Skipping takes a norm to skip by, also where nothing is clipped.
    skips_unclipped = job.max_grad_norm is None and job.on_not_finite == NotFinite.SKIP
    bound = math.inf if skips_unclipped else job.max_grad_norm
    undo = ExitStack()
    try:
        undo.callback(_modes_of(model))
        rests = _rests(model)
        model.train()
        for module in rests:
            module.training = False
        # In this order: recomputation wraps the blocks with the attention that they call, the loss wraps the whole forward
        # around them, autocast wraps the loss too, the optimizer comes when no feature replaces a parameter any more, and
        # sharding wraps the model in what the step calls.
        try:
            undo.callback(_set_attention_(plan.attention, model))
            undo.callback(_recompute_(plan.activations, model))
            if isinstance(plan.loss, ChunkedLogits):
                factor = loss_factor(scaler, model, plan.micro_batch_size / job.global_batch_size)
                undo.callback(chunk_loss_(model, plan.loss.chunk_tokens, factor))
            undo.callback(_compute_in_(job.precision, model))
            optimizer = _optimizer(job, plan, model)
        except ValueError as refusal:
            raise PlanRefused(str(refusal)) from refusal
        optimizer.zero_grad(set_to_none=True)
        undo.callback(optimizer.zero_grad, set_to_none=True)
        step = _step_of_one(job.precision, optimizer)
        if isinstance(plan.update, DuringBackward):
            on_host = isinstance(plan.optimizer_state, OnHost)
            undo.callback(update_during_backward_(optimizer, step_on_host(optimizer, step) if on_host else step))
            update = nothing_left
        elif isinstance(plan.optimizer_state, OnHost):
            update, stop_sending = update_on_host_(optimizer, bound, step)
            undo.callback(stop_sending)
        elif scaler.is_enabled():
            update = update_unscaled(optimizer, bound, scaler)
        else:
            step_all = None if step is None else step_one_by_one(optimizer, step)
            update = update_after_backward(optimizer, bound, step_all)
        sharded = data_parallel(model, plan.ranks) if isinstance(plan.sharding, DataParallel) else single(model)
        undo.callback(sharded.release)
        return Run(model, optimizer, scaler, what, sharded, _forward_backward(sharded, what, scaler), update, undo.close)
    except BaseException:
        undo.close()
        raise


def _set_attention_(attention: Attention, model: nn.Module) -> Callable[[], None]:
    """Let the model call the implementation that the plan names, and return the undoing."""
    match attention:
        case ModelDefault():
            return lambda: None
        case Eager():
            return set_attention_(model, "eager")
        case Sdpa():
            return set_attention_(model, "sdpa")
        case FlashAttention():
            undo = ExitStack()
            undo.callback(set_attention_(model, "flash_attention"))
            undo.callback(separate_rows_(model))
            return undo.close


def _recompute_(activations: Activations, model: nn.Module) -> Callable[[], None]:
    """Recompute what the plan names, and return the undoing."""
    if isinstance(activations, Keep):
        return lambda: None
    named = blocks(model)
    found = list(named.values())
    match activations:
        case Recompute():
            return recompute_blocks_(found, activations.every)
        case RecomputeFirst():
            return recompute_first_(found, activations.blocks)
        case RecomputeSelective():
            return recompute_selectively_(found)
        case RecomputeAttention():
            return recompute_blocks_(list(parts(named, "attention").values()))
        case RecomputeMlp():
            return recompute_blocks_(list(parts(named, "mlp").values()))


def _compute_in_(precision: Precision, model: nn.Module) -> Callable[[], None]:
    """Let products compute in the precision where the weights' own type does not say it; returns the undoing."""
    match precision:
        case AutocastBf16():
            return autocast_(model, torch.bfloat16)
        case AutocastFp16():
            return autocast_(model, torch.float16)
        case Fp32(tf32=True):
            return tf32_()
        case _:
            return lambda: None


def _scaler(precision: Precision, model: nn.Module) -> torch.amp.GradScaler:
    return loss_scaler(model, **asdict(precision)) if isinstance(precision, AutocastFp16) else no_scaler()


def _step_of_one(precision: Precision, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], None] | None:
    """What updates one parameter where that is not the optimizer's own step."""
    match precision:
        case Bf16Master():
            return wide_step(optimizer, "master")
        case Bf16(rounding=Rounding.COMPENSATED):
            return wide_step(optimizer, "compensated")
        case Bf16(rounding=Rounding.STOCHASTIC):
            return wide_step(optimizer, "stochastic")
        case _:
            return None


def _optimizer(job: Job, plan: Plan, model: nn.Module) -> torch.optim.Optimizer:
    """The job's optimizer over the model's weights, in the form that the plan names."""
    rule, parameters = asdict(job.optimizer), model.parameters()
    state = plan.optimizer_state
    if not isinstance(state, OnDevice | OnHost):
        memory: Literal["managed", "device"] = "device" if isinstance(state, EightBit) else "managed"
        bits: Literal[8, 32] = 32 if isinstance(state, Paged) else 8
        whole = embedding_weights(model)
        make = bitsandbytes_lion if isinstance(job.optimizer, Lion) else bitsandbytes_adamw
        return make(parameters, **rule, bits=bits, memory=memory, in_32_bits=whole)
    fused = isinstance(plan.optimizer_kernel, Fused)
    match job.optimizer:
        case AdamW():
            return adamw(parameters, **rule, fused=fused)
        case Adam():
            return adam(parameters, **rule, fused=fused)
        case Sgd():
            return sgd(parameters, **rule, fused=fused)
        case Adafactor():
            return adafactor(parameters, **rule)
        case Lion():
            return lion(parameters, **rule)
        case Muon():
            return muon(model, **rule)


def _check_whole(plan: Plan, job: Job, does: str) -> None:
    """Refuse to cut a batch whose rows a model does something over."""
    if plan.ranks > 1:
        raise PlanRefused(f"{does} the rows that a process has, which is another thing: train in one process.")
    if plan.micro_batch_size != job.global_batch_size:
        raise PlanRefused(
            f"{does} the micro-batch, so micro_batch_size {plan.micro_batch_size} would train something else than the batch of "
            f"{job.global_batch_size} rows: set micro_batch_size to {job.global_batch_size}."
        )


def _check_model(plan: Plan, job: Job, model: nn.Module) -> None:
    """Refuse what would change the numbers of this model (rule 2), and what cannot be simulated."""
    if (tied := ties_rows(model)) is not None:
        _check_whole(plan, job, f"{type(model).__name__} {tied}")
    rests = _rests(model)
    for path, module in model.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise PlanRefused(f"{path} has sparse gradients, whose memory depends on the data: make it with sparse=False.")
        if isinstance(module, nn.RNNBase):
            raise PlanRefused(
                f"{path or type(model).__name__} is a recurrent layer, whose kernels keep memory that no trace shows: "
                f"take attention or convolution in its place."
            )
        # The class that all of torch's batch norms share.
        if not isinstance(module, nn.modules.batchnorm._BatchNorm) or (module in rests and module.track_running_stats):
            continue
        _check_whole(plan, job, f"{path} normalises over")
        if isinstance(job.precision, AutocastFp16) and module.track_running_stats:
            raise PlanRefused(
                f"{path} counts each forward in its running statistics, and a step that overflows in fp16 is taken again: "
                f"set precision to autocast_bf16."
            )
        if job.on_not_finite == NotFinite.SKIP and module.track_running_stats:
            raise PlanRefused(
                f"{path} counts each forward in its running statistics, and a step that is left out would stay in them: "
                f"set on_not_finite to stop."
            )
        if not isinstance(plan.activations, Keep) and module.track_running_stats:
            raise PlanRefused(
                f"{path} counts each forward in its running statistics, and recomputing it counts twice: keep the activations."
            )


def _forward_backward(sharded: Sharded, what: Objective, scaler: torch.amp.GradScaler) -> Callable[[Sequence[Batch]], Tensor]:
    def forward_backward(micro_batches: Sequence[Batch]) -> Tensor:
        counts = [what.count(batch) for batch in micro_batches]
        counted = sharded.sum_over_ranks(torch.stack(counts).sum())
        total = torch.zeros((), device=counted.device)
        for index, (batch, items) in enumerate(zip(micro_batches, counts, strict=True)):
            with sharded.accumulating(index, len(micro_batches)):
                loss = what.loss(sharded.forward_module, batch) * (items / counted)
                scaler.scale(loss).backward()
            total = total + loss.detach()
            # A loss that lives into the next forward keeps the inputs of the last block alive.
            del loss
        return sharded.sum_over_ranks(total)

    return forward_backward
