"""Six published peaks of an A100, reproduced by memtrain's own simulation: ``python benchmarks/sketch_parity.py``.

The peaks are those of fine-tuning runs of IBM's fms-hf-tuning, which is transformers' Trainer underneath: full and LoRA,
packed rows of 4096 tokens, each block recomputed, flash attention, everything in bfloat16 but the adapters, AdamW in its
foreach form. How much memory a model takes depends on the version of the library that holds it, so each peak is simulated
with the versions it was measured with. They are installed beside what is there, into a folder, and a child process finds
them there first; torch stays the installed one. Nothing is fitted.

What is left of a difference: the Trainer keeps a sum of losses and, from 4.46 on, a count of tokens, each a block of 512
bytes; and it lets Mistral's norms decay, so that a foreach update has their temporaries beside all others.

Prints a table and one line. Exits 1 if a peak is further away than 0.05 %, and 2 if the libraries cannot be installed or a
simulation fails.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MOST_ERROR = 0.0005
LENGTH = 4096
# Where the measurements are published; the settings of the runs stand beside them, in scenarios*.yaml and defaults.yaml.
_REFERENCES = "foundation-model-stack/fms-acceleration:scripts/benchmarks/refs"

# What the old libraries need and the new ones no longer bring; no version of it matters here.
_ALSO_NEEDED = ("requests", "urllib3", "idna", "certifi", "charset-normalizer")
ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    "transformers-4.48.1": (
        *("transformers==4.48.1", "tokenizers==0.21.0", "huggingface_hub==0.26.2", "peft==0.13.2", "accelerate==1.0.1"),
        *_ALSO_NEEDED,
    ),
    "transformers-4.45.2": (
        *("transformers==4.45.2", "tokenizers==0.20.3", "huggingface_hub==0.25.1", "peft==0.12.0", "accelerate==0.34.2"),
        *_ALSO_NEEDED,
    ),
}
"""The libraries of each environment, named as pip takes them."""


@dataclass(frozen=True)
class Peak:
    """A published measurement.

    Attributes:
        model: a key of ``MODELS``.
        method: "full", or "lora" for adapters beside frozen weights.
        batch: rows per step.
        measured_bytes: torch's max_memory_allocated.
        environment: a key of ``ENVIRONMENTS``.
        source: the file that it is published in.
    """

    model: str
    method: str
    batch: int
    measured_bytes: int
    environment: str
    source: str


_MISTRAL = ("transformers-4.48.1", f"{_REFERENCES}/a100_80gb.csv")
_POWERLM = ("transformers-4.45.2", f"{_REFERENCES}/a100_80gb_granite.csv")
PEAKS = (
    Peak("mistralai/Mistral-7B-v0.1", "full", 4, 72_434_837_504, *_MISTRAL),
    Peak("mistralai/Mistral-7B-v0.1", "lora", 4, 26_704_571_904, *_MISTRAL),
    Peak("mistralai/Mistral-7B-v0.1", "lora", 8, 38_742_912_512, *_MISTRAL),
    Peak("ibm/PowerLM-3b", "full", 4, 35_134_836_736, *_POWERLM),
    Peak("ibm/PowerLM-3b", "full", 8, 47_059_390_976, *_POWERLM),
    # No multiple of the 512 bytes in which torch's allocator counts, so not one reading of it.
    Peak("ibm/PowerLM-3b", "lora", 8, 33_152_852_558, *_POWERLM),
)

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # The published 32000 tokens, and the "<pad>" that fms-hf-tuning adds to a tokenizer of the Llama kind.
    "mistralai/Mistral-7B-v0.1": (
        "Mistral",
        {
            "vocab_size": 32001,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "tie_word_embeddings": False,
        },
    ),
    # Every projection has a bias: the published index of the weights takes 52 kB, which is 642 names and not 362.
    "ibm/PowerLM-3b": (
        "Granite",
        {
            "vocab_size": 49152,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 40,
            "num_attention_heads": 36,
            "num_key_value_heads": 36,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
}
"""Of each model the family in transformers and the settings that decide its shapes."""


@dataclass(frozen=True)
class Result:
    """A published peak beside its prediction.

    Attributes:
        error: of the predicted allocated bytes, as a fraction of the measured ones.
        seconds: of the simulation and of the allocator's replay.
        peak_phase: where in a step the predicted peak is.
        assumed: what the simulation had to assume about values that only data tell.
    """

    model: str
    method: str
    batch: int
    length: int
    measured_bytes: int
    predicted_allocated_bytes: int
    error: float
    predicted_reserved_bytes: int
    peak_phase: str
    assumed: tuple[str, ...]
    seconds: float
    environment: str
    torch: str
    source: str


# ---------------------------------------------------------------------- the child: one environment, its simulations


def predict(peak: Peak) -> Result:
    """Simulate the run of one measurement, in a process that finds the libraries of its environment."""
    import torch

    from memtrain.job import AdamW, Job
    from memtrain.machine import named
    from memtrain.memory.footprint import footprint
    from memtrain.models.build import FromModule
    from memtrain.plan import AfterBackward, Foreach, OnDevice, Plan, Recompute, WholeLogits
    from memtrain.precision import Bf16
    from memtrain.trace.simulate import simulate

    job = Job(
        model=peak.model,
        global_batch_size=peak.batch,
        steps=20,
        optimizer=AdamW(learning_rate=2e-5, weight_decay=0.01),
        precision=Bf16(),
        max_grad_norm=1.0,
    )
    plan = Plan(
        micro_batch_size=peak.batch,
        activations=Recompute(),
        loss=WholeLogits(),
        update=AfterBackward(),
        optimizer_kernel=Foreach(),
        optimizer_state=OnDevice(),
    )
    # The collator of those runs pads, and so hands out a mask, though packed rows need none.
    rows = dict.fromkeys(("input_ids", "attention_mask", "labels"), ((LENGTH,), torch.int64))
    device = named("a100_80gb")
    source = FromModule(_module(peak))
    started = time.perf_counter()
    trace = simulate(job, plan, source, rows, device)
    found = footprint(trace, device)
    seconds = time.perf_counter() - started
    return Result(
        model=peak.model,
        method=peak.method,
        batch=peak.batch,
        length=LENGTH,
        measured_bytes=peak.measured_bytes,
        predicted_allocated_bytes=found.peak_allocated_bytes,
        error=found.peak_allocated_bytes / peak.measured_bytes - 1,
        predicted_reserved_bytes=found.peak_reserved_bytes,
        peak_phase=str(found.peak_phase),
        assumed=trace.assumed,
        seconds=seconds,
        environment=peak.environment,
        torch=torch.__version__,
        source=peak.source,
    )


def _module(peak: Peak) -> Any:
    """The model of a measurement on data-less tensors, as its run had it before the first step."""
    import torch

    transformers = importlib.import_module("transformers")
    _take_flash_attention(transformers)
    family, settings = MODELS[peak.model]
    config = getattr(transformers, f"{family}Config")(**settings, use_cache=False, max_position_embeddings=LENGTH)
    config._attn_implementation = "flash_attention_2"
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16)
        if peak.method == "lora":
            model = _with_adapters(model)
    return model


def _with_adapters(model: Any) -> Any:
    """The model with LoRA adapters in fp32, by peft."""
    import torch

    peft = importlib.import_module("peft")
    # The Trainer does so where blocks are recomputed. The embedded tokens are then a leaf of the graph, which keeps them.
    model.enable_input_require_grads()
    adapters = peft.LoraConfig(
        r=16,
        lora_alpha=16,
        lora_dropout=0.1,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(model, adapters)
    for parameter in model.parameters():
        if parameter.requires_grad:
            # peft does this to tensors with data, and leaves those without as they are.
            parameter.data = parameter.data.to(torch.float32)
    return model


def _take_flash_attention(transformers: Any) -> None:
    """Let transformers take the package flash-attn for installed, and torch's own build of those kernels for its function."""
    from torch.nn.functional import scaled_dot_product_attention

    def flash_attn_func(
        query: Any, key: Any, value: Any, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False
    ) -> Any:
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        attended = scaled_dot_product_attention(
            query, key, value, dropout_p=dropout_p, is_causal=causal, scale=softmax_scale, enable_gqa=True
        )
        return attended.transpose(1, 2)

    utilities = importlib.import_module("transformers.modeling_flash_attention_utils")
    utilities.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    utilities._flash_supports_window_size = True  # type: ignore[attr-defined]
    transformers.PreTrainedModel._check_and_enable_flash_attn_2 = classmethod(lambda cls, config, *args, **kwargs: config)


