"""Fused operators and GPTQ layers of fms-acceleration on data-less tensors, with packages made by hand in place of its own."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from published import fms_kernels, gptq
from published.record import Record
from published.run import NotExpressible
from torch import Tensor, nn

# What models/toy.py of the package says, with a trigger, a builder and an imported name as its own rules have.
RULES = """
from types import SimpleNamespace as Rule
from ..kernels import fast_norm, fast_turn, fused

def is_attention(module, name=None):
    return hasattr(module, "q_proj")

def is_projection(module, name=None):
    return isinstance(module, SimpleLinear)

from torch.nn import Linear as SimpleLinear

def rule(name, triggered=None, forward=None, builder=None, imported=None):
    trigger = triggered and Rule(is_triggered=triggered)
    return Rule(rule_id=name, trigger=trigger, forward=forward, forward_builder=builder, import_and_maybe_reload=imported)

def set_loss(module, name=None):
    if hasattr(module, "loss_type"):
        module.loss_type = "fused"
    return hasattr(module, "loss_type")

def get_mp_rules(base_type, config=None):
    return [
        rule("toy-rms", lambda module, name: name == "norm", fast_norm),
        rule("toy-qkvo", is_attention, builder=lambda module: [
            (Rule(is_triggered=is_projection, module_name="q_proj"), fused(base_type)),
            (Rule(is_triggered=lambda module, name: False, module_name="o_proj"), fused(base_type)),
        ]),
        rule("toy-custom-loss", set_loss),
        rule("toy-rope", imported=("some.models.toy.turn", fast_turn, None)),
    ]
"""
KERNELS = """
import torch
import triton
import triton.language as tl

@triton.autotune([triton.Config({"BLOCK": 128})], key=["n"])
@triton.jit
def kernel(out, n: tl.constexpr):
    tl.store(out, 0)

def fast_norm(self, x):
    out = torch.empty(x.shape, dtype=torch.float16, device="cuda")
    kernel[(triton.cdiv(x.numel(), 128),)](out, x.numel(), BLOCK=triton.next_power_of_2(100))
    return out

def fast_turn(x):
    return x * 3

def fused(base_type):
    def forward(self, x):
        return torch.empty(*x.shape, 7 if base_type == "auto_gptq" else 5, device="cuda")
    return forward

def precision():
    return torch.get_autocast_gpu_dtype()
"""
LAYER = """
import torch
from ...nn_modules.triton_utils import dequant

