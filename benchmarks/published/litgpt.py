"""Records of LitGPT (Lightning-AI): its table of resources of October 2023, and its hub of finetuning configurations of 2024.

The model is built by the LitGPT that PyPI has nearest to what was measured. The table belongs to commit 8641822; the first
release came five months later and differs, as far as memory goes, in its RMSNorm. A finetuning script's micro-batch is
litgpt_modules.py.

Which micro-batch decides: the script of 2023 begins with the longest row of the data, whose length the table gives, and later
batches are of rows drawn at random, most of them a tenth as long; so one micro-batch is simulated, before which there are no
gradients and no optimizer state. Of the hub's runs, which cut rows at 512 tokens, every batch is taken to be that long: an upper
bound where a micro-batch has few rows, since what is kept of the one before is then often of a shorter one.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from published.cards import card
from published.record import Record
from published.run import NotExpressible, PublishedRun

if TYPE_CHECKING:
    from torch import nn

OF_2023 = "litgpt-0.1.0.dev1"
OF_SPRING_2024 = "litgpt-0.4.5"
OF_AUTUMN_2024 = "litgpt-0.4.13"

# What 0.4.5 does not know; the release that brought it also multiplies by a norm's weight in fp32.
_LATER_MODELS = re.compile(r"gemma-2-|llama-3\.[12]", re.IGNORECASE)

# Tokens that the head makes logits of at once, but where all weights train.
_CHUNK = 128
_METHODS = {"full": "model", "lora": "lora", "qlora": "lora", "adapter": "adapter", "adapter-v2": "adapter_v2"}
# ``global_batch_size`` in the files of the hub: 6 or 8, and more in those that train all weights. Records say nothing of it.
_ROWS_OF_A_STEP = 8
# What of a block has adapters: the name in a record, and in LitGPT's configuration.
_TARGETS = {"q": "query", "k": "key", "v": "value", "o": "projection", "mlp": "mlp", "lm_head": "head"}


@dataclass(frozen=True)
class _Release:
    """What differs between the LitGPTs of the two sources.

    Attributes:
        package: what it is imported as.
        lora: what the names of LoRA's settings begin with: of the numbers, and of the layers.
        longest_first: whether the first batch holds the longest row.
        keeps_loss: whether the loss lives into the next forward.
    """

    package: str
    lora: tuple[str, str]
    longest_first: bool
    keeps_loss: bool


_RELEASES = {
    OF_2023: _Release("lit_gpt", ("", "to_"), longest_first=True, keeps_loss=True),
    OF_SPRING_2024: (_OF_2024 := _Release("litgpt", ("lora_", "lora_"), longest_first=False, keeps_loss=False)),
    OF_AUTUMN_2024: _OF_2024,
}


def environment(record: Record) -> str:
    """The libraries that a record is simulated with."""
    if not _is_of_litgpt(record):
        return "current"
    if "resource-tables" in record.source:
        return OF_2023
    return OF_AUTUMN_2024 if _LATER_MODELS.search(record.model) else OF_SPRING_2024


def express(record: Record) -> PublishedRun:
    """The run of a record, with the libraries of its environment installed.

    Raises:
        NotExpressible: it ran on several cards, or LitGPT has no such model or method.
    """
    if record.gpus.get("count", 1) != 1 or record.sharding != "none":
        raise NotExpressible(
            f"the run was split over {record.gpus.get('count')} cards ({record.sharding}), and memtrain shards no weights."
        )
    if record.batch_size_per_gpu is None or record.seq_len is None:
        raise NotExpressible("the record names no batch size or no length, and both decide.")
    if any("inconsistent as published" in one for one in record.assume):
        raise NotExpressible("the record itself says that the published peak is inconsistent with its settings.")
    return _finetuning(record) if _is_of_litgpt(record) else _feed_forward(record)


def _is_of_litgpt(record: Record) -> bool:
    return "litgpt" in f"{record.source_family} {record.source}".lower()


# ---------------------------------------------------------------------- LitGPT's finetuning scripts


def _finetuning(record: Record) -> PublishedRun:
    import torch

    from memtrain.job import AdamW, Job
    from memtrain.models.build import FromModule
    from memtrain.plan import AfterBackward, Foreach, Fused, Keep, OnDevice, Paged, Plan, WholeLogits
    from memtrain.precision import Bf16, Fp32

    if not {"bf16-true", "bf16"} & set(record.precision.replace(",", " ").split()):
        raise NotExpressible(f"precision {record.precision!r} is not told here, which tells LitGPT's bf16-true.")
    release = _RELEASES[environment(record)]
    rows, packed = record.batch_size_per_gpu or 1, _is_packed(record)
    micro_batches = 1 if release.longest_first else max(record.grad_accum or 1, _ROWS_OF_A_STEP // rows)
    job = Job(
        model=record.model,
        global_batch_size=rows * micro_batches,
        steps=1 if release.longest_first else 2,
        optimizer=AdamW(learning_rate=2e-4, weight_decay=0.0),
        # All is in bf16, but for the state of PagedAdamW, which memtrain has in a job in fp32; the weights keep their type.
        precision=Fp32() if packed else Bf16(),
        max_grad_norm=None,
    )
    plan = Plan(
        micro_batch_size=rows,
        activations=Keep(),
        loss=WholeLogits(),
        update=AfterBackward(),
        # Where the weights are packed the scripts take PagedAdamW, which updates weight by weight.
        optimizer_kernel=Fused() if packed else Foreach(),
        optimizer_state=Paged() if packed else OnDevice(),
    )
    lengths: tuple[str, ...] = ("the rows of the check before training were taken to be as long as the longest",)
    if not release.longest_first:
        lengths = (
            "every batch was taken to reach the length at which rows are cut",
            f"a step was taken to have {_ROWS_OF_A_STEP} rows",
        )
    device, assumed = card(str(record.gpus.get("type", "")))
    return PublishedRun(
        job=job,
        plan=plan,
        source=FromModule(_module(record, release)),
        rows=dict.fromkeys(("input_ids", "labels"), ((record.seq_len or 0,), torch.int64)),
        device=device,
        assumed=(*lengths, *assumed),
    )


def _module(record: Record, release: _Release) -> nn.Module:
    """The model of a record on data-less tensors, as its script had it before the first step."""
    import torch

    from published.litgpt_modules import Finetuning, pack_, use_norms_of_2023_

    method = record.method.partition("+")[0]
    if method not in _METHODS:
        raise NotExpressible(f"method {record.method!r} is not among LitGPT's scripts: {', '.join(_METHODS)}.")
    library: Any = importlib.import_module(f"{release.package}.{_METHODS[method]}")
    utilities: Any = importlib.import_module(f"{release.package}.utils")
    config = library.Config.from_name(_name(record.model, release.package), **_lora(record, release))
    with torch.device("meta"):
        model: Any = library.GPT(config)
    if release is _RELEASES[OF_2023]:
        use_norms_of_2023_(model)
    if method != "full":
        trained = "lora" if "lora" in method else _METHODS[method]
        getattr(library, f"mark_only_{trained}_as_trainable")(model)
    model.to(torch.bfloat16)
    if _is_packed(record):
        pack_(model, double_quantization="dq" in record.precision)
    # Computed anew for the longest row, and then in fp32; what they were before was of the context's length.
    model.max_seq_length = record.seq_len
    chunk = 0 if method == "full" else _CHUNK
    return Finetuning(model, utilities.chunked_cross_entropy, chunk, release.keeps_loss)


def _is_packed(record: Record) -> bool:
    """Whether the frozen weights are in 4 bits."""
    return "nf4" in f"{record.precision} {record.method}" or record.method == "qlora"


def _lora(record: Record, release: _Release) -> dict[str, Any]:
    """LoRA's settings; of the scale and of how many are dropped memory does not depend, but for whether any are."""
    if "lora" not in record.method:
        return {}
    number, layer = release.lora
    targets = record.lora_targets or ("q", "v")
    if unknown := set(targets) - set(_TARGETS):
        raise NotExpressible(f"LoRA on {', '.join(sorted(unknown))} is not told here, which tells {', '.join(_TARGETS)}.")
    layers = {f"{layer}{name}": target in targets for target, name in _TARGETS.items()}
    dropout = 0.05 if record.lora_dropout is None else record.lora_dropout
    return {f"{number}r": record.lora_rank or 8, f"{number}alpha": 16, f"{number}dropout": dropout, **layers}