# ---------------------------------------------------------------------- the parent: environments, table, verdict


class Failed(Exception):
    """A step outside of memtrain failed; the message says which and how."""


def install(name: str, folder: Path) -> None:
    """Install the libraries of an environment into a folder, unless they are there.

    Raises:
        Failed: pip cannot.
    """
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


def predict_in(name: str, folder: Path) -> list[Result]:
    """The results of all peaks of an environment, from a child process that finds the libraries in ``folder`` first.

    Raises:
        Failed: the child does.
    """
    path = os.pathsep.join(part for part in (str(folder), os.environ.get("PYTHONPATH")) if part)
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, "--simulate", name]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if found.returncode:
        raise Failed(f"the simulations with {name} failed: {found.stderr.strip() or 'without a word'}")
    # Libraries may print while they are imported; the results are the last line.
    written = json.loads(found.stdout.splitlines()[-1])
    return [Result(**{**one, "assumed": tuple(one["assumed"])}) for one in written]


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["without a word"])[-1]


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """What the last line says, as data; errors are fractions."""
    errors = [abs(result.error) for result in results]
    return {
        "records": len(results),
        "within": sum(error <= MOST_ERROR for error in errors),
        "bound": MOST_ERROR,
        "largest_error": max(errors),
        "seconds": sum(result.seconds for result in results),
    }


