"""The plan: every choice that leaves the trained numbers unchanged, up to rounding.

Each field is a union of small frozen classes, so that two choices which exclude one another cannot both be written
down. The class name in snake case is the policy's name in recipes, in ``plan.yaml`` and on the command line.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from memtrain.require import require


def _positive(name: str, value: int) -> None:
    require(type(value) is int and value >= 1, name, value, "a whole number of 1 or more")


@dataclass(frozen=True)
class Keep:
    """Keep every activation that backward needs."""

    def __str__(self) -> str:
        return "keep"


@dataclass(frozen=True)
class Recompute:
    """Keep only the input of each ``every``-th block (1: of all) and run that block again in backward (arXiv 1604.06174)."""

    every: int = 1

    def __post_init__(self) -> None:
        _positive("activations.every", self.every)

    def __str__(self) -> str:
        return "recompute every block" if self.every == 1 else f"recompute one block in {self.every}"


@dataclass(frozen=True)
class RecomputeFirst:
    """Keep only the inputs of the first ``blocks`` blocks and run these blocks again in backward."""

    blocks: int = 1

    def __post_init__(self) -> None:
        _positive("activations.blocks", self.blocks)

    def __str__(self) -> str:
        return f"recompute the first {self.blocks} blocks" if self.blocks > 1 else "recompute the first block"


@dataclass(frozen=True)
class RecomputeSelective:
    """Keep the results of products with weights and of attention kernels, and run the rest of each block again."""

    def __str__(self) -> str:
        return "recompute all but products and attention"


@dataclass(frozen=True)
class RecomputeAttention:
    """Run the attention of each block again in backward and keep the rest."""

    def __str__(self) -> str:
        return "recompute attention"


@dataclass(frozen=True)
class RecomputeMlp:
    """Run the MLP of each block again in backward and keep the rest."""

    def __str__(self) -> str:
        return "recompute MLPs"


@dataclass(frozen=True)
class WholeLogits:
    """The model's own loss on all logits of a micro-batch at once."""

    def __str__(self) -> str:
        return "whole logits"


@dataclass(frozen=True)
class ChunkedLogits:
    """Cross-entropy over a few rows of logits at a time; the whole logits never exist.

    Attributes:
        chunk_tokens: tokens whose logits exist at once.
    """

    chunk_tokens: int = 1024

    def __post_init__(self) -> None:
        _positive("loss.chunk_tokens", self.chunk_tokens)

    def __str__(self) -> str:
        return f"logits in chunks of {self.chunk_tokens} tokens"


@dataclass(frozen=True)
class AfterBackward:
    """Update all weights when the whole gradient is there."""

    def __str__(self) -> str:
        return "after backward"


@dataclass(frozen=True)
class DuringBackward:
    """Update each weight as soon as its gradient is there and free that gradient (arXiv 2306.09782)."""

    def __str__(self) -> str:
        return "during backward"


@dataclass(frozen=True)
class Fused:
    """One kernel per update, without temporaries."""

    def __str__(self) -> str:
        return "fused"


@dataclass(frozen=True)
class Foreach:
    """One kernel per operation over all weights, with temporaries as large as the weights."""

    def __str__(self) -> str:
        return "foreach"


@dataclass(frozen=True)
class OnDevice:
    """Optimizer state beside the weights."""

    def __str__(self) -> str:
        return "on the device"


@dataclass(frozen=True)
class OnHost:
    """Optimizer state in host memory, gradients sent there as backward produces them, the update run by the processor.

    After Rajbhandari et al. 2021, arXiv 2104.07857, and Ren et al. 2021, arXiv 2101.06840.
    """

    def __str__(self) -> str:
        return "on the host"


@dataclass(frozen=True)
class Paged:
    """32-bit optimizer state in managed memory, which moves between host and card page by page (bitsandbytes)."""

    def __str__(self) -> str:
        return "paged"


@dataclass(frozen=True)
class EightBit:
    """Optimizer state in 8 bits with a scale per 256 values (Dettmers et al. 2022, arXiv 2110.02861; bitsandbytes)."""

    def __str__(self) -> str:
        return "in 8 bits"


