"""What the data-less run substitutes in torch besides kernels: it is right, it is still needed, and it is taken back."""

from __future__ import annotations

import contextlib

import pytest
import torch
from test_kernels import CPU
from torch import nn

from memtrain.features.recompute import recompute_blocks_
from memtrain.trace.event import Kind, Phase
from memtrain.trace.record import Recorder
from memtrain.trace.simulate import DatalessRecorder, _random_states
from memtrain.trace.supported import as_if_supported


def weight_with_gradient() -> nn.Parameter:
    weight = nn.Parameter(torch.empty(3, 3, device="meta"))
    weight.grad = torch.empty(3, 3, device="meta")
    return weight


def test_a_fused_optimizer_takes_data_less_weights_onlyas_if_supported() -> None:
    refusal = "`fused=True` requires all the params to be floating point Tensors of supported devices"
    with pytest.raises(RuntimeError, match=refusal):
        torch.optim.AdamW([weight_with_gradient()], fused=True).step()
    with as_if_supported(), DatalessRecorder(CPU, nn.Identity()) as recorder:
        torch.optim.AdamW([weight_with_gradient()], fused=True).step()
    state = [event for event in recorder.trace().events if event.kind is Kind.OPTIMIZER_STATE]
    assert sorted(event.bytes for event in state if event.bytes > 0) == [4, 36, 36]
    assert {event.phase for event in state if event.bytes > 0} == {Phase.FIRST_UPDATE}
    with pytest.raises(RuntimeError, match=refusal):
        torch.optim.AdamW([weight_with_gradient()], fused=True).step()


def test_foreach_clipping_takes_data_less_gradients_onlyas_if_supported() -> None:
    with pytest.raises(RuntimeError, match="foreach=True was passed, but can't use the foreach API on meta tensors"):
        nn.utils.clip_grad_norm_([weight_with_gradient()], 1.0, foreach=True)
    with as_if_supported():
        assert nn.utils.clip_grad_norm_([weight_with_gradient()], 1.0, foreach=True).shape == ()
    with pytest.raises(RuntimeError, match="can't use the foreach API on meta tensors"):
        nn.utils.clip_grad_norm_([weight_with_gradient()], 1.0, foreach=True)


def testas_if_supported_leaves_real_tensors_and_every_torch_function_as_they_were() -> None:
    from torch.nn.utils import clip_grad
    from torch.optim import adam, adamw, optimizer
    from torch.utils import _foreach_utils

    modules = (clip_grad, adam, adamw, optimizer, _foreach_utils)
    before = [dict(vars(module)) for module in modules]
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.full((3,), 2.0)
    with as_if_supported():
        assert nn.utils.clip_grad_norm_([weight], 1.0, foreach=True).item() == pytest.approx(12**0.5)
        assert [dict(vars(module)) for module in modules] != before
    assert [dict(vars(module)) for module in modules] == before

    def stopped() -> None:
        with as_if_supported():
            raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        stopped()
    assert [dict(vars(module)) for module in modules] == before


def states_of_the_generator(device: str, *, substituted: bool) -> int:
    """How often two recomputed blocks save a state of the generator."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(device)
    recompute_blocks_(list(model.children()))
    recorder = DatalessRecorder(CPU, model) if device == "meta" else Recorder(model)
    with recorder, _random_states(recorder) if substituted else contextlib.nullcontext():
        model(torch.ones(4, 3, device=device, requires_grad=True)).sum().backward()
    return [event.bytes for event in recorder.trace().events].count(torch.get_rng_state().nbytes)


def test_only_the_substitution_counts_the_states_of_the_generator_and_as_many_as_on_data() -> None:
    before = torch.get_rng_state, torch.random.fork_rng
    assert states_of_the_generator("cpu", substituted=False) == states_of_the_generator("meta", substituted=False) == 0
    # Each block saves one in forward; one more when it runs again, to give it back.
    assert states_of_the_generator("cpu", substituted=True) == 4
    assert states_of_the_generator("meta", substituted=True) == 4
    assert (torch.get_rng_state, torch.random.fork_rng) == before


def test_a_product_of_two_types_is_refused_as_a_kernel_would() -> None:
    model = nn.Sequential(nn.Linear(3, 3)).to("meta", torch.bfloat16)
    sentence = (
        r"^0 multiplies bfloat16 and float32, and a product takes one type: "
        r"give the rows in the type of the weights, or cast them in forward\.$"
    )
    with DatalessRecorder(CPU, model):
        model(torch.empty(2, 3, device="meta", dtype=torch.bfloat16))
        with pytest.raises(ValueError, match=sentence):
            model(torch.empty(2, 3, device="meta"))
