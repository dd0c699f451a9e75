"""Field reports about adapters: types beside packed weights, what saving takes, and adapters on tied weights."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from cases.fixtures import run, tiny_llama, tokens, trainer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from memtrain import Trainer
from memtrain.job import AdamW, Job
from memtrain.method import Lora, Nf4
from memtrain.models.load import load_model, product_dtype
from memtrain.models.save import save_model
from memtrain.precision import AutocastBf16, Bf16
from memtrain.trace.event import Kind, Phase

ONE_STEP: dict[str, Any] = {"micro_batch_size": 1, "global_batch_size": 1, "steps": 1}
EMBEDDINGS, NORMS = 1000 * 64, 5 * 64


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], str]:
    """The path of a tiny model on disk, tied or not."""
    found: dict[bool, str] = {}

    def path(tied: bool) -> str:
        if tied not in found:
            torch.manual_seed(0)
            found[tied] = str(tmp_path_factory.mktemp("saved"))
            save_model(tiny_llama(tied=tied).load(), None, found[tied])
        return found[tied]

    return path


# ---------------------------------------------------------------------- mem-06


@pytest.mark.parametrize("tied", [True, False])
def test_nothing_beside_packed_weights_is_cast_to_another_type(tied: bool) -> None:
    """mem-06: norms in 32 bits would be 640 bytes more, embeddings and head 256000 untied and 128000 tied."""
    lora = Lora(rank=4, target_modules=("q_proj",), dtype="bfloat16")
    job = Job(model="TinyLlama", global_batch_size=1, steps=1, precision=Bf16(), method=lora, quantization=Nf4())
    model: Any = load_model(tiny_llama(tied=tied), job)
    frozen = {path: one for path, one in model.named_parameters() if not one.requires_grad}
    packed = {path for path, one in frozen.items() if one.dtype is torch.uint8}
    # Seven linear layers in each of two blocks.
    assert len(packed) == 14
    beside = {path: one for path, one in frozen.items() if path not in packed}
    assert {one.dtype for one in beside.values()} == {torch.bfloat16}
    # Tied ones are one tensor and are there once.
    assert sum(one.nbytes for one in beside.values()) == 2 * (NORMS + (1 if tied else 2) * EMBEDDINGS)
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied


@pytest.mark.parametrize("precision", [Bf16(), AutocastBf16()], ids=str)
def test_packed_weights_are_multiplied_in_the_type_that_was_asked_for(precision: Any) -> None:
    """mem-06: in 16 bits under autocast too, where what is beside them has 32; and so they stay after a step."""
    lora = Lora(rank=4, target_modules=("q_proj",))
    made = trainer(
        tiny_llama(), [tokens(8)], precision=precision, method=lora, quantization=Nf4(), optimizer=AdamW(), **ONE_STEP
    )
    assert product_dtype(made.job) is torch.bfloat16
    model: Any = made.model
    layer = model.model.layers[0].mlp.up_proj
    made.train()
    assert (layer.weight.dtype, layer.compute_dtype, layer.weight.quant_state.dtype) == (torch.uint8, *[torch.bfloat16] * 2)


def test_a_plan_counts_what_is_beside_packed_weights_in_the_type_that_it_has() -> None:
    """mem-06: the bytes of weights are those of the model that is loaded."""
    lora = Lora(rank=4, target_modules=("q_proj",))
    predicted, real = {}, {}
    for precision in (Bf16(), AutocastBf16()):
        made = trainer(tiny_llama(), [tokens(8)], precision=precision, method=lora, quantization=Nf4(), **ONE_STEP)
        predicted[precision] = made.choice.footprint.by_kind[Kind.WEIGHT]
        real[precision] = sum(one.nbytes for one in made.model.parameters())
    difference = 2 * (NORMS + EMBEDDINGS)
    assert predicted[AutocastBf16()] - predicted[Bf16()] == real[AutocastBf16()] - real[Bf16()] == difference


# ---------------------------------------------------------------------- mem-07


class NewBytes(TorchDispatchMode):
    """Finds the most bytes of tensors that are alive at one time and were not there before."""

    def __init__(self) -> None:
        super().__init__()
        self.before = set(_storages())
        self.most = 0

    def look(self) -> None:
        new = {address: size for address, size in _storages().items() if address not in self.before}
        self.most = max(self.most, sum(new.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.nbytes >= 4096:
            self.look()
        return made


def _storages() -> dict[int, int]:
    """Address and bytes of every storage on the host that a tensor is in."""
    tensors = [one for one in gc.get_objects() if type(one) in (Tensor, nn.Parameter) and one.device.type == "cpu"]
    return {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors if one.nbytes}


LORA = Lora(rank=4, target_modules=("q_proj", "v_proj"))


def extra_bytes(save: Callable[[Path], object], folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    gc.collect()
    counting = NewBytes()
    write = safetensors.torch.serialize_file

    def serialize_file(*given: Any, **named: Any) -> Any:
        # What is held when a file is written.
        counting.look()
        return write(*given, **named)

    monkeypatch.setattr(safetensors.torch, "serialize_file", serialize_file)
    # What was there before is not looked through again each time.
    gc.freeze()
    try:
        with counting:
            save(folder)
    finally:
        gc.unfreeze()
    assert list(folder.glob("*.safetensors"))
    return counting.most


def adapted(path: str) -> Trainer:
    return run(path, [tokens(8)], method=LORA, optimizer=AdamW(learning_rate=0.1), **ONE_STEP)[1]


def test_saving_adapters_touches_no_other_weight(
    saved: Callable[[bool], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mem-07: 1792 numbers, so at most 7168 bytes at a time, of 552192."""
    made = adapted(saved(True))
    trained = [one for one in made.model.parameters() if one.requires_grad]
    assert sum(one.numel() for one in trained) == 1792
    assert extra_bytes(made.save_model, tmp_path / "adapters", monkeypatch) <= 7168