@dataclass(frozen=True)
class PagedEightBit:
    """8-bit optimizer state in managed memory (bitsandbytes)."""

    def __str__(self) -> str:
        return "in 8 bits, paged"


@dataclass(frozen=True)
class ModelDefault:
    """The attention that the model was built with: for most models of transformers SDPA, eager where it needs that."""

    def __str__(self) -> str:
        return "as the model has it"


@dataclass(frozen=True)
class Eager:
    """Attention written out in products and softmax; the scores exist whole."""

    def __str__(self) -> str:
        return "eager"


@dataclass(frozen=True)
class Sdpa:
    """torch.nn.functional.scaled_dot_product_attention: the best kernel that the device has for the inputs."""

    def __str__(self) -> str:
        return "SDPA"


@dataclass(frozen=True)
class FlashAttention:
    """The flash-attn package, the newest version that is installed (Dao et al. 2022, arXiv 2205.14135)."""

    def __str__(self) -> str:
        return "flash-attn"


@dataclass(frozen=True)
class Single:
    """One process."""

    def __str__(self) -> str:
        return "one process"


@dataclass(frozen=True)
class DataParallel:
    """Each process has the whole model and a share of the rows; gradients are averaged (torch DistributedDataParallel).

    Attributes:
        ranks: processes, a device each.
    """

    ranks: int = 2

    def __post_init__(self) -> None:
        rule = "a whole number of 2 or more; without sharding there is one process"
        require(type(self.ranks) is int and self.ranks >= 2, "sharding.ranks", self.ranks, rule)

    def __str__(self) -> str:
        return f"data parallel over {self.ranks} processes"


