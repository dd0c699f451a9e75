"""Adapters: what trains, in how many bytes, what is refused, and what is written and read again."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from test_load import llama
from test_parity import PROCESSOR as CPU
from torch import Tensor, nn
from toys import BYTES, CASES, VOCABULARY, Mlp, batch

from memtrain.data.rows import Batch
from memtrain.job import Job
from memtrain.method import Lora, Method, Nf4, Quantization, Unquantized
from memtrain.models.adapters import add_adapters_, is_linear
from memtrain.models.build import ModelSource, source
from memtrain.models.load import build_model, load_model
from memtrain.models.quietly import quietly
from memtrain.models.save import largest_shard, save_merged, save_model
from memtrain.plan import Plan
from memtrain.precision import Bf16, Fp32, Precision
from memtrain.run import prepare
from memtrain.trace.event import Kind
from memtrain.trace.simulate import dataless_model_of, simulate

WIDTH, INNER, RANK = 8, 12, 2
ROWS = dict.fromkeys(("input_ids", "labels"), ((8,), torch.int64))
IDS = torch.arange(12).view(2, 6)
# Four projections, and three layers of the other part, of one block.
LINEAR = 4 * 2 * WIDTH + 3 * (WIDTH + INNER)
UNQUANTIZED, FP32 = Unquantized(), Fp32()


def job(method: Method, quantization: Quantization = UNQUANTIZED, precision: Precision = FP32) -> Job:
    return Job(model="toy", global_batch_size=2, steps=2, method=method, quantization=quantization, precision=precision)


def adapted(method: Lora, *, tied: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return add_adapters_(llama(tied=tied).build(), method)


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {path: parameter for path, parameter in model.named_parameters() if parameter.requires_grad}


def moved_(model: nn.Module) -> nn.Module:
    """The adapters away from where they begin, where they change nothing."""
    for parameter in trained(model).values():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)).to(parameter.dtype)
    return model


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model.eval()(input_ids=IDS).logits
    return found.float()


def read(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has been saved."""
    path: Path = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    save_model(llama(tied=request.param).build(), None, path)
    return path


# ---------------------------------------------------------------------------------------------- what trains


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_matrices_for_each_linear_layer_but_the_head_train_and_nothing_else(dtype: str) -> None:
    model = adapted(Lora(rank=RANK, dtype=dtype))
    found = trained(model)
    assert sum(parameter.numel() for parameter in found.values()) == RANK * LINEAR
    assert {parameter.dtype for parameter in found.values()} == {getattr(torch, dtype)}
    assert all(".lora_A." in path or ".lora_B." in path for path in found)
    assert type(model).__name__ == "LlamaForCausalLM"


