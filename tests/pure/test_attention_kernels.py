"""Which kernels of attention ran, read off hand-made events."""

from __future__ import annotations

from memtrain.trace.attention import attention_kernels, attention_line
from memtrain.trace.event import Event, Kind, Phase, Trace


def trace(*operators: str, module: str = "model.layers.0.self_attn") -> Trace:
    return Trace(
        events=tuple(
            Event(number, 8, Kind.TEMPORARY, Phase.FORWARD, operator, module) for number, operator in enumerate(operators)
        )
    )


def test_each_kernel_is_told_by_its_operator_once() -> None:
    found = trace(
        *("mm", "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention"),
        *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
        *("flash_attn._flash_attn_varlen_forward", "flash_attn._flash_attn_forward", "_safe_softmax"),
    )
    assert attention_kernels(found) == ("flash kernel", "memory-efficient kernel", "cuDNN kernel", "flash-attn", "math")
    assert attention_kernels(trace("_scaled_dot_product_flash_attention_for_cpu")) == ("flash kernel",)


def test_a_softmax_is_attention_only_inside_an_attention() -> None:
    assert attention_kernels(trace("_softmax")) == ("eager",)
    assert attention_kernels(trace("_softmax", module="encoder.block.0.layer.0.SelfAttention")) == ("eager",)
    assert attention_kernels(trace("_softmax", module="model.layers.0.mlp.router")) == ()


def test_the_line_names_the_policy_and_what_it_came_to() -> None:
    flash, math = trace("_scaled_dot_product_flash_attention"), trace("_safe_softmax")
    assert attention_line("as the model has it", flash) == "as the model has it: flash kernel"
    assert attention_line("as the model has it", trace("mm")) == "as the model has it"
    assert attention_line("eager", trace("_softmax")) == "eager"
    why = ("no fused kernel takes float32 on t4: …",)
    assert attention_line("SDPA", math, why) == "SDPA: math (no fused kernel takes float32 on t4: …)"
    # A fused kernel took what counts.
    assert attention_line("SDPA", flash, why) == "SDPA: flash kernel"
