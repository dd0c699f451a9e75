"""Where a model comes from, and its data-less copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import CASES, Mlp
from transformers import AutoConfig, LlamaConfig

from memtrain.models.build import FromConfig, FromModule, FromPretrained, source, weight_dtype
from memtrain.precision import Bf16, Fp32
from memtrain.trace.simulate import dataless_model
from memtrain.trace.values import Values

TINY = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def tiny(model_type: str = "llama", **settings: Any) -> dict[str, Any]:
    return {"model_type": model_type, **TINY, **settings}


@pytest.fixture(autouse=True)
def _quiet() -> None:
    """transformers draws a progress bar for each file."""
    from transformers.utils import logging

    logging.disable_progress_bar()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model in a folder, its weights in 16 bits."""
    torch.manual_seed(0)
    source(tiny()).load().to(torch.bfloat16).save_pretrained(tmp_path)  # type: ignore[operator]
    return tmp_path


# ---------------------------------------------------------------------------------------------- sources


def test_a_module_is_trained_in_place() -> None:
    model = Mlp()
    given = source(model)
    assert given == FromModule(model)
    assert given.name == "Mlp"
    assert given.build() is given.load() is model


@pytest.mark.parametrize("given", [tiny(), AutoConfig.for_model(**tiny())], ids=["mapping", "config"])
def test_a_configuration_gives_random_weights_of_32_bits_from_the_generator(given: Any) -> None:
    made = source(given)
    assert isinstance(made, FromConfig)
    assert made.name == "LlamaForCausalLM"
    torch.manual_seed(0)
    first = made.load()
    torch.manual_seed(0)
    again = made.build()
    assert {parameter.dtype for parameter in first.parameters()} == {torch.float32}
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))


def test_a_configuration_that_says_16_bits_is_built_in_32() -> None:
    model = source(tiny(dtype="bfloat16")).load()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_a_mapping_is_left_as_it_was() -> None:
    given = tiny()
    source(given)
    assert given == tiny()