class QuantLinear(torch.nn.Module):
    def __init__(self, bits, group_size, infeatures, outfeatures, bias):
        super().__init__()
        self.settings = (bits, group_size, infeatures, outfeatures, bias)
        self.infeatures, self.outfeatures = infeatures, outfeatures
        self.register_buffer("qweight", torch.zeros(infeatures // 32 * bits, outfeatures, dtype=torch.int32))

    def forward(self, x):
        return dequant.product(x, self.outfeatures)
"""
DEQUANT = """
import torch
import triton

def product(x, outfeatures):
    return x @ torch.empty((x.shape[-1], outfeatures), device="cuda", dtype=torch.float16)
"""


def turn(x: Tensor) -> Tensor:
    return x * 2


class Adapted(nn.Module):
    """What peft puts around a GPTQ layer."""

    def __init__(self, layer: Any, name: str, rank: int = 0, **_: Any) -> None:
        super().__init__()
        self.layer, self.name, self.rank = layer, name, rank


class Norm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(32, 32, bias=False), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(turn(x))


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config, self.loss_type = SimpleNamespace(model_type="toy"), "plain"
        self.norm, self.attention, self.gate, self.head = Norm(), Attention(), nn.Linear(32, 2), nn.Linear(32, 9)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, x: Tensor) -> Any:
        return self.head(self.attention(self.norm(x)))


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    layers = "fms_acceleration_peft/gptqmodel/nn_modules"
    written = {
        # Their own first modules would import what is not here.
        "fms_acceleration/__init__.py": "import nothing_of_that_name",
        "fms_acceleration_foak/__init__.py": "import nothing_of_that_name",
        "fms_acceleration_foak/models/__init__.py": "",
        "fms_acceleration_foak/models/toy.py": RULES,
        "fms_acceleration_foak/kernels.py": KERNELS,
        "fms_acceleration_peft/__init__.py": "import nothing_of_that_name",
        "fms_acceleration_peft/gptqmodel/__init__.py": "import nothing_of_that_name",
        f"{layers}/__init__.py": "",
        f"{layers}/qlinear/__init__.py": "",
        f"{layers}/qlinear/qlinear_tritonv2.py": LAYER,
        f"{layers}/triton_utils/__init__.py": "",
        f"{layers}/triton_utils/dequant.py": DEQUANT,
    }
    for name, text in written.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    # As peft 0.12 and 0.13 name it; what is replaced in peft is put back.
    monkeypatch.setattr("peft.tuners.lora.gptq.QuantLinear", Adapted, raising=False)
    chosen = importlib.import_module("peft.tuners.lora.model")
    monkeypatch.setattr(chosen, "dispatch_gptq", chosen.dispatch_gptq)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("fms_acceleration"):
            del sys.modules[name]


def record(configuration: str = "foak-fast-kernels", method: str = "lora") -> Record:
    return Record(
        id="one", source="refs/a100_80gb.csv", model="toy", method=method, notes=f"framework_config={configuration}; x"
    )


def toy() -> Toy:
    with torch.device("meta"):
        return Toy()


def rows() -> Tensor:
    return torch.empty(4, 32, device="meta")


def test_a_kernel_is_not_launched_and_what_python_makes_for_it_has_no_data() -> None:
    made = fms_kernels.apply(toy(), record()).norm(rows())
    assert (made.is_meta, made.dtype, tuple(made.shape)) == (True, torch.float16, (4, 32))


def test_a_replaced_name_is_found_by_this_model_alone() -> None:
    patched = fms_kernels.apply(toy(), record())
    real = torch.ones(1, 32)
    patched.attention.o_proj = nn.Identity()
    other = Attention()
    other.o_proj = nn.Identity()
    assert patched.attention(real)[0, 0] == 3
    assert other(real)[0, 0] == 2


def test_a_rule_without_a_forward_sets_the_kind_of_loss() -> None:
    assert fms_kernels.apply(toy(), record()).loss_type == "fused"


def test_a_loss_fused_with_the_head_leaves_the_other_as_it_is() -> None:
    assert fms_kernels.apply(toy(), record("foak-fast-kernels-liger")).loss_type == "plain"


@pytest.mark.parametrize(
    ("configuration", "columns"), [("accelerated-peft-bnb-foak", 5), ("accelerated-peft-autogptq-foak", 7)]
)
def test_projections_on_packed_weights_are_fused_by_the_kind_of_packing(configuration: str, columns: int) -> None:
    attention: Any = fms_kernels.apply(toy(), record(configuration, "qlora")).attention
    assert tuple(attention.q_proj(rows()).shape) == (4, 32, columns)
    # Its trigger does not hold.
    assert tuple(attention.o_proj(rows()).shape) == (4, 32)


def test_projections_on_plain_weights_are_not_fused() -> None:
    attention: Any = fms_kernels.apply(toy(), record(method="lora")).attention
    assert tuple(attention.q_proj(rows()).shape) == (4, 32)


def test_the_package_is_told_the_type_of_the_simulated_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    fms_kernels.apply(toy(), record())
    monkeypatch.setattr(torch, "get_autocast_dtype", {"cuda": torch.bfloat16}.get)
    assert sys.modules["fms_acceleration_foak.kernels"].precision() is torch.bfloat16


def test_the_stand_ins_are_gone_once_the_package_is_loaded() -> None:
    before = {name: sys.modules.get(name) for name in ("triton", "bitsandbytes", "pandas")}
    fms_kernels.apply(toy(), record())
    assert {name: sys.modules.get(name) for name in before} == before


def test_a_family_without_rules_cannot_be_told() -> None:
    other = toy()
    other.config.model_type = "cube"
    with pytest.raises(NotExpressible, match="fms-acceleration has no fused operators for models of the kind 'cube'"):
        fms_kernels.apply(other, record())


def test_a_package_that_is_missing_is_named() -> None:
    expected = "the package fms_of_another_name is not installed: add it to the environment of this record"
    with pytest.raises(ModuleNotFoundError, match=expected), fms_kernels.stand_ins("fms_of_another_name"):
        pass


def test_gptq_layers_take_the_place_of_all_but_the_head_and_the_gates() -> None:
    model: Any = gptq.quantize_(toy())
    assert model.attention.q_proj.settings == (4, 128, 32, 32, False)
    assert model.attention.o_proj.settings == (4, 128, 32, 32, True)
    assert type(model.gate) is type(model.head) is nn.Linear
    assert model.quantization_method == "gptq"


def test_all_inputs_of_a_gptq_layer_share_a_scale_in_a_large_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gptq, "WITHOUT_GROUPS_FROM", 100)
    model: Any = gptq.quantize_(toy())
    assert model.attention.q_proj.settings == (4, -1, 32, 32, False)


def test_a_gptq_layer_unpacks_its_weight_without_data() -> None:
    model: Any = gptq.quantize_(toy())
    made = model.attention.q_proj(rows().half())
    assert (made.is_meta, tuple(made.shape), made.dtype) == (True, (4, 32), torch.float16)


def test_peft_puts_adapters_around_gptq_layers_and_no_others() -> None:
    model: Any = gptq.quantize_(toy())
    dispatch: Any = sys.modules["peft.tuners.lora.model"].dispatch_gptq
    adapted = dispatch(model.attention.q_proj, "default", rank=2)
    assert (adapted.layer, adapted.name, adapted.rank) == (model.attention.q_proj, "default", 2)
    assert dispatch(model.gate, "default", rank=2) is None
