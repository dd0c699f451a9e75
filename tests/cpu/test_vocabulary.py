"""Embeddings with a row for every token: grown where there are too few, and never cut."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_parity import PROCESSOR
from toys import CASES

from memtrain.job import Job
from memtrain.memory.timeline import MemoryTimeline
from memtrain.method import Lora, Nf4
from memtrain.models.build import FromPretrained, ModelSource, source, with_vocabulary
from memtrain.models.load import build_model, load_model
from memtrain.models.save import save_merged
from memtrain.models.vocabulary import grow_, rows_of, tokens_of
from memtrain.plan import Plan
from memtrain.trace.event import Kind
from memtrain.trace.simulate import dataless_model, simulate

ROWS, WIDTH = 20, 8
JOB = Job(model="toy", global_batch_size=1, steps=1)
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": WIDTH, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, **SPECIAL},
    # Its head has a bias.
    "bert": {"hidden_size": WIDTH, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
    "t5": {"d_model": WIDTH, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0},
    # It adds a buffer as wide as the vocabulary to its logits.
    "bart": {
        "d_model": WIDTH,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_ffn_dim": 8,
        "decoder_ffn_dim": 8,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "max_position_embeddings": 8,
    },
}


class Tokens:
    """A tokenizer, as far as its size goes, all but the first ten added to it."""

    vocab_size = 10

    def __init__(self, *numbers: int) -> None:
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def get_vocab(self) -> dict[str, int]:
        return {str(number): number for number in self._numbers}


def made(kind: str = "llama", **settings: Any) -> ModelSource:
    return source({"model_type": kind, "vocab_size": ROWS, **MODELS[kind], **settings})


def shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {path: tuple(tensor.shape) for path, tensor in (*model.named_parameters(), *model.named_buffers())}


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A model of 20 rows in a folder, tied unless the test says otherwise."""
    torch.manual_seed(0)
    made(tie_word_embeddings=getattr(request, "param", True)).load().save_pretrained(tmp_path)  # type: ignore[operator]
    return tmp_path


# ---------------------------------------------------------------------------------------------- growing


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("llama", {"tie_word_embeddings": True}), ("llama", {}), *[(kind, {}) for kind in ("bert", "t5", "bart")]],
)
def test_a_grown_model_has_the_tensors_of_one_that_was_built_so_and_keeps_what_it_had(
    kind: str, settings: dict[str, Any]
) -> None:
    model: Any = made(kind, **settings).load()
    before = {path: tensor.clone() for path, tensor in model.state_dict().items()}
    assert grow_(model, 24) is model
    assert shapes(model) == shapes(made(kind, vocab_size=24, **settings).load())
    for path, tensor in model.state_dict().items():
        there = before[path]
        kept = tensor[:, :ROWS] if tensor.shape[0] == 1 else tensor[: len(there)]
        assert torch.equal(kept, there), path
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        torch.testing.assert_close(layer.weight[ROWS:], layer.weight[:ROWS].mean(0).expand(4, WIDTH), rtol=0, atol=0)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) is (settings != {} or kind != "llama")
    assert (model.config.vocab_size, model.get_output_embeddings().out_features) == (24, 24)
    assert model.get_input_embeddings().num_embeddings == 24


def test_a_bias_of_the_head_grows_by_its_mean() -> None:
    model: Any = made("bert").load()
    model.cls.predictions.bias.data.copy_(torch.arange(20.0))
    grow_(model, 24)
    assert model.cls.predictions.bias[ROWS:].tolist() == [9.5] * 4
    assert model.cls.predictions.decoder.bias is model.cls.predictions.bias


@pytest.mark.parametrize("rows", [ROWS, ROWS - 8])
def test_rows_that_are_there_are_never_cut(rows: int) -> None:
    model: Any = made().load()
    table = model.get_input_embeddings().weight
    grow_(model, rows)
    assert model.get_input_embeddings().weight is table
    assert table.shape == (ROWS, WIDTH)


def test_new_rows_do_not_depend_on_what_is_drawn() -> None:
    grown = []
    for seed in (0, 1):
        torch.manual_seed(7)
        model: Any = made().load()
        torch.manual_seed(seed)
        grown.append(grow_(model, 24).state_dict())
    assert all(torch.equal(tensor, grown[1][path]) for path, tensor in grown[0].items())


# ---------------------------------------------------------------------------------------------- how many


@pytest.mark.parametrize(("numbers", "needed"), [((0, 1, 2), 3), ((0, 1, 999), 1000), ((0, 0, 0), 3), ((), 0)])
def test_a_tokenizer_needs_a_row_for_its_highest_token(numbers: tuple[int, ...], needed: int) -> None:
    assert tokens_of(Tokens(*numbers)) == needed


def test_the_vocabulary_of_a_model_of_several_parts_is_that_of_its_text() -> None:
    text = SimpleNamespace(vocab_size=7)
    assert rows_of(SimpleNamespace(get_text_config=lambda: text)) == 7
    assert rows_of(SimpleNamespace(vocab_size=None)) is None
    assert rows_of(None) is None


# ---------------------------------------------------------------------------------------------- sources