def test_gradients_and_state_are_those_of_the_adapters_byte_by_byte() -> None:
    trace = simulate(job(Lora(rank=RANK)), Plan(micro_batch_size=2), llama(tied=True), ROWS, CPU)
    made = {kind: sum(e.bytes for e in trace.events if e.kind is kind and e.bytes > 0) for kind in Kind}
    table, block = VOCABULARY * WIDTH, 4 * WIDTH * WIDTH + 3 * WIDTH * INNER + 3 * WIDTH
    frequencies = 2 * 4 * (WIDTH // 2 // 2)
    assert made[Kind.WEIGHT] == 4 * (table + block + RANK * LINEAR) + frequencies
    # Two steps; and one step count for each of the two matrices of seven layers.
    assert made[Kind.GRADIENT] == 2 * 4 * RANK * LINEAR
    assert made[Kind.OPTIMIZER_STATE] == 8 * RANK * LINEAR + 4 * 14


@pytest.mark.parametrize(
    ("method", "elements"),
    [
        (Lora(rank=RANK, target_modules="q_proj"), RANK * 2 * WIDTH),
        (Lora(rank=RANK, target_modules=("q_proj", "mlp.up_proj")), RANK * (3 * WIDTH + INNER)),
        (Lora(rank=RANK, target_modules=("q_proj",), modules_to_save=("lm_head",)), RANK * 2 * WIDTH + VOCABULARY * WIDTH),
        # A length for each output.
        (Lora(rank=RANK, target_modules=("q_proj",), use_dora=True), RANK * 2 * WIDTH + WIDTH),
    ],
    ids=["one name", "the end of a path", "head trained whole", "dora"],
)
def test_modules_are_named_by_the_end_of_their_path(method: Lora, elements: int) -> None:
    assert sum(parameter.numel() for parameter in trained(adapted(method)).values()) == elements


def test_rslora_divides_alpha_by_the_root_of_the_rank() -> None:
    scales = []
    for use_rslora in (False, True):
        model = adapted(Lora(rank=4, alpha=8.0, use_rslora=use_rslora, target_modules="q_proj"))
        scales.append(model.get_submodule("model.layers.0.self_attn.q_proj").scaling["default"])  # type: ignore[index, union-attr]
    assert scales == [2.0, 4.0]


def test_adapters_begin_without_effect_and_the_same_for_the_same_seed() -> None:
    torch.manual_seed(0)
    plain = llama(tied=True).build()
    first, second = adapted(Lora(rank=RANK)), adapted(Lora(rank=RANK))
    assert torch.equal(logits(first), logits(plain))
    assert all(torch.equal(a, b) for a, b in zip(trained(first).values(), trained(second).values(), strict=True))


def test_a_plain_module_gets_adapters_on_all_its_linear_layers_and_trains() -> None:
    model = load_model(source(Mlp()), job(Lora(rank=RANK)))
    assert sum(parameter.numel() for parameter in trained(model).values()) == 6 * 2 * RANK * (24 + 48)
    before = {path: parameter.clone() for path, parameter in model.named_parameters()}
    run = prepare(job(Lora(rank=RANK)), Plan(micro_batch_size=2), model)
    for group in run.optimizer.param_groups:
        group["lr"] = 0.01
    run.step([batch(CASES["plain_module"], 2)])
    run.step([batch(CASES["plain_module"], 2)])
    changed = {path for path, parameter in model.named_parameters() if not torch.equal(parameter, before[path])}
    assert changed == set(trained(model))


def test_a_linear_layer_of_falcons_own_kind_gets_adapters() -> None:
    falcon = source(
        {"model_type": "falcon", "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    )
    model = build_model(falcon, job(Lora(rank=RANK)))
    paths = {path.split(".lora_")[0].rpartition(".")[2] for path in trained(model)}
    assert paths == {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}


def test_a_linear_layer_that_asks_for_three_dimensions_gets_adapters() -> None:
    class ThreeDimensional(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            assert input.dim() == 3
            return super().forward(input)

    class Missing(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return input * self.absent

    assert is_linear(ThreeDimensional(4, 6))
    assert not is_linear(Missing(4, 6))


def test_a_router_made_from_a_linear_layer_gets_no_adapter() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "intermediate_size_mlp": 32, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2, "vocab_size": 64}
    model = build_model(source({"model_type": "llama4_text", "pad_token_id": 0, **sizes, **heads}), job(Lora(rank=RANK)))
    assert any("q_proj" in path for path in trained(model))
    assert not any("router" in path for path in trained(model))


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_what_trains_whole_in_32_bits_takes_and_gives_the_16_bits_around_it(name: str) -> None:
    model = load_model(llama(tied=False), job(Lora(rank=RANK, modules_to_save=(name,)), precision=Bf16()))
    whole = {path: one for path, one in trained(model).items() if "modules_to_save" in path}
    assert {parameter.dtype for parameter in whole.values()} == {torch.float32}
    out: Any = model(input_ids=IDS, labels=IDS)
    out.loss.backward()
    assert out.logits.dtype == torch.bfloat16
    assert all(parameter.grad is not None for parameter in whole.values())


def test_without_data_the_same_model_is_made_and_a_users_module_stays_as_it_is() -> None:
    given = Mlp()
    paths = [path for path, _ in given.named_parameters()]
    made = dataless_model_of(job(Lora(rank=RANK, dtype="bfloat16")), source(given))
    assert [path for path, _ in given.named_parameters()] == paths
    real = load_model(source(given), job(Lora(rank=RANK, dtype="bfloat16")))
    assert {(path, p.shape, p.dtype, p.requires_grad) for path, p in made.named_parameters()} == {
        (path, p.shape, p.dtype, p.requires_grad) for path, p in real.named_parameters()
    }
    assert all(parameter.is_meta for parameter in made.parameters())


# ---------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (
            Lora(target_modules="qproj"),
            r"target_modules has 'qproj', and no module of LlamaForCausalLM is called so: name some of down_proj, .*, or all-linear\.",
        ),
        (
            Lora(modules_to_save=("head",)),
            r"modules_to_save has 'head', and no module of LlamaForCausalLM is called so: name some of down_proj, .*lm_head.*\.",
        ),
        (
            Lora(target_modules="norm"),
            r"no adapters can be added to LlamaForCausalLM \(Target module LlamaRMSNorm.*\): name linear layers in target_modules\.",
        ),
    ],
)
def test_a_name_that_takes_no_adapter_is_refused(method: Lora, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        adapted(method)


def test_a_model_with_adapters_is_refused_more() -> None:
    with pytest.raises(
        ValueError, match=r"^LlamaForCausalLM has adapters already, and method lora adds new ones: set method to full\.$"
    ):
        add_adapters_(adapted(Lora()), Lora())


def test_a_model_without_linear_layers_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"^target_modules is all-linear, and Conv1d has no linear layer below its head: name the modules that get adapters\.$",
    ):
        add_adapters_(nn.Conv1d(1, 1, 1), Lora())


# ---------------------------------------------------------------------------------------------- what is written


@pytest.mark.parametrize(
    "method", [Lora(rank=RANK), Lora(rank=RANK, use_dora=True), Lora(rank=RANK, modules_to_save=("lm_head",))]
)
def test_saved_adapters_load_in_peft_and_give_the_same_logits(method: Lora, folder: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    model = moved_(load_model(source(str(folder)), job(method)))
    save_model(model, BYTES, tmp_path)
    with warnings.catch_warnings():
        # Of tied weights, for which peft has another way.
        warnings.simplefilter("ignore")
        again = PeftModel.from_pretrained(read(folder, torch.float32), tmp_path)
    assert torch.equal(logits(again), logits(model))
    written = json.loads((tmp_path / "adapter_config.json").read_text(encoding="utf-8"))
    assert written["base_model_name_or_path"] == str(folder)
    assert written["target_modules"] == sorted(written["target_modules"])
    assert {path.name for path in tmp_path.iterdir()} >= {"adapter_model.safetensors", "tokenizer.json"}
    assert not (tmp_path / "model.safetensors").exists()


def test_what_is_written_of_an_adapted_model_is_its_adapters() -> None:
    assert sum(largest_shard(adapted(Lora(rank=RANK)))) == 4 * RANK * LINEAR
    made = dataless_model_of(job(Lora(rank=RANK), Nf4()), llama(tied=True))
    assert sum(largest_shard(made)) == 4 * RANK * LINEAR


def test_adapters_of_another_kind_that_peft_put_in_are_written_with_the_model() -> None:
    from peft import VBLoRAConfig, get_peft_model

    kind = VBLoRAConfig(target_modules=["q_proj"], vector_length=2, num_vectors=4, topk=2)
    with quietly():
        made = get_peft_model(llama(tied=True).build(), kind).base_model.model
    whole = sum(tensor.nbytes for tensor in made.state_dict(keep_vars=True).values())
    # The head is the table of embeddings, which is written once.
    assert sum(largest_shard(made)) == whole - made.lm_head.weight.nbytes


MERGED = {
    "lora": Lora(rank=RANK),
    "dora": Lora(rank=RANK, use_dora=True),
    "rslora in bf16": Lora(rank=RANK, use_rslora=True, dtype="bfloat16"),
    "adapters on the head": Lora(rank=RANK, target_modules=("q_proj", "lm_head")),
    "head trained whole": Lora(rank=RANK, modules_to_save=("lm_head",)),
}


@pytest.mark.parametrize("name", MERGED)
@pytest.mark.parametrize("precision", [Fp32(), Bf16()], ids=["fp32", "bf16"])
def test_a_merged_model_is_base_and_adapters_and_its_embeddings_are_the_bases(
    name: str, precision: Precision, folder: Path, tmp_path: Path
) -> None:
    made = source(str(folder))
    torch.manual_seed(0)
    model = moved_(load_model(made, job(MERGED[name], precision=precision)))
    before = {path: parameter.clone() for path, parameter in model.named_parameters()}
    dtype = torch.float32 if isinstance(precision, Fp32) else torch.bfloat16
    expected = logits(model)
    save_merged(model, made, dtype, BYTES, tmp_path)
    assert all(torch.equal(parameter, before[path]) for path, parameter in model.named_parameters())
    assert torch.equal(logits(model), expected)
    again, base = read(tmp_path, dtype), read(folder, dtype)
    assert torch.equal(again.get_input_embeddings().weight, base.get_input_embeddings().weight)
    off, effect = ((logits(one) - expected).abs().max() for one in (again, base))
    exact = isinstance(precision, Fp32) and MERGED[name].dtype == "float32"
    # In 16 bits the sum is rounded again, to parts of a weight that is larger than what was added.
    assert off < (1e-5 if exact else 0.2) * effect
    assert (tmp_path / "tokenizer.json").is_file()


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_a_tied_table_that_trains_whole_leaves_the_other_as_it_was(name: str, tmp_path: Path) -> None:
    model = moved_(adapted(Lora(rank=RANK, modules_to_save=(name,)), tied=True))
    plain = copy.deepcopy(llama(tied=True))
    torch.manual_seed(0)
    table = plain.build().get_input_embeddings().weight  # type: ignore[operator]
    save_merged(model, llama(tied=True), torch.float32, None, tmp_path)
    again = read(tmp_path, torch.float32)
    kept, changed = again.get_output_embeddings().weight, again.get_input_embeddings().weight
    if name == "lm_head":
        kept, changed = changed, kept
    assert torch.equal(kept, table)
    assert not torch.equal(changed, table)
    torch.testing.assert_close(logits(again), logits(model), rtol=0, atol=1e-6)


def test_a_packed_models_adapters_are_added_to_the_weights_before_they_were_rounded(folder: Path, tmp_path: Path) -> None:
    made = source(str(folder))
    packed, plain = (load_model(made, job(Lora(rank=RANK), quantization)) for quantization in (Nf4(), UNQUANTIZED))
    for path, parameter in trained(moved_(packed)).items():
        trained(plain)[path].data.copy_(parameter)
    save_merged(packed, made, torch.float32, None, tmp_path)
    again = logits(read(tmp_path, torch.float32))
    torch.testing.assert_close(again, logits(plain), rtol=0, atol=1e-6)
    assert (again - logits(packed)).abs().max() > 1e-3


def test_a_plain_module_is_merged_into_one_file(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    given = source(Mlp())
    before = {path: parameter.clone() for path, parameter in Mlp().named_parameters()}
    model = moved_(load_model(given, job(Lora(rank=RANK)))).eval()
    rows: Batch = batch(CASES["plain_module"], 2)
    save_merged(model, given, torch.float32, None, tmp_path)
    again = Mlp().eval()
    again.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert {path for path, _ in again.named_parameters()} == set(before)
    torch.testing.assert_close(again(**rows), model(**rows), rtol=1e-5, atol=1e-6)


def test_what_cannot_be_merged_is_refused(tmp_path: Path) -> None:
    plain: ModelSource = llama(tied=True)
    with pytest.raises(
        ValueError, match=r"^LlamaForCausalLM has no adapters to add to its weights: save it with save_model\.$"
    ):
        save_merged(plain.build(), plain, torch.float32, None, tmp_path)
    packed = build_model(plain, job(Lora(rank=RANK), Nf4()))
    with pytest.raises(
        ValueError,
        match=r"^the weights of LlamaForCausalLM were there only until they were quantised, so nothing is left to add adapters to: "
        r"save the adapters with save_model, or train a model that has been saved\.$",
    ):
        save_merged(packed, plain, torch.float32, None, tmp_path)