Activations = Keep | Recompute | RecomputeFirst | RecomputeSelective | RecomputeAttention | RecomputeMlp
Loss = WholeLogits | ChunkedLogits
Update = AfterBackward | DuringBackward
OptimizerKernel = Fused | Foreach
OptimizerState = OnDevice | OnHost | Paged | EightBit | PagedEightBit
Attention = ModelDefault | Eager | Sdpa | FlashAttention
Sharding = Single | DataParallel


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a job is fitted into memory.

    Attributes:
        micro_batch_size: rows in one forward and backward; gradients accumulate up to the job's global batch size.
        activations: what forward leaves for backward.
        loss: how the head and the loss are computed.
        update: when the weights are updated.
        optimizer_kernel: which of torch's implementations of the update rule runs, where torch's runs.
        optimizer_state: where the optimizer's state lies and in how many bits.
        attention: which implementation of attention the model calls.
        sharding: what of the job each of several processes has.
    """

    micro_batch_size: int
    activations: Activations = Keep()
    loss: Loss = WholeLogits()
    update: Update = AfterBackward()
    optimizer_kernel: OptimizerKernel = Fused()
    optimizer_state: OptimizerState = OnDevice()
    attention: Attention = ModelDefault()
    sharding: Sharding = Single()

    def __post_init__(self) -> None:
        _positive("micro_batch_size", self.micro_batch_size)

    def __str__(self) -> str:
        state = "" if isinstance(self.optimizer_state, OnDevice) else f", optimizer state {self.optimizer_state}"
        update = f"{self.optimizer_kernel} update {self.update}"
        attention = "" if isinstance(self.attention, ModelDefault) else f", attention {self.attention}"
        sharding = "" if isinstance(self.sharding, Single) else f", {self.sharding}"
        return f"micro-batch {self.micro_batch_size}, {self.activations}, {self.loss}, {update}{state}{attention}{sharding}"

    @property
    def ranks(self) -> int:
        """Processes that train together."""
        return self.sharding.ranks if isinstance(self.sharding, DataParallel) else 1

    def accumulation(self, global_batch_size: int) -> int:
        """Micro-batches per optimizer step in each process, each rank an equal share of the rows."""
        return global_batch_size // (self.micro_batch_size * self.ranks)


# The classes of each field that is a union: planner and tests go through them, so a new policy is planned and tested at once.
POLICIES: dict[str, tuple[type, ...]] = {
    "activations": get_args(Activations),
    "loss": get_args(Loss),
    "update": get_args(Update),
    "optimizer_kernel": get_args(OptimizerKernel),
    "optimizer_state": get_args(OptimizerState),
    "attention": get_args(Attention),
    "sharding": get_args(Sharding),
}


def policy_name(policy: type) -> str:
    """The name of a policy class in recipes and on the command line.

    >>> policy_name(DuringBackward)
    'during_backward'
    """
    return re.sub(r"(?<!^)(?=[A-Z])", "_", policy.__name__).lower()


def to_dict(plan: Plan) -> dict[str, Any]:
    """The plan as plain data, for YAML and JSON.

    >>> to_dict(Plan(micro_batch_size=4, activations=Recompute(every=2)))["activations"]
    {'policy': 'recompute', 'every': 2}
    """
    written: dict[str, Any] = {"micro_batch_size": plan.micro_batch_size}
    for field in POLICIES:
        policy = getattr(plan, field)
        written[field] = {"policy": policy_name(type(policy)), **dataclasses.asdict(policy)}
    return written


def from_dict(written: Mapping[str, Any]) -> Plan:
    """The plan that :func:`to_dict` wrote.

    Raises:
        ValueError: a key is missing or unknown, or a policy or one of its settings is.
    """
    unknown = written.keys() - POLICIES.keys() - {"micro_batch_size"}
    missing = (POLICIES.keys() | {"micro_batch_size"}) - written.keys()
    if unknown or missing:
        raise ValueError(
            f"a plan has the keys micro_batch_size, {', '.join(POLICIES)}; unknown here: {sorted(unknown)}, missing: {sorted(missing)}."
        )
    policies = {field: parse_policy(field, written[field]) for field in POLICIES}
    return Plan(micro_batch_size=written["micro_batch_size"], **policies)


def parse_policy(field: str, written: Any) -> Any:
    """One policy from ``{"policy": NAME, setting: value, …}``, or from its name alone.

    Raises:
        ValueError: the field has no policy of that name, or the policy no such setting.
    """
    classes = {policy_name(policy): policy for policy in POLICIES[field]}
    settings = dict(written) if isinstance(written, Mapping) else {"policy": written}
    name = settings.pop("policy", None)
    if name not in classes:
        raise ValueError(f"plan.{field} is {name!r}, and it must be one of {', '.join(classes)}.")
    known = [setting.name for setting in dataclasses.fields(classes[name])]
    for setting in settings:
        if setting not in known:
            raise ValueError(f"plan.{field}: {name} has no setting {setting!r}; it has {', '.join(known) or 'none'}.")
    return classes[name](**settings)


def ranks_of(constraints: Mapping[str, Any]) -> int:
    """Processes that a plan with these fields fixed is for.

    >>> ranks_of({"sharding": DataParallel(4)}), ranks_of({})
    (4, 1)
    """
    sharding = constraints.get("sharding")
    return sharding.ranks if isinstance(sharding, DataParallel) else 1


def parse_constraints(written: Mapping[str, Any]) -> dict[str, Any]:
    """Plan fields that are fixed: ``micro_batch_size`` as a number, each other as a policy or as what :func:`parse_policy` reads.

    Raises:
        ValueError: a field, a policy or one of its settings is unknown, or a value is out of range.

    >>> parse_constraints({"micro_batch_size": 2, "activations": "keep", "loss": {"policy": "chunked_logits", "chunk_tokens": 64}})
    {'micro_batch_size': 2, 'activations': Keep(), 'loss': ChunkedLogits(chunk_tokens=64)}
    """
    fixed: dict[str, Any] = {}
    if not isinstance(written, Mapping):
        raise ValueError(
            f"constraints are {written!r}, and they must map plan fields to values, such as {{'micro_batch_size': 2}}."
        )
    for field, value in written.items():
        if field == "micro_batch_size":
            _positive(field, value)
            fixed[field] = value
        elif field in POLICIES:
            fixed[field] = value if isinstance(value, POLICIES[field]) else parse_policy(field, value)
        else:
            raise ValueError(f"a plan has no field {field!r}, and it must be micro_batch_size or one of {', '.join(POLICIES)}.")
    return fixed
