"""What a folder on disk must hold to be trained: whole weights, and those of a model rather than of adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_build import tiny

from memtrain.models.build import FromPretrained, source
from memtrain.models.save import save_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model in a folder."""
    save_model(source(tiny()).build(), None, tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("packing", "form"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "in 4 bits"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "in 8 bits"),
        ({"quant_method": "gptq", "bits": 3}, "in 3 bits"),
        ({"quant_method": "mxfp4"}, "as mxfp4"),
    ],
)
def test_a_model_that_is_saved_in_few_bits_is_refused(folder: Path, packing: dict[str, Any], form: str) -> None:
    described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**described, "quantization_config": packing}), encoding="utf-8")
    sentence = (
        rf"^model '{folder}' is held {form} already, which cannot be trained or packed again: give the model it was made from, with "
        r"method lora and quantization nf4\.$"
    )
    with pytest.raises(ValueError, match=sentence):
        source(folder)
    with pytest.raises(ValueError, match=sentence):
        source(folder, tiny(quantization_config=packing))


def test_a_folder_of_adapters_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=rf"^model '{tmp_path}' holds adapters: give the model they belong to\.$"):
        source(tmp_path)


def test_weights_that_are_not_there_are_named(folder: Path) -> None:
    described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(
        json.dumps({**described, "architectures": ["LlamaForSequenceClassification"]}), encoding="utf-8"
    )
    made = source(folder)
    assert isinstance(made, FromPretrained)
    model, missing = made.read(torch.bfloat16)
    assert missing == ["score.weight"]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