def report(results: Sequence[Result], file: Path | None = None) -> int:
    """Print the table and its summary, write both to ``file``, and return the exit code."""
    headings = ("measured B", "predicted B", "error %", "reserved B", "seconds")
    print(f"{'model':26}{'method':8}{'rows':>10}" + "".join(f"{heading:>17}" for heading in headings))
    for row in results:
        numbers = (
            f"{row.measured_bytes:,}",
            f"{row.predicted_allocated_bytes:,}",
            f"{100 * row.error:+z.4f}",
            f"{row.predicted_reserved_bytes:,}",
            f"{row.seconds:.1f}",
        )
        shape = f"{row.batch} × {row.length}"
        print(f"{row.model:26}{row.method:8}{shape:>10}" + "".join(f"{number:>17}" for number in numbers))
    total = summary(results)
    print(
        f"sketch parity: {total['within']} of {total['records']} published peaks within {100 * MOST_ERROR:g} %, "
        f"largest error {100 * total['largest_error']:.4f} %, simulated in {total['seconds']:.1f} s"
    )
    if file is not None:
        content = {"summary": total, "records": [asdict(row) for row in results]}
        file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0 if total["within"] == total["records"] else 1


def main(environments: Path | None, file: Path | None) -> int:
    """Install the environments, run the simulations in each, report, and return the exit code."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = (environments or Path(temporary)).absolute()
        results: list[Result] = []
        try:
            for name in ENVIRONMENTS:
                install(name, folder / name)
                results += predict_in(name, folder / name)
        except Failed as failure:
            print(failure, file=sys.stderr)
            return 2
    return report(results, file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=Path, help="folder for the libraries, to be used again; temporary without it")
    parser.add_argument("--json", type=Path, dest="file", help="file for the same as data")
    parser.add_argument("--simulate", choices=ENVIRONMENTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.simulate:
        print(json.dumps([asdict(predict(peak)) for peak in PEAKS if peak.environment == arguments.simulate]))
        sys.exit(0)
    sys.exit(main(arguments.environments, arguments.file))