@pytest.mark.parametrize("as_given", [str, Path], ids=["text", "path"])
def test_a_folder_gives_its_weights_in_32_bits(folder: Path, as_given: Any) -> None:
    made = source(as_given(folder))
    assert isinstance(made, FromPretrained)
    assert made.name == str(folder)
    model = made.load()
    torch.manual_seed(0)
    expected = source(tiny()).load().to(torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    for weight, stored in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(weight, stored.float())


def test_planning_reads_no_weight_file(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    made = source(folder)
    assert [tuple(p.shape) for p in made.build().parameters()] == [tuple(p.shape) for p in source(tiny()).build().parameters()]
    assert all(parameter.is_meta for parameter in dataless_model(made).parameters())
    sentence = (
        rf"^the weights at '{folder}' cannot be loaded \(.*model\.safetensors.*\): give a folder that save_pretrained wrote, or"
    )
    with pytest.raises(ValueError, match=sentence):
        made.load()


@pytest.mark.parametrize(("precision", "dtype"), [(Fp32(), torch.float32), (Bf16(), torch.bfloat16)])
def test_weights_are_of_the_type_that_the_precision_trains_whatever_was_stored(
    folder: Path, precision: Fp32 | Bf16, dtype: torch.dtype
) -> None:
    assert weight_dtype(precision) == dtype
    stored = source(folder)
    for made in (stored.load(dtype), stored.build(dtype), source(tiny()).load(dtype), dataless_model(stored, dtype)):
        assert {parameter.dtype for parameter in made.parameters()} == {dtype}
    # Rounded from what is stored, and not drawn anew.
    expected = source(folder).load()
    assert all(torch.equal(a, b.to(dtype)) for a, b in zip(stored.load(dtype).parameters(), expected.parameters(), strict=True))
    module = Mlp()
    assert source(module).load(dtype) is module
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}


def test_a_home_folder_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert source(f"~/{folder.name}").name == str(folder)


def test_a_source_is_a_source() -> None:
    made = source(tiny())
    assert source(made) is made


def refused(model: Any) -> str:
    with pytest.raises(ValueError) as raised:  # noqa: PT011  (compared by the caller)
        source(model)
    return str(raised.value)


@pytest.mark.parametrize(
    "model",
    [3, None, LlamaConfig, [1]],
    ids=["int", "None", "class", "list"],
)
def test_what_is_no_model_is_refused(model: Any) -> None:
    expected = f"model is {model!r}, and it must be a path, a hub id, a transformers config or an nn.Module."
    assert refused(model) == expected


@pytest.mark.parametrize("path", ["./nowhere", "/nowhere", "~/nowhere", "a/b/c"])
def test_a_path_that_is_not_there_is_refused_without_asking_a_hub(path: str) -> None:
    expected = f"model {path!r} is not a folder: give one that save_pretrained wrote, or a hub id such as 'org/name'."
    assert refused(path) == expected


def test_a_file_is_refused(folder: Path) -> None:
    file = str(folder / "config.json")
    assert (
        refused(file) == f"model {file!r} is not a folder: give one that save_pretrained wrote, or a hub id such as 'org/name'."
    )


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    expected = f"model {str(tmp_path)!r} is a folder without config.json: give a folder that save_pretrained wrote."
    assert refused(tmp_path) == expected


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "is not a valid JSON file"),
        ("{}", "Unrecognized model in"),
        ('{"model_type": "lama"}', "has model type `lama` but Transformers does not recognize this architecture"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "Field 'hidden_size' expected int, got str (value: 'wide')"),
    ],
)
def test_a_folder_with_a_broken_configuration_is_refused_with_the_reason(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / "config.json").write_text(content)
    said = refused(tmp_path)
    assert said.startswith(f"the config.json of model {str(tmp_path)!r} cannot be read (")
    assert reason in said
    assert said.endswith("): give a folder that this version of transformers can read.")
    assert "\n" not in said


@pytest.mark.parametrize("name", ["gpt2", "memtrain-tests/no-such-model"])
def test_a_hub_id_that_cannot_be_fetched_is_refused(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # No cache of this machine's user may answer; conftest.py turns the network off.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    said = refused(name)
    assert said.startswith(f"model {name!r} is neither a local folder nor a model that can be fetched (We couldn't connect to")
    assert said.endswith("): give a folder that save_pretrained wrote, or fetch the model first.")


@pytest.mark.parametrize("described", [{"model_type": "lama"}, {"model_type": None}, {"hidden_size": 3}, {}])
def test_an_unknown_model_type_is_refused(described: dict[str, Any]) -> None:
    kind = described.get("model_type")
    expected = f"model_type is {kind!r}, and it must be one that transformers knows, such as 'llama' or 'gpt2'."
    assert refused(described) == expected


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"hidden_size": "wide"}, "Field 'hidden_size' expected int, got str (value: 'wide')"),
        ({"num_attention_heads": 3}, "The hidden size (16) is not a multiple of the number of attention heads (3)"),
    ],
)
def test_settings_that_transformers_refuses_are_refused_in_one_sentence(setting: dict[str, Any], reason: str) -> None:
    said = refused(tiny(**setting))
    assert said.startswith("transformers refuses these settings of a llama model (")
    assert said.endswith(f"{reason}): correct them.")
    assert "\n" not in said


# ---------------------------------------------------------------------------------------------- the data-less copy