def _name(model: str, package: str) -> str:
    """The name that LitGPT has for a model: the same but for case and hyphens, or the first that begins so."""
    known: Any = importlib.import_module(f"{package}.config")
    wanted = _plain(model.rpartition("/")[2])
    names = [(config["name"], (config.get("hf_config") or {}).get("name", "")) for config in known.configs]
    for suits in (str.__eq__, str.startswith):
        for name, published in names:
            if suits(_plain(name), wanted) or suits(_plain(published), wanted):
                return str(name)
    raise NotExpressible(f"{package} has no model named {model!r}.")


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


# ---------------------------------------------------------------------- Lightning's example of a feed-forward


def _feed_forward(record: Record) -> PublishedRun:
    import torch

    from memtrain.job import AdamW, Job
    from memtrain.models.build import FromModule
    from memtrain.plan import AfterBackward, Foreach, Keep, OnDevice, Plan, WholeLogits
    from memtrain.precision import Fp32
    from published.litgpt_modules import FeedForward

    sizes = re.search(r"FeedForward\((\d+), ?(\d+)\)", record.model)
    if sizes is None:
        raise NotExpressible(
            f"the model {record.model!r} is not told here, which tells Lightning's FeedForward(width, hidden)."
        )
    width, hidden = (int(size) for size in sizes.groups())
    rows = record.batch_size_per_gpu or 1
    with torch.device("meta"):
        model = FeedForward(width, hidden)
    device, assumed = card(str(record.gpus.get("type", "")))
    return PublishedRun(
        job=Job(
            model=record.model,
            global_batch_size=rows,
            steps=8,
            optimizer=AdamW(learning_rate=3e-3),
            precision=Fp32(),
            max_grad_norm=None,
        ),
        plan=Plan(
            micro_batch_size=rows,
            activations=Keep(),
            loss=WholeLogits(),
            update=AfterBackward(),
            optimizer_kernel=Foreach(),
            optimizer_state=OnDevice(),
        ),
        source=FromModule(model),
        rows={"x": ((width,), torch.float32)},
        device=device,
        assumed=assumed,
    )
