"""What people give a Trainer, as rows that suit the model."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from toys import BYTES

from memtrain.data.options import DataOptions
from memtrain.data.rows import Rows
from memtrain.device import Cpu
from memtrain.inputs import Reader, check_module, load_tokenizer
from memtrain.models.build import FromModule, FromPretrained, ModelSource, source, with_vocabulary
from memtrain.precision import Bf16, Fp32

CPU = Cpu(name="cpu", threads=1, flops_per_second=1.0, bytes_per_second=1.0, operator_seconds=1.0)
TEXT = "abc def ghi jkl"  # 15 tokens of one byte and the end of the document


def model_of(**settings: Any) -> ModelSource:
    """A source of a configuration; nothing is built."""
    return source({"model_type": "gpt2", "vocab_size": 300, "bos_token_id": 1, "eos_token_id": 1, **settings})


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


# ---------------------------------------------------------------------------------------------- rows


def rows(data: Any, model: ModelSource, *, tokenizer: Any = BYTES, what: str = "data", **options: Any) -> Rows:
    return Reader(model, tokenizer, DataOptions(**options)).read(data, what).rows


@pytest.mark.parametrize("as_given", [str, Path], ids=["text", "path"])
def test_a_text_becomes_rows_of_the_length_asked_for(text: Path, as_given: Any) -> None:
    made = rows(as_given(text), model_of(), sequence_length=8)
    assert len(made) == 2
    assert made[0]["input_ids"].tolist() == BYTES.encode(TEXT)[:8]


@pytest.mark.parametrize(("positions", "length"), [(6, 6), (1024, 1024), (4096, 1024)])
def test_without_a_length_rows_fill_the_positions_of_the_model_up_to_1024(text: Path, positions: int, length: int) -> None:
    # GPT-2 calls its positions n_positions.
    made = rows(text, model_of(n_positions=positions))
    assert made[0]["input_ids"].shape == (length,)


def test_without_a_length_and_positions_rows_have_1024_tokens(text: Path) -> None:
    assert rows(text, FromModule(nn.Linear(2, 2)))[0]["input_ids"].shape == (1024,)


def test_rows_are_taken_as_given() -> None:
    given = [{"x": torch.ones(2)}]
    assert rows(given, FromModule(nn.Linear(2, 2)), tokenizer=None) is given


def test_text_without_a_tokenizer_is_refused(text: Path) -> None:
    expected = "eval_data is text, and GPT2LMHeadModel brings no tokenizer to read it with: give tokenizer."
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        rows(text, model_of(), tokenizer=None, what="eval_data")


def test_rows_that_cannot_be_trained_on_are_refused_by_the_name_of_the_argument() -> None:
    with pytest.raises(ValueError, match="there is no row in eval_data"):
        rows([], model_of(), what="eval_data")


def test_text_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / "nothing.txt"))):
        rows(tmp_path / "nothing.txt", model_of())


def test_rows_longer_than_the_positions_are_refused(text: Path) -> None:
    expected = "the rows have 9 tokens and GPT2LMHeadModel has 8 positions: shorten sequence_length to 8 or less."
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        rows(text, model_of(n_positions=8), sequence_length=9)
    nine = [{"input_ids": torch.zeros(9, dtype=torch.long)}]
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        rows(nine, model_of(n_positions=8), tokenizer=None)
    assert len(rows(text, model_of(n_positions=8), sequence_length=8)) == 2


def test_the_tokenizer_of_another_model_is_refused() -> None:
    assert BYTES.vocab_size == len(BYTES) == 259
    fits = model_of(vocab_size=259)
    assert with_vocabulary(fits, BYTES) == (fits, None)
    expected = (
        "the tokenizer has 259 tokens and GPT2LMHeadModel has embeddings for 258: "
        "take the tokenizer that belongs to the model, or a larger vocab_size."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        with_vocabulary(model_of(vocab_size=258), BYTES)


def test_rows_without_tokens_ask_nothing_of_positions_or_tokenizer() -> None:
    given = [{"pixels": torch.ones(5000)}]
    assert rows(given, model_of(vocab_size=1, n_positions=8)) is given


# ---------------------------------------------------------------------------------------------- tokenizer


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    BYTES.save_pretrained(tmp_path)
    return tmp_path


def pretrained(path: Path) -> FromPretrained:
    model: Any = model_of()
    return FromPretrained(str(path), model.config)


@pytest.mark.parametrize("as_given", [str, Path], ids=["text", "path"])
def test_a_tokenizer_is_read_from_a_path(saved: Path, as_given: Any) -> None:
    assert load_tokenizer(as_given(saved), model_of()).get_vocab() == BYTES.get_vocab()


def test_a_tokenizer_is_read_from_the_home_folder(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(saved.parent))
    assert load_tokenizer(f"~/{saved.name}", model_of()).get_vocab() == BYTES.get_vocab()


def test_without_one_the_tokenizer_is_that_beside_the_weights(saved: Path) -> None:
    assert load_tokenizer(None, pretrained(saved)).get_vocab() == BYTES.get_vocab()


def test_a_tokenizer_that_is_given_is_taken_whatever_lies_beside_the_weights(saved: Path) -> None:
    given = SimpleNamespace()
    assert load_tokenizer(given, pretrained(saved)) is given


def test_without_one_there_is_none(tmp_path: Path) -> None:
    assert load_tokenizer(None, pretrained(tmp_path)) is None
    assert load_tokenizer(None, model_of()) is None
    assert load_tokenizer(None, FromModule(nn.Linear(2, 2))) is None


def test_a_path_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=rf"^there is no tokenizer at '{tmp_path}' \(.+\): give one that save_pretrained wrote\.$"
    ):
        load_tokenizer(str(tmp_path), model_of())


@pytest.fixture
def own_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A tokenizer whose class lies beside it; what transformers copies of it lies there too."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "copies"))
    # To which transformers adds that folder.
    monkeypatch.setattr(sys, "path", [*sys.path])
    BYTES.save_pretrained(tmp_path)
    (tmp_path / "tokens_x.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n\n\nclass XTokens(PreTrainedTokenizerFast):\n    own = True\n"
    )
    described = json.loads((tmp_path / "tokenizer_config.json").read_text())
    described |= {"tokenizer_class": "XTokens", "auto_map": {"AutoTokenizer": [None, "tokens_x.XTokens"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(described))
    yield tmp_path
    # What was copied is known by the folder of this test.
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        del sys.modules[name]


@pytest.mark.parametrize("by_path", [True, False], ids=["given", "beside_the_weights"])
def test_code_that_a_tokenizer_brings_is_not_run_unasked(own_tokenizer: Path, by_path: bool) -> None:
    expected = (
        f"the tokenizer at {str(own_tokenizer)!r} brings its own code, which is not run unasked: read it, and set trust_remote_code "
        f"to true if you trust it."
    )
    path, model = (str(own_tokenizer), model_of()) if by_path else (None, pretrained(own_tokenizer))
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        load_tokenizer(path, model)
    assert load_tokenizer(path, model, trust_remote_code=True).own


# ---------------------------------------------------------------------------------------------- modules


def test_a_module_of_the_precision_passes() -> None:
    partly_frozen = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    check_module(FromModule(partly_frozen), Fp32(), CPU)
    # What is built from a configuration is always of that kind, and is not built to be asked.
    check_module(model_of(), Fp32(), CPU)
    check_module(FromModule(nn.Linear(2, 2).bfloat16()), Bf16(), CPU)


def in_half() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (
            nn.Linear(2, 2).requires_grad_(False),
            "Linear has no parameter that requires a gradient, so there is nothing to train.",
        ),
        (nn.ReLU(), "ReLU has no parameter that requires a gradient, so there is nothing to train."),
        (
            nn.Linear(2, 2, device="meta"),
            "parameter weight is on meta, and memtrain trains on device cpu: call model.cpu().",
        ),
        (
            in_half(),
            "parameter 1.weight is torch.bfloat16, and precision fp32 trains torch.float32: call model.to(torch.float32).",
        ),
    ],
)
def test_a_module_that_cannot_be_trained_is_refused(module: nn.Module, expected: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        check_module(FromModule(module), Fp32(), CPU)
