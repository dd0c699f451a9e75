"""Bytes and seconds of a language model's head and loss: whole logits, memtrain's chunks, torch's and Liger's.

Each contender computes the mean cross-entropy of ``hidden @ weight.T`` against labels, of which some do not count, and the
gradients of both factors. Printed are the peak beyond the inputs (which holds the two gradients in any case), the median
seconds of interleaved repeats, and how far the gradients lie from those of whole logits in fp64: the norm of the
difference over that of the gradient.

On a processor torch's profiler measures the peak; on a card the allocator counts. ``torch.nn.functional.linear_cross_entropy``
is there from torch 2.13 on. Liger's kernels are for a card.

Usage: python benchmarks/chunked_loss.py [--tokens N] [--width N] [--vocabulary N] [--repeats N] [--device cuda] [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from memtrain.data.rows import IGNORED
from memtrain.features.chunked_loss import chunked_cross_entropy
from memtrain.memory.timeline import MemoryTimeline
from memtrain.trace.event import Kind, Phase
from memtrain.trace.profile import MemoryProfiler
from memtrain.units import format_bytes, format_seconds

WHOLE = "whole logits"
CHUNKS = (256, 1024)

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The mean loss of hidden states (tokens, width), the head (vocabulary, width) and labels (tokens,)."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What one contender took in one data type.

    Attributes:
        peak_bytes: beyond hidden states, head and labels.
        seconds: median of the repeats, forward and backward.
        error: the larger of the two gradients', against whole logits in fp64.
    """

    name: str
    dtype: str
    peak_bytes: int
    seconds: float
    error: float


def contenders(device: torch.device) -> tuple[dict[str, Loss], list[str]]:
    """The contenders that run here, and why the others do not."""
    found: dict[str, Loss] = {WHOLE: whole}
    absent = []
    for tokens in CHUNKS:
        found[f"memtrain, {tokens} tokens"] = chunked(tokens)
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        for policy in ("auto", "accurate", "compact"):
            found[f"torch, {policy}"] = of_torch(acc_policy=policy)
        for tokens in CHUNKS:
            found[f"torch, {tokens} tokens"] = of_torch(batch_chunk_size=tokens, chunking_method=None)
    else:
        absent.append(f"torch: linear_cross_entropy came with 2.13, and this is {torch.__version__}")
    if device.type != "cuda":
        # It also patches what it is given for the whole process, and fails at its first kernel.
        absent.append("liger: its kernels run on a card only")
    elif importlib.util.find_spec("liger_kernel") is None:
        absent.append("liger: not installed (pip install liger-kernel)")
    else:
        found["liger"] = of_liger()
    return found, absent


def whole(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """As the models of transformers do it: logits in the model's type, and a copy in fp32."""
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, ignore_index=IGNORED)


def chunked(tokens: int) -> Loss:
    """memtrain's, over so many tokens at a time."""

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return chunked_cross_entropy(hidden, weight, labels, chunk_tokens=tokens) / (labels != IGNORED).sum()

    return loss


def of_torch(**options: Any) -> Loss:
    """torch's, with these options."""
    chosen = torch.nn.LinearCrossEntropyOptions(**options)

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        found: Tensor = F.linear_cross_entropy(hidden, weight, labels, ignore_index=IGNORED, options=chosen)
        return found

    return loss


def of_liger() -> Loss:
    """Liger's fused linear cross-entropy, the function alone: nothing is patched."""
    module = importlib.import_module("liger_kernel.transformers.fused_linear_cross_entropy")
    function = module.LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED)

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        found: Tensor = function(weight, hidden, labels)
        return found

    return loss


