"""The simulated trace of many architectures against that of the real step: ``python benchmarks/architectures.py``.

Tiny configurations of the real classes, on this processor. Each pair of traces has to agree event by event: same bytes, same
operators, same order, from the first step to the last evaluation (parity.py says what is compared). Every
architecture goes through the main features, and a few through all of them.

Prints a table and one line. Exits 1 where something differs that ``KNOWN`` does not name.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from parity import differences, events, real_trace, shapes_of
from tiny_models import ARCHITECTURES, MIXTURES, ROWS

from memtrain.device import Cpu
from memtrain.job import Adafactor, AdamW, Job, Sgd
from memtrain.method import Lora, Nf4
from memtrain.models.build import FromConfig, FromModule, ModelSource, weight_dtype
from memtrain.plan import (
    ChunkedLogits,
    DuringBackward,
    Eager,
    Foreach,
    Fused,
    Plan,
    Recompute,
    RecomputeAttention,
    RecomputeMlp,
    RecomputeSelective,
    Sdpa,
)
from memtrain.precision import AutocastBf16, AutocastFp16, Bf16, Bf16Master
from memtrain.trace.routing import Routing
from memtrain.trace.simulate import simulate

PROCESSOR = Cpu(name="cpu", threads=2, flops_per_second=1e11, bytes_per_second=2e10, operator_seconds=1e-5)
EVALUATION_ROWS = 3

# ---------------------------------------------------------------------- features


@dataclass(frozen=True)
class Feature:
    """What is different from fp32, everything kept, AdamW.

    Attributes:
        routing: the experts of a mixture run one after another, and this is who chooses whom, in both runs.
    """

    job: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    routing: Routing | None = None


MAIN: Mapping[str, Feature] = {
    "fp32": Feature(),
    "autocast_bf16": Feature({"precision": AutocastBf16()}),
    "bf16": Feature({"precision": Bf16()}),
    "recompute": Feature({}, {"activations": Recompute()}),
    "eager": Feature({}, {"attention": Eager()}),
    "chunked": Feature({}, {"loss": ChunkedLogits(16)}),
    "lora": Feature({"method": Lora(rank=4)}),
}
"""What every architecture goes through."""

REST: Mapping[str, Feature] = {
    "autocast_fp16": Feature({"precision": AutocastFp16(initial_scale=1.0)}),
    "bf16_master": Feature({"precision": Bf16Master()}),
    "selective": Feature({}, {"activations": RecomputeSelective()}),
    "attention": Feature({}, {"activations": RecomputeAttention()}),
    "mlp": Feature({}, {"activations": RecomputeMlp()}),
    "nf4_lora": Feature({"method": Lora(rank=4), "quantization": Nf4()}),
    "sdpa": Feature({}, {"attention": Sdpa()}),
    "fused": Feature({"optimizer": AdamW(weight_decay=0.1)}, {"optimizer_kernel": Fused()}),
    "foreach": Feature({"optimizer": AdamW(weight_decay=0.1)}, {"optimizer_kernel": Foreach()}),
    "sgd": Feature({"optimizer": Sgd()}),
    "adafactor": Feature({"optimizer": Adafactor()}),
    "during_backward": Feature({"max_grad_norm": None}, {"update": DuringBackward(), "micro_batch_size": ROWS}),
    "recompute_bf16": Feature({"precision": AutocastBf16()}, {"activations": Recompute(), "loss": ChunkedLogits(16)}),
}
"""What the architectures of ``THOROUGH`` go through besides."""

ROUTED: Mapping[str, Feature] = {
    f"{routing}_{name}": Feature(job, plan, routing)
    for routing in Routing
    for name, job, plan in (("fp32", {}, {}), ("recompute_bf16", {"precision": AutocastBf16()}, {"activations": Recompute()}))
}
"""What mixtures of experts go through besides."""

FEATURES = {**MAIN, **REST, **ROUTED}

THOROUGH = ("llama", "gemma2", "gpt2", "mixtral", "t5", "bert_classes", "vit")

KNOWN: Mapping[str, str] = {
    "torch_encoder": "evaluation runs torch's fused layers, whose inside no recorder sees, and is simulated operator by operator",
}
"""By architecture, why evaluation on a processor is known to differ from its simulation; training has to be equal."""

# ---------------------------------------------------------------------- comparison


_NO_CAUSAL_LOSS = frozenset(
    {
        *(
            "t5",
            "bart",
            "whisper",
            "bert_masked_lm",
            "bert_classes",
            "roberta",
            "electra",
            "albert",
            "deberta_v2",
            "modernbert",
        ),
        *("vit", "swin", "convnext", "mobilenet_v2", "residual_network", "torch_encoder", "plain_module"),
    }
)
_BATCH_NORM = frozenset({"mobilenet_v2", "residual_network"})
REFUSED: Mapping[str, frozenset[str]] = {
    # gemma2 caps its logits.
    "chunked": _NO_CAUSAL_LOSS | {"gemma2"},
    "recompute_bf16": _NO_CAUSAL_LOSS | {"gemma2"},
    # albert calls one block over and over; batch norms would count twice, and move though they are frozen.
    "recompute": _BATCH_NORM | {"albert"},
    "lora": _BATCH_NORM | {"mamba"},
    "nf4_lora": frozenset({"mixtral"}),
    "mlp": frozenset({"bert_classes"}),
    # gemma2 caps its scores.
    "sdpa": frozenset({"gemma2"}),
    "eager": frozenset({"falcon", "residual_network", "torch_encoder", "plain_module"}),
}
"""What each feature is refused to, by architecture; any other refusal counts as a difference that is not known."""


@dataclass(frozen=True)
class Result:
    """One architecture with one feature.

    Attributes:
        outcome: "equal", "differs" or "refused".
        events: events of the real trace that were compared.
        differing: lines of the difference.
        reason: why it was refused; of a known difference its cause.
        shown: the first lines of the difference.
    """

    architecture: str
    feature: str
    outcome: str
    events: int = 0
    differing: int = 0
    reason: str = ""
    shown: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    seconds: float = 0.0


def compare(name: str, feature_name: str) -> Result:
    """Simulate and run one architecture with one feature."""
    architecture, feature = ARCHITECTURES[name], FEATURES[feature_name]
    job = Job(model=name, global_batch_size=ROWS, steps=2, **feature.job)
    size = ROWS if architecture.whole_batch else ROWS // 2
    plan = replace(Plan(micro_batch_size=size), **feature.plan)
    dtype = weight_dtype(job.precision)
    # Where the weights have 16 bits, what is no token has them too.
    rows = {key: one.to(dtype) if one.is_floating_point() else one for key, one in architecture.rows().items()}

    def model() -> ModelSource:
        built = architecture.build()
        if isinstance(built, FromModule):
            built.module.to(dtype)
        if feature.routing is not None and isinstance(built, FromConfig):
            built.config._experts_implementation = "eager"
        return built

    started = time.perf_counter()
    try:
        predicted = simulate(
            job, plan, model(), shapes_of(rows), PROCESSOR, evaluation_rows=EVALUATION_ROWS, routing=feature.routing
        )
    except ValueError as refusal:
        return Result(name, feature_name, "refused", reason=str(refusal), seconds=time.perf_counter() - started)
    measured = real_trace(job, plan, model(), rows, evaluation_rows=EVALUATION_ROWS, routing=feature.routing)
    real = events(measured)
    found = differences(real, events(predicted))
    trained = found and differences(events(measured, evaluation=False), events(predicted, evaluation=False))
    return Result(
        name,
        feature_name,
        "differs" if found else "equal",
        events=len(real),
        differing=len(found),
        reason=KNOWN.get(name, "") if found and not trained else "",
        shown=tuple(found[:12]),
        assumed=predicted.assumed,
        seconds=time.perf_counter() - started,
    )


def pairs() -> Iterator[tuple[str, str]]:
    """What is compared, architecture by architecture."""
    for name in ARCHITECTURES:
        for feature in (*MAIN, *(REST if name in THOROUGH else ()), *(ROUTED if name in MIXTURES else ())):
            yield name, feature


def summary(results: Iterable[Result]) -> dict[str, Any]:
    """What the last line says, as data."""
    listed = list(results)
    count = {outcome: sum(one.outcome == outcome for one in listed) for outcome in ("equal", "differs", "refused")}
    return {
        "architectures": len({one.architecture for one in listed}),
        "compared": count["equal"] + count["differs"],
        "equal": count["equal"],
        "known_differences": sum(one.outcome == "differs" and bool(one.reason) for one in listed),
        "unknown_differences": sum(one.outcome == "differs" and not one.reason for one in listed),
        "unknown_refusals": sum(
            one.outcome == "refused" and one.architecture not in REFUSED.get(one.feature, ()) for one in listed
        ),
        "refused": count["refused"],
        "events": sum(one.events for one in listed),
        "seconds": sum(one.seconds for one in listed),
    }


def line(one: Result) -> str:
    """A line of the table."""
    outcome = {"equal": "equal", "refused": f"refused: {one.reason}", "differs": f"{one.differing} events differ"}[one.outcome]
    cause = f" ({one.reason})" if one.outcome == "differs" and one.reason else ""
    return f"{one.architecture:18}{one.feature:26}{one.events:>8,}  {outcome}{cause}"


def report(results: Iterable[Result], file: Path | None = None) -> int:
    """Print the table as it comes and its summary, write both to ``file``, and return the exit code."""
    print(f"{'architecture':18}{'feature':26}{'events':>8}  outcome")
    listed = []
    for one in results:
        listed.append(one)
        print(line(one), flush=True)
    total = summary(listed)
    print(
        f"architectures: {total['equal']} of {total['compared']} traces of {total['architectures']} architectures equal, "
        f"{total['events']:,} events; {total['known_differences']} known to differ, {total['unknown_differences']} not known, "
        f"{total['refused']} refused, {total['unknown_refusals']} of them not known; {total['seconds']:.0f} s"
    )
    if file is not None:
        content = {"summary": total, "records": [asdict(one) for one in listed]}
        file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 1 if total["unknown_differences"] or total["unknown_refusals"] else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, dest="file", help="file for the same as data")
    arguments = parser.parse_args()
    sys.exit(report((compare(*pair) for pair in pairs()), arguments.file))
