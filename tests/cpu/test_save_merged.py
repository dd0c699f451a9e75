"""A run of the command line that leaves adapters, and beside them the model with the adapters added to its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.utils import set_seed
from transformers import AutoModelForCausalLM

from memtrain.__main__ import main
from memtrain.models.build import source

TINY = [
    *("steps=2", "global_batch_size=2", "data.sequence_length=16", "data.held_out=0", "data.path=text.txt"),
    *("data.tokenizer.train_vocab_size=259", "model.config.num_hidden_layers=1", "method=lora", "method.rank=2"),
]


def test_a_run_leaves_adapters_and_where_asked_for_the_merged_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 9, encoding="utf-8")
    assert main([*TINY, "run.save_merged=true", "run.dir=run", "optimizer.learning_rate=0.1"]) == 0
    assert {path.name for path in Path("run/model").iterdir()} >= {"adapter_model.safetensors", "adapter_config.json"}
    merged = AutoModelForCausalLM.from_pretrained("run/merged")
    assert not [name for name in merged.state_dict() if "lora" in name]
    # The base is drawn again from the run's seed: what was added has the adapters' rank.
    set_seed(0)
    base: Any = source(yaml.safe_load(Path("run/config.yaml").read_text())["model"]["config"]).load()
    added = merged.model.layers[0].mlp.up_proj.weight - base.model.layers[0].mlp.up_proj.weight
    assert torch.linalg.matrix_rank(added.detach(), atol=1e-4).item() == 2
    assert torch.equal(merged.model.embed_tokens.weight, base.model.embed_tokens.weight)


def test_without_adapters_there_is_nothing_to_merge(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run.save_merged=true"]) == 2
    assert capsys.readouterr().err == (
        "memtrain: run.save_merged is true, and method full has no adapters to add: set method to lora, or it to false.\n"
    )
