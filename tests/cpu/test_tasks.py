"""Which class a task or a configuration names, settings of a configuration, and models that bring their own code."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import Mlp
from transformers import AutoConfig

from memtrain.data.task import Task
from memtrain.job import Job
from memtrain.models.build import FromModule, FromPretrained, source
from memtrain.models.load import load_model
from memtrain.models.objective import objective
from memtrain.models.save import no_progress_bars, save_model
from memtrain.models.tasks import model_class, task_of
from memtrain.trace.simulate import dataless_model

TINY = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def tiny(model_type: str = "llama", **settings: Any) -> dict[str, Any]:
    return {"model_type": model_type, **TINY, **settings}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """transformers draws a progress bar for each file."""
    with no_progress_bars():
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A language model in a folder."""
    torch.manual_seed(0)
    source(tiny()).load().save_pretrained(tmp_path)  # type: ignore[operator]
    return tmp_path


def refused(model: Path) -> str:
    with pytest.raises(ValueError) as raised:  # noqa: PT011  (compared by the caller)
        source(model)
    return str(raised.value)


# ---------------------------------------------------------------------------------------------- classes


@pytest.mark.parametrize(
    ("model_type", "settings", "name"),
    [
        ("llama", {}, "LlamaForCausalLM"),
        ("gpt2", {}, "GPT2LMHeadModel"),
        ("bert", {}, "BertForMaskedLM"),
        ("bert", {"is_decoder": True}, "BertLMHeadModel"),
        ("t5", {}, "T5ForConditionalGeneration"),
        ("bart", {}, "BartForConditionalGeneration"),
        ("bert", {"architectures": ["BertForSequenceClassification"]}, "BertForSequenceClassification"),
        ("llama", {"architectures": ["LlamaForSequenceClassification", "LlamaForCausalLM"]}, "LlamaForSequenceClassification"),
        ("llama", {"architectures": []}, "LlamaForCausalLM"),
    ],
)
def test_the_class_is_the_first_named_else_the_language_model_of_its_type(
    model_type: str, settings: dict[str, Any], name: str
) -> None:
    assert model_class(AutoConfig.for_model(model_type, **settings)).__name__ == name


def test_an_unknown_architecture_is_refused() -> None:
    import transformers

    expected = f"architecture 'MyModel' is not in transformers {transformers.__version__}: give the model as an nn.Module."
    with pytest.raises(ValueError, match=re.escape(expected)):
        source(tiny(architectures=["MyModel"])).build()


def test_a_type_without_a_language_model_is_refused() -> None:
    with pytest.raises(
        ValueError, match="model_type 'vit' has no language model in transformers: name the class in 'architectures'"
    ):
        source({"model_type": "vit"}).build()


# ---------------------------------------------------------------------------------------------- tasks and settings


@pytest.mark.parametrize(
    ("given", "task", "name"),
    [
        (tiny(), "sequence_classification", "LlamaForSequenceClassification"),
        (tiny("bert"), "token_classification", "BertForTokenClassification"),
        (tiny("bert", is_decoder=True), "causal_lm", "BertLMHeadModel"),
        (tiny(architectures=["LlamaForCausalLM"]), "sequence_classification", "LlamaForSequenceClassification"),
        # One of several for the task, and the one that is named.
        ({"model_type": "deit"}, "image_classification", "DeiTForImageClassification"),
        (
            {"model_type": "deit", "architectures": ["DeiTForImageClassificationWithTeacher"]},
            "image_classification",
            "DeiTForImageClassificationWithTeacher",
        ),
        # Rows are taken as they come, and the class is that of the configuration.
        (tiny(), "other", "LlamaForCausalLM"),
    ],
)
def test_a_task_chooses_the_class(given: dict[str, Any], task: str, name: str) -> None:
    made = source(given, task=task)
    assert made.name == name
    assert task_of(made) == task


def test_a_task_that_a_type_has_no_class_for_is_refused_before_anything_is_built() -> None:
    expected = (
        "task is image_classification, and transformers has no class of model_type 'llama' for it: choose one of causal_lm, "
        "sequence_classification, token_classification, or give the model as an nn.Module."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        source(tiny(), task="image_classification")


def test_an_encoder_does_not_pass_for_a_causal_model() -> None:
    expected = "task is causal_lm, and a bert model sees later tokens unless is_decoder is true: set is_decoder to true, or task to masked_lm."
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        source(tiny("bert"), task="causal_lm")
    assert source(tiny("bert"), task="causal_lm", settings={"is_decoder": True}).name == "BertLMHeadModel"


def test_settings_change_what_is_built_and_not_what_was_given(folder: Path) -> None:
    config, labels = AutoConfig.for_model(**tiny()), {0: "no", 1: "perhaps", 2: "yes"}
    for given in (tiny(), config, folder):
        made: Any = source(given, task="sequence_classification", settings={"num_labels": 3, "id2label": labels})
        assert (made.config.num_labels, made.config.id2label) == (3, labels)
        assert made.build().score.weight.shape == (3, 16)
    assert config.num_labels == 2
    expected = "the settings of the model have 'nun_labels', which a llama configuration does not know: correct the name."
    for given in (config, folder):
        with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
            source(given, settings={"nun_labels": 3})
    expected = "the model is a Mlp, and num_labels would change its configuration: make it with that."
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        source(Mlp(), settings={"num_labels": 3})


def test_a_source_may_be_given_a_task_later() -> None:
    assert source(source(tiny()), task="sequence_classification").name == "LlamaForSequenceClassification"
    module = Mlp()
    assert source(source(module), task="other") == FromModule(module, Task.OTHER)


def test_a_head_that_is_not_stored_is_drawn_and_named_and_the_rest_is_read(folder: Path) -> None:
    made: Any = source(folder, task="sequence_classification", settings={"num_labels": 3})
    model, drawn = made.read()
    assert drawn == ["score.weight"]
    stored: Any = source(folder).load()
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, stored.model.layers[0].mlp.up_proj.weight)
    model.save_pretrained(folder / "classes")
    assert task_of(source(folder / "classes")) is Task.SEQUENCE_CLASSIFICATION
    _, drawn = source(folder / "classes").read()  # type: ignore[union-attr]
    assert drawn == []
    # A head for other labels than it was trained for.
    other: Any = source(folder / "classes", task="sequence_classification", settings={"num_labels": 5})
    model, drawn = other.read()
    assert (drawn, tuple(model.score.weight.shape)) == (["score.weight"], (5, 16))