@dataclass(frozen=True)
class Inputs:
    """Hidden states (tokens, width), head (vocabulary, width), labels (tokens,), and the gradients in fp64."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    exact: tuple[Tensor, Tensor]

    def held(self) -> Iterator[tuple[Kind, Tensor]]:
        """What lives before and after."""
        yield from ((Kind.WEIGHT, tensor) for tensor in (self.hidden, self.weight, self.labels))

    def gradients(self, loss: Loss) -> tuple[Tensor, ...]:
        """Those of hidden states and head."""
        return torch.autograd.grad(loss(self.hidden, self.weight, self.labels), (self.hidden, self.weight))


def inputs(tokens: int, width: int, vocabulary: int, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Random ones, of the size that a model's norm and initialisation give; every 16th label counts nothing."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).to(device, dtype)
    weight = (0.05 * torch.randn(vocabulary, width, generator=generator)).to(device, dtype)
    labels = torch.randint(vocabulary, (tokens,), generator=generator)
    labels[::16] = IGNORED
    labels = labels.to(device)
    exact = exact_gradients(hidden.double(), weight.double(), labels)
    return Inputs(hidden.requires_grad_(), weight.requires_grad_(), labels, exact)


def exact_gradients(hidden: Tensor, weight: Tensor, labels: Tensor, rows: int = 256) -> tuple[Tensor, Tensor]:
    """Those of whole logits in fp64, some rows at a time, to hold no more than the contenders do."""
    hidden.requires_grad_()
    weight.requires_grad_()
    counted = (labels != IGNORED).sum()
    for start in range(0, len(labels), rows):
        logits = F.linear(hidden[start : start + rows], weight)
        (F.cross_entropy(logits, labels[start : start + rows], ignore_index=IGNORED, reduction="sum") / counted).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return hidden.grad, weight.grad


def peak_bytes(given: Inputs, loss: Loss) -> int:
    """The peak of forward and backward beyond what is given."""
    if given.hidden.is_cuda:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        given.gradients(loss)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    profiler = MemoryProfiler(given.held)
    with profiler.window("loss", Phase.FORWARD):
        given.gradients(loss)
    trace = profiler.traces()["loss"]
    held = sum(event.bytes for event in trace.events[: trace.marks[1][1]])
    return MemoryTimeline(trace).peak_bytes - held


def seconds(given: Inputs, loss: Loss) -> float:
    """Seconds of one forward and backward."""
    started = time.perf_counter()
    given.gradients(loss)
    if given.hidden.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def error(given: Inputs, loss: Loss) -> float:
    """The larger of the relative errors of the two gradients."""
    found = given.gradients(loss)
    return max(float((one - exact).norm() / exact.norm()) for one, exact in zip(found, given.exact, strict=True))


def compare(given: Inputs, losses: dict[str, Loss], repeats: int) -> list[Found]:
    """Every contender on the same inputs: the peak first, which also warms up; then one repeat of each in turn."""
    peaks = {name: peak_bytes(given, loss) for name, loss in losses.items()}
    taken: dict[str, list[float]] = {name: [] for name in losses}
    for _ in range(repeats):
        for name, loss in losses.items():
            taken[name].append(seconds(given, loss))
    dtype = str(given.hidden.dtype).removeprefix("torch.")
    return [
        Found(
            name=name,
            dtype=dtype,
            peak_bytes=peaks[name],
            seconds=statistics.median(taken[name]),
            error=error(given, loss),
        )
        for name, loss in losses.items()
    ]


def table(found: list[Found]) -> str:
    """One line for each, the types below each other."""
    lines = [f"{'':10}{'':24}{'peak':>12}{'seconds':>12}{'error':>10}"]
    for one in found:
        cells = f"{format_bytes(one.peak_bytes):>12}{format_seconds(one.seconds):>12}{one.error:10.1e}"
        lines.append(f"{one.dtype:10}{one.name:24}{cells}")
    return "\n".join(lines)


def verdict(found: list[Found]) -> str:
    """The last line: in each type, what takes the fewest bytes and what the least time."""
    said = []
    for dtype in dict.fromkeys(one.dtype for one in found):
        alike = [one for one in found if one.dtype == dtype]
        smallest, fastest = min(alike, key=lambda one: one.peak_bytes), min(alike, key=lambda one: one.seconds)
        said.append(
            f"{dtype}: fewest bytes {smallest.name} ({format_bytes(smallest.peak_bytes)}), "
            f"fastest {fastest.name} ({format_seconds(fastest.seconds)})"
        )
    return "; ".join(said)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--json", type=Path, help="write what was measured there")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    losses, absent = contenders(device)
    found: list[Found] = []
    for dtype in (torch.float32, torch.bfloat16):
        given = inputs(asked.tokens, asked.width, asked.vocabulary, dtype, device)
        found += compare(given, losses, asked.repeats)
    where = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    print(
        f"torch {torch.__version__}, {where}, {torch.get_num_threads()} threads, {asked.repeats} repeats: "
        f"{asked.tokens} tokens, width {asked.width}, vocabulary {asked.vocabulary}"
    )
    print(table(found))
    for reason in absent:
        print(reason)
    if asked.json:
        facts = {"torch": torch.__version__, "machine": where, "threads": torch.get_num_threads()}
        sizes = {name: getattr(asked, name) for name in ("tokens", "width", "vocabulary", "repeats")}
        written = {**facts, **sizes, "absent": absent, "found": [asdict(one) for one in found]}
        asked.json.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    print(verdict(found))


if __name__ == "__main__":
    main()
