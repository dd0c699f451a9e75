"""The libraries that published runs were made with, and simulating records with them.

How much memory a model takes depends on the version of the library that holds it. The libraries of an environment are
installed into a folder beside what is there, without torch, and a child process finds them there first. It simulates all
records of that environment, one after another, and tells of each when it is done.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from published.record import Record
from published.run import NotExpressible, Prediction

if TYPE_CHECKING:
    from memtrain.trace.event import Trace

# What the old libraries need and the new ones no longer bring; no version of it matters here.
_ALSO_NEEDED = ("requests", "urllib3", "idna", "certifi", "charset-normalizer")
# What fms-acceleration replaces in a model; its kernels are the same in all versions since foak 0.4.
_FMS = ("fms-acceleration==0.6.1", "fms-acceleration-foak==0.6.0", "fms-acceleration-peft==0.3.5")
_TRANSFORMERS_4_48 = ("transformers==4.48.1", "tokenizers==0.21.0", "huggingface_hub==0.26.2", "accelerate==1.0.1")
_TRANSFORMERS_4_45 = ("transformers==4.45.2", "tokenizers==0.20.3", "huggingface_hub==0.25.1", "accelerate==0.34.2")
_LIGHTNING = ("lightning==2.6.1", "lightning-utilities==0.15.3", "torchmetrics==1.9.0")

CURRENT = "current"
ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    CURRENT: (),
    "transformers-4.48.1": (*_TRANSFORMERS_4_48, "peft==0.13.2", *_FMS, *_ALSO_NEEDED),
    "transformers-4.45.2": (*_TRANSFORMERS_4_45, "peft==0.12.0", *_FMS, *_ALSO_NEEDED),
    "transformers-4.45.2-peft-0.13.2": (*_TRANSFORMERS_4_45, "peft==0.13.2", *_FMS, *_ALSO_NEEDED),
    "transformers-4.51.3": ("transformers==4.51.3", "tokenizers==0.21.1", "huggingface_hub==0.30.2", *_ALSO_NEEDED),
    # By itself: transformers imports torchvision where it finds it, and this one belongs to another torch.
    "torchvision-0.21.0": ("torchvision==0.21.0",),
    "litgpt-0.1.0.dev1": ("litgpt==0.1.0.dev1", *_LIGHTNING),
    "litgpt-0.4.5": ("litgpt==0.4.5", *_LIGHTNING),
    "litgpt-0.4.13": ("litgpt==0.4.13", *_LIGHTNING),
}
"""The libraries of each environment, named as pip takes them; what is not named is what is installed."""

# The first line that a child writes of a record begins so; libraries may print as well.
_MARK = "prediction "


class Failed(Exception):
    """A step outside of memtrain failed; the message says which and how."""


# ---------------------------------------------------------------------- the parent


def install(name: str, folder: Path) -> None:
    """Install the libraries of an environment into a folder, unless they are there.

    Raises:
        Failed: pip cannot.
    """
    if not ENVIRONMENTS[name]:
        return
    wanted = "\n".join(ENVIRONMENTS[name]) + "\n"
    done = folder / "installed.txt"
    if done.is_file() and done.read_text(encoding="utf-8") == wanted:
        return
    # Without dependencies, among which is torch.
    options = ("--quiet", "--disable-pip-version-check", "--no-deps", "--upgrade", "--target", str(folder))
    found = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, *ENVIRONMENTS[name]], capture_output=True, text=True, check=False
    )
    if found.returncode:
        raise Failed(f"pip cannot install {name} ({_last_line(found.stderr)}): give it an index that has these versions.")
    done.write_text(wanted, encoding="utf-8")


def predict_in(name: str, folder: Path, records: Sequence[Record], command: Sequence[str]) -> Iterator[Prediction]:
    """The predictions of records of one environment, each as soon as it is there, by a child process.

    A record at which the child itself ends is told as failed, and another child goes on behind it.

    Args:
        folder: of the environment's libraries, found before all others.
        command: starts the child, which calls ``answer``.
    """
    waiting = list(records)
    while waiting:
        done = 0
        for prediction in _ask(name, folder, waiting, command):
            done += 1
            yield prediction
        waiting = waiting[done:]


def _ask(name: str, folder: Path, records: Sequence[Record], command: Sequence[str]) -> Iterator[Prediction]:
    """What one child says, and the failure of the record at which it ended."""
    path = os.pathsep.join(part for part in (str(folder) if ENVIRONMENTS[name] else "", os.environ.get("PYTHONPATH")) if part)
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile("w+", encoding="utf-8") as asked, tempfile.TemporaryFile("w+", encoding="utf-8") as complaints:
        asked.writelines(json.dumps(asdict(record)) + "\n" for record in records)
        asked.seek(0)
        child = subprocess.Popen(command, env=environment, stdin=asked, stdout=subprocess.PIPE, stderr=complaints, text=True)
        assert child.stdout is not None
        told = 0
        try:
            for line in child.stdout:
                if line.startswith(_MARK):
                    told += 1
                    yield Prediction.of(json.loads(line.removeprefix(_MARK)))
        finally:
            child.kill()
            child.wait()
            child.stdout.close()
        if told < len(records):
            complaints.seek(0)
            yield Prediction(records[told].id, failed=f"the process with {name} ended: {_last_line(complaints.read())}")


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["without a word"])[-1]


# ---------------------------------------------------------------------- the child


def answer() -> None:
    """Read records from standard input, a line each, and write the prediction of each as a line."""
    for line in sys.stdin:
        prediction = predict(Record.of(json.loads(line)))
        print(_MARK + json.dumps(prediction.to_dict()), flush=True)


def predict(record: Record) -> Prediction:
    """The prediction of a record with the libraries that this process finds; a failure is told and not raised."""
    try:
        return _simulated(record)
    except NotExpressible as reason:
        return Prediction(record.id, skipped=str(reason))
    except Exception as error:
        # Where it happened is what whoever reads the table needs, and the whole of it goes to standard error.
        traceback.print_exc()
        return Prediction(record.id, failed=f"{type(error).__name__}: {_last_line(str(error))}")


def _simulated(record: Record) -> Prediction:
    from memtrain.device import Cuda
    from memtrain.memory.footprint import footprint
    from memtrain.trace.routing import Routing
    from memtrain.trace.simulate import simulate
    from published.express import express

    started = time.perf_counter()
    run = express(record)
    trace = simulate(run.job, run.plan, run.source, run.rows, run.device)
    spoken = trace.assumed
    if any("expert" in sentence for sentence in spoken):
        # Training spreads the tokens over the experts; the sentence tells both peaks.
        trace = simulate(run.job, run.plan, run.source, run.rows, run.device, routing=Routing.BALANCED)
    if not run.updates:
        trace = before_the_update(trace)
    found = footprint(trace, run.device)
    return Prediction(
        id=record.id,
        allocated_bytes=found.peak_allocated_bytes,
        reserved_bytes=found.peak_reserved_bytes,
        total_bytes=found.total_device_bytes,
        usable_bytes=run.device.usable_bytes if isinstance(run.device, Cuda) else 0,
        peak_phase=str(found.peak_phase),
        peak_module=found.peak_module,
        by_kind={str(kind): size for kind, size in found.by_kind.items()},
        assumed=(*run.assumed, *spoken),
        seconds=time.perf_counter() - started,
        versions=_versions(),
    )


def before_the_update(trace: Trace) -> Trace:
    """The trace up to the first update: loading, and one forward and backward."""
    from memtrain.trace.event import Phase

    updates = (Phase.FIRST_UPDATE, Phase.UPDATE)
    first = next((number for number, event in enumerate(trace.events) if event.phase in updates), len(trace.events))
    return replace(trace, events=trace.events[:first])


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("torch", "transformers", "peft", "accelerate", "bitsandbytes", "litgpt", "lightning"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