def test_a_head_that_is_drawn_is_told_of(folder: Path) -> None:
    job, told = Job(model="toy", global_batch_size=1, steps=1), list[str]()
    load_model(source(folder, task="sequence_classification"), job, tell=told.append)
    assert told == [f"The weights of score are not at {str(folder)!r}, and begin as they are drawn from the seed."]
    told.clear()
    load_model(source(folder), job, tell=told.append)
    assert told == []


def test_memory_that_runs_out_while_weights_are_read_is_no_matter_of_sizes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaForCausalLM

    def out_of_memory(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        source(folder).load()


@pytest.mark.parametrize("task", [None, "causal_lm"])
def test_weights_of_other_sizes_are_refused(folder: Path, task: str | None) -> None:
    made = source(folder, task=task, settings={"intermediate_size": 24})
    expected = (
        f"the weights at {str(folder)!r} do not have the sizes that the configuration says: leave the settings out that change them, "
        f"or name a task to begin with a new head."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        made.load()


# ---------------------------------------------------------------------------------------------- code of the model's own

CONFIGURATION = """
from transformers import PretrainedConfig

class XConfig(PretrainedConfig):
    model_type = "x_of_a_test"

    def __init__(self, vocab_size=11, width=4, **settings):
        self.vocab_size, self.width = vocab_size, width
        super().__init__(**settings)
"""
MODELING = """
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from .configuration_x import XConfig

class XWithHead(PreTrainedModel):
    config_class = XConfig

    def __init__(self, config):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.embedding

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, labels=None):
        logits = self.head(self.embedding(input_ids))
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return CausalLMOutput(loss=loss, logits=logits)
"""


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that brings its own code, in a folder; what transformers copies of it lies beside."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "copies"))
    folder = tmp_path / "tiny_x"
    folder.mkdir()
    (folder / "configuration_x.py").write_text(CONFIGURATION)
    (folder / "modeling_x.py").write_text(MODELING)
    described = {
        "model_type": "x_of_a_test",
        "architectures": ["XWithHead"],
        "auto_map": {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.XWithHead"},
    }
    (folder / "config.json").write_text(json.dumps(described))
    return folder


def brings(path: Path, file: str = "modeling_x.py") -> str:
    return (
        f"model {str(path)!r} brings its own code ({file}), which is not run unasked: read it, and set trust_remote_code to true if "
        f"you trust it."
    )


def test_code_that_a_model_brings_is_not_run_unasked(own_code: Path) -> None:
    (own_code / "configuration_x.py").write_text("raise SystemExit")
    assert refused(own_code) == brings(own_code)
    # Where nothing says which class it is, the file does.
    (own_code / "config.json").write_text(json.dumps({"model_type": "x_of_a_test"}))
    assert refused(own_code) == brings(own_code)
    elsewhere = {"model_type": "x_of_a_test", "auto_map": {"AutoConfig": "org/code--configuration_x.XConfig"}}
    (own_code / "config.json").write_text(json.dumps(elsewhere))
    assert refused(own_code) == brings(own_code, "configuration_x.py of org/code")


def test_a_class_of_the_folders_beside_a_type_that_is_known_is_not_run_unasked(own_code: Path) -> None:
    described = tiny(architectures=["XWithHead"], auto_map={"AutoModelForCausalLM": "modeling_x.XWithHead"})
    (own_code / "config.json").write_text(json.dumps(described))
    with pytest.raises(ValueError, match=f"^{re.escape(brings(own_code))}$"):
        source(own_code).build()


def test_code_that_is_trusted_is_built_planned_saved_and_read_again(own_code: Path) -> None:
    made = source(own_code, trust_remote_code=True)
    assert isinstance(made, FromPretrained)
    assert task_of(made) is Task.CAUSAL_LM
    dataless = dataless_model(made)
    assert {path: (tuple(weight.shape), weight.is_meta) for path, weight in dataless.named_parameters()} == {
        "embedding.weight": ((11, 4), True),
        "head.weight": ((11, 4), True),
    }
    model: Any = made.build()
    ids = torch.tensor([[3, 4, 5]])
    # Its class is called like none of transformers, and its loss shifts the labels all the same.
    assert objective(model).count({"input_ids": ids, "labels": ids}).item() == 2
    save_model(model, None, own_code / "saved")
    again = source(own_code / "saved", trust_remote_code=True)
    assert torch.equal(again.load().head.weight, model.head.weight)  # type: ignore[union-attr, arg-type]
    assert refused(own_code / "saved") == brings(own_code / "saved")
    with pytest.raises(
        ValueError, match=r"^task is masked_lm, and transformers has no class of model_type 'x_of_a_test' for it: cho"
    ):
        source(own_code, task="masked_lm", trust_remote_code=True)
