"""What stays unloaded until it is needed: ``import memtrain`` is quick, and a mistake is reported before torch loads."""

from __future__ import annotations

import subprocess
import sys

import pytest


def loaded_after(code: str) -> set[str]:
    """The top-level modules in a fresh interpreter that has run ``code``, whatever it printed."""
    report = "import sys; print('\\n' + ' '.join({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_importing_memtrain_loads_nothing_heavy() -> None:
    loaded = loaded_after("import memtrain")
    assert "memtrain" in loaded
    assert loaded.isdisjoint({"torch", "transformers", "accelerate", "hydra", "rich", "matplotlib", "numpy"})


@pytest.mark.parametrize("arguments", [["--help"], ["--cfg", "job"], ["sequence_lenght=3"], ["budget=24"]])
def test_the_configuration_needs_neither_torch_nor_transformers(arguments: list[str]) -> None:
    loaded = loaded_after(f"from memtrain.__main__ import main; main({arguments!r})")
    assert "hydra" in loaded
    assert loaded.isdisjoint({"torch", "transformers", "accelerate"})
