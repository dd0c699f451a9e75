"""Runs of IBM's fms-hf-tuning, which is trl's SFTTrainer on transformers' Trainer: the benchmarks of fms-acceleration.

What is told of them here stands in scripts/benchmarks of foundation-model-stack/fms-acceleration (scenarios*.yaml, defaults.yaml,
refs/requirements*.txt) and in trl 0.11 and 0.13 (trainer/sft_trainer.py, trainer/utils.py):

- Rows are packed, each block is recomputed, attention is flash-attn's, AdamW is foreach with a weight decay of 0.01.
- fms-hf-tuning gives a tokenizer that has no token for padding one, and the embeddings and the head another row for it.
- Full and LoRA runs compute in the type of the weights, bfloat16. Mixed precision is the Trainer's: accelerate runs forward under
  autocast and then casts what it returns to fp32.
- Packed weights have their scales packed as well, whatever a table says (BitsAndBytesConfig in fms_acceleration_peft's
  framework_plugin_bnb.py): the bytes that are published of the end of training are those.
- ``baseline-peft-bnb`` leaves adapters to SFTTrainer, which casts to fp32 what is not packed, and embeddings and head back.
  ``accelerated-peft-bnb`` casts nothing.
"""

from __future__ import annotations

import re

from published.record import Record
from published.run import NotExpressible, PublishedRun

# Of the files of measurements, which versions each was made with.
_ENVIRONMENTS = {
    "a100_80gb_granite.csv": "transformers-4.45.2",
    "a100_80gb_liger.csv": "transformers-4.45.2-peft-0.13.2",
}


def environment(record: Record) -> str:
    """The versions of requirements*.txt beside the file that a record is from."""
    return next((name for file, name in _ENVIRONMENTS.items() if file in record.source), "transformers-4.48.1")


def framework(record: Record) -> str:
    """The benchmark's ``framework_config``, "none" where there is none."""
    found = re.search(r"framework_config=([\w-]+)", record.notes)
    return found[1] if found else "none"


def express(record: Record) -> PublishedRun:
    """The run of a record.

    Raises:
        NotExpressible: it is sharded, or its batches depend on the data.
    """
    import torch

    from memtrain.job import AdamW, Job
    from memtrain.plan import AfterBackward, Foreach, Keep, OnDevice, Plan, WholeLogits
    from memtrain.precision import Bf16
    from published.cards import card
    from published.fms_model import source

    _check(record)
    assert record.batch_size_per_gpu is not None
    assert record.seq_len is not None
    job = Job(
        model=record.model,
        global_batch_size=record.batch_size_per_gpu * (record.grad_accum or 1),
        steps=20,
        optimizer=AdamW(learning_rate=2e-5, weight_decay=0.01),
        precision=Bf16(),
        max_grad_norm=1.0,
    )
    plan = Plan(
        micro_batch_size=record.batch_size_per_gpu,
        # The model recomputes by itself, as transformers does it.
        activations=Keep(),
        loss=WholeLogits(),
        update=AfterBackward(),
        optimizer_kernel=Foreach(),
        optimizer_state=OnDevice(),
    )
    # The collator of those runs pads, and so hands out a mask, though packed rows need none.
    rows = dict.fromkeys(("input_ids", "attention_mask", "labels"), ((record.seq_len,), torch.int64))
    device, near = card(str(record.gpus.get("type")))
    return PublishedRun(
        job=job,
        plan=plan,
        source=source(record),
        rows=rows,
        device=device,
        assumed=("rows are packed to the length that is given", *near),
    )


def _check(record: Record) -> None:
    if record.sharding != "none":
        raise NotExpressible(f"sharding {record.sharding!r} is not simulated")
    if "unpacked" in " ".join(record.assume):
        raise NotExpressible("the batches hold rows of several lengths, which are not published")
    if record.batch_size_per_gpu is None or record.seq_len is None:
        raise NotExpressible("the record has no batch size or no length")
    if record.method != "full" and not (record.lora_rank and record.lora_targets):
        raise NotExpressible("the record does not say which modules get adapters, or of which rank")