@pytest.mark.parametrize("folder", [True, False], indirect=True, ids=["tied", "untied"])
def test_a_model_with_a_row_too_few_is_read_with_a_multiple_of_8(folder: Path) -> None:
    stored: Any = source(folder).load()
    found, said = with_vocabulary(source(folder), Tokens(*range(ROWS + 1)))
    assert said == (
        f"The tokenizer has tokens up to 20, and {folder} has embeddings for 20: 4 rows are added, each the mean of the others."
    )
    assert isinstance(found, FromPretrained)
    assert (found.config.vocab_size, found.stored_rows, found.stored_config.vocab_size) == (24, ROWS, ROWS)
    model: Any = found.load()
    assert model.config.vocab_size == 24
    assert torch.equal(model.model.embed_tokens.weight[:ROWS], stored.model.embed_tokens.weight)
    assert torch.equal(model.lm_head.weight[:ROWS], stored.lm_head.weight)
    # And what is written is read again as it is.
    model.save_pretrained(folder / "again")
    again: Any = source(folder / "again").load()
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    assert with_vocabulary(source(folder / "again"), Tokens(*range(21))) == (source(folder / "again"), None)


def test_a_tokenizer_with_fewer_tokens_changes_nothing(folder: Path) -> None:
    given = source(folder)
    assert with_vocabulary(given, Tokens(*range(ROWS - 10))) == (given, None)
    assert with_vocabulary(given, Tokens(*range(ROWS))) == (given, None)
    plain = CASES["plain_module"].build()
    assert with_vocabulary(plain, Tokens(*range(ROWS))) == (plain, None)


def test_it_may_grow_twice(folder: Path) -> None:
    once, _ = with_vocabulary(source(folder), Tokens(*range(21)))
    twice, said = with_vocabulary(once, Tokens(*range(30)))
    assert isinstance(twice, FromPretrained)
    assert (twice.config.vocab_size, twice.stored_rows) == (32, ROWS)
    assert said is not None
    assert said.endswith("has embeddings for 24: 8 rows are added, each the mean of the others.")


def test_a_configuration_says_more_rows_and_the_users_own_stays() -> None:
    given = made()
    found, said = with_vocabulary(given, Tokens(*range(21)))
    assert said == "The tokenizer has tokens up to 20, and LlamaForCausalLM has embeddings for 20: 4 rows are added."
    assert (rows_of(found.config), rows_of(given.config)) == (24, 20)
    assert shapes(found.build())["lm_head.weight"] == (24, WIDTH)


def test_a_module_is_not_changed_before_a_plan_is_chosen() -> None:
    module: Any = made().load()
    expected = (
        "the tokenizer has tokens up to 20, and LlamaForCausalLM has embeddings for 20: call its resize_token_embeddings(21) before "
        "it is given, or take the tokenizer that belongs to it."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        with_vocabulary(source(module), Tokens(*range(21)))
    module.resize_token_embeddings(21, mean_resizing=False)
    given = source(module)
    assert with_vocabulary(given, Tokens(*range(21))) == (given, None)


# ---------------------------------------------------------------------------------------------- the plan


def test_the_model_without_data_is_grown_too_and_the_prediction_counts_it(folder: Path) -> None:
    small = source(folder)
    grown, _ = with_vocabulary(small, Tokens(*range(21)))
    assert shapes(dataless_model(grown)) == shapes(grown.load())
    rows = dict.fromkeys(("input_ids", "labels"), ((8,), torch.int64))
    weights = []
    for one in (small, grown):
        trace = simulate(JOB, Plan(micro_batch_size=1), one, rows, PROCESSOR)
        live = MemoryTimeline(dataclasses.replace(trace, events=trace.events[: trace.section("step 1")[0]]))
        weights.append(sum(event.bytes for event in live.trace.events if event.kind is Kind.WEIGHT))
    assert weights[1] - weights[0] == 4 * WIDTH * 4


def test_rows_that_adapters_leave_as_they_are_are_told(folder: Path) -> None:
    grown, _ = with_vocabulary(source(folder), Tokens(*range(21)))
    told: list[str] = []
    load_model(grown, dataclasses.replace(JOB, method=Lora(rank=2)), tell=told.append)
    assert told == [
        "The rows that were added to model.embed_tokens and lm_head stay as they are, since adapters neither train nor carry "
        "them: name them in modules_to_save, or save the merged model."
    ]
    told.clear()
    load_model(
        grown, dataclasses.replace(JOB, method=Lora(rank=2, modules_to_save=("embed_tokens", "lm_head"))), tell=told.append
    )
    load_model(grown, JOB, tell=told.append)
    load_model(source(folder), dataclasses.replace(JOB, method=Lora(rank=2)), tell=told.append)
    assert told == []


@pytest.mark.parametrize("folder", [True, False], indirect=True, ids=["tied", "untied"])
def test_a_model_that_is_packed_grows_as_well_and_carries_the_rows_when_merged(folder: Path) -> None:
    grown, _ = with_vocabulary(source(folder), Tokens(*range(21)))
    job = dataclasses.replace(JOB, method=Lora(rank=2), quantization=Nf4())
    model: Any = load_model(grown, job)
    assert shapes(model) == shapes(build_model(grown, job))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is grown.config.tie_word_embeddings
    save_merged(model, grown, torch.float32, None, folder / "merged")
    merged: Any = source(folder / "merged").load()
    assert torch.equal(merged.lm_head.weight, model.lm_head.weight)
    assert merged.config.vocab_size == 24