def test_saving_a_whole_model_takes_no_more_than_its_largest_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mem-07: 256000 bytes, and not the 552192 of the model again."""
    _, made = run(tiny_llama(), [tokens(8)], **ONE_STEP)
    assert extra_bytes(made.save_model, tmp_path / "model", monkeypatch) <= 256000


def test_saving_a_merged_model_takes_no_second_model(
    saved: Callable[[bool], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mem-07: the weights that adapters are added to, and not all 552192 bytes again."""
    made = adapted(saved(True))
    assert extra_bytes(made.save_merged, tmp_path / "merged", monkeypatch) <= 256000


def test_adapters_are_on_the_disk_before_anything_is_merged(
    saved: Callable[[bool], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mem-07: so that a run whose weights cannot be read again for want of memory has lost nothing."""
    made = trainer(saved(True), [tokens(8)], method=LORA, run_dir=tmp_path / "run", **ONE_STEP)
    made.train()

    def fails(*_: Any, **__: Any) -> nn.Module:
        raise MemoryError

    monkeypatch.setattr("memtrain.models.save.merged", fails)
    with pytest.raises(MemoryError):
        made.save_merged(tmp_path / "merged")
    assert (tmp_path / "run" / "model" / "adapter_model.safetensors").exists()
    monkeypatch.undo()
    # And what was trained is as it was, so that it can be tried again.
    made.save_merged(tmp_path / "merged")
    assert (tmp_path / "merged" / "model.safetensors").exists()


def test_the_plan_says_what_saving_takes() -> None:
    """mem-07: as a phase with a peak of its own, which is compared with the budget before training."""
    made = trainer(tiny_llama(), [tokens(8)], **ONE_STEP)
    by_phase = made.choice.footprint.by_phase
    assert 552192 <= by_phase[Phase.SAVE] <= made.choice.footprint.peak_allocated_bytes


# ---------------------------------------------------------------------- peft-01

IDS = torch.tensor([[3, 1, 4, 15, 92, 6]])


def logits(model: nn.Module) -> Tensor:
    model.eval()
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS).logits
    return found


@pytest.mark.parametrize(
    "lora",
    [
        Lora(rank=4, target_modules=("q_proj", "lm_head")),
        Lora(rank=4, target_modules=("q_proj",), modules_to_save=("embed_tokens", "lm_head")),
        Lora(rank=4, target_modules=("q_proj",), modules_to_save=("lm_head",)),
    ],
    ids=["adapter on the head", "embeddings and head whole", "head whole"],
)
def test_a_tied_model_whose_head_was_adapted_computes_the_same_when_it_is_merged_and_read_again(
    lora: Lora, saved: Callable[[bool], str], tmp_path: Path
) -> None:
    """peft-01: added to the tensor that both share, the difference was 8.09, and the embeddings changed."""
    made = trainer(saved(True), [tokens(8)], method=lora, **ONE_STEP)
    model: Any = made.model
    torch.manual_seed(1)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "lora_B" in path:
                nn.init.normal_(parameter, std=0.1)
            elif "lm_head" in path and "modules_to_save" in path:
                parameter += 0.1
    trained = logits(model)
    embedding = model.get_input_embeddings().weight.clone()
    made.save_merged(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert (logits(merged) - trained).abs().max() < 1e-5
    assert torch.equal(merged.get_input_embeddings().weight, embedding)
    # They differ now, and the configuration says so.
    assert merged.config.tie_word_embeddings is False
    assert not torch.equal(merged.get_output_embeddings().weight, embedding)
    assert torch.equal(logits(model), trained)