class Shared(nn.Module):
    """A module with everything that a copy can get wrong: tied weights, a frozen one, buffers, a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("small", torch.tensor([1, 2, 3]))
        self.register_buffer("temporary", torch.ones(2), persistent=False)
        self.register_buffer("absent", None)
        self.alias = self.head
        self.limit = 7
        self.register_forward_pre_hook(lambda module, inputs: None)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.embedding(ids)).sum()
        return out


def fingerprint(module: nn.Module) -> list[Any]:
    """Every attribute by identity, and every tensor by storage, version, gradient and value."""
    tensors = [*module.parameters(), *module.buffers()]
    return [
        *([{name: id(value) for name, value in part.__dict__.items()} for part in module.modules()]),
        *([dict(part._parameters), dict(part._buffers), dict(part._modules)] for part in module.modules()),
        [(t.data_ptr(), t.untyped_storage()._cdata, t._version, t.grad, t.requires_grad, t.tolist()) for t in tensors],
        module.training,
    ]


def test_a_users_module_is_untouched_by_its_data_less_copy() -> None:
    module = Shared().eval()
    before = repr(fingerprint(module))
    copied = dataless_model(source(module))
    assert repr(fingerprint(module)) == before
    assert copied is not module
    # Training the copy leaves the original alone as well.
    with Values(lambda _: None).mode():
        copied(torch.empty(2, dtype=torch.long, device="meta")).backward()
    assert all(parameter.grad is None for parameter in module.parameters())
    assert repr(fingerprint(module)) == before


def test_weights_are_never_copied_and_everything_else_of_the_module_is() -> None:
    module = Shared()
    copied: Any = dataless_model(source(module))
    assert all(parameter.is_meta and not hasattr(parameter, "_memtrain_value") for parameter in copied.parameters())
    assert all(buffer.is_meta for buffer in copied.buffers())
    originals = dict(module.named_parameters())
    for path, parameter in copied.named_parameters():
        assert isinstance(parameter, nn.Parameter)
        assert (parameter.shape, parameter.dtype, parameter.stride(), parameter.requires_grad) == (
            originals[path].shape,
            originals[path].dtype,
            originals[path].stride(),
            originals[path].requires_grad,
        )
    assert copied.limit == 7
    assert copied.absent is None
    assert set(copied.state_dict()) == set(module.state_dict())
    assert len(copied._forward_pre_hooks) == 1


def test_tied_weights_stay_tied_in_the_copy() -> None:
    copied: Any = dataless_model(source(Shared()))
    assert copied.head.weight is copied.embedding.weight
    assert copied.alias is copied.head
    assert copied.head.weight.untyped_storage()._cdata == copied.embedding.weight.untyped_storage()._cdata


def test_small_buffers_keep_their_values_in_the_copy() -> None:
    copied: Any = dataless_model(source(Shared()))
    values = Values(lambda _: None)
    known = values.value(copied.small)
    assert known is not None
    assert known.tolist() == [1, 2, 3]


@pytest.mark.parametrize("name", ["llama", "gpt2_with_dropout", "bert_masked_lm", "t5", "qwen3"])
def test_a_data_less_model_has_the_parameters_and_buffers_of_the_real_one(name: str) -> None:
    made = CASES[name].build()
    dataless, real = dataless_model(made), made.load()

    def listed(model: nn.Module) -> list[tuple[str, torch.Size, torch.dtype, tuple[int, ...]]]:
        tensors = (*model.named_parameters(), *model.named_buffers())
        return [(path, tensor.shape, tensor.dtype, tensor.stride()) for path, tensor in tensors]

    assert listed(dataless) == listed(real)
    assert all(tensor.is_meta for tensor in (*dataless.parameters(), *dataless.buffers()))
    values = Values(lambda _: None)
    for path, buffer in dataless.named_buffers():
        known = values.value(buffer)
        assert known is not None, path
        torch.testing.assert_close(known, real.get_buffer(path))


def test_building_without_data_ties_as_the_configuration_says_and_draws_nothing() -> None:
    state = torch.get_rng_state()
    tied: Any = dataless_model(source(tiny(tie_word_embeddings=True)))
    untied: Any = dataless_model(source(tiny(tie_word_embeddings=False)))
    assert torch.equal(torch.get_rng_state(), state)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight
