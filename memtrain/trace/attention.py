"""Which kernels of attention a run took, read off the operators of its trace."""

from __future__ import annotations

from collections.abc import Sequence

from memtrain.trace.event import Trace

# The mathematical form of scaled dot product attention is the one caller of torch's softmax that allows hidden rows.
_KERNELS = {
    "_scaled_dot_product_cudnn_attention": "cuDNN kernel",
    "_scaled_dot_product_flash_attention": "flash kernel",
    "_scaled_dot_product_flash_attention_for_cpu": "flash kernel",
    "_scaled_dot_product_efficient_attention": "memory-efficient kernel",
    "flash_attn._flash_attn_forward": "flash-attn",
    "flash_attn._flash_attn_varlen_forward": "flash-attn",
    "_safe_softmax": "math",
}


def attention_kernels(trace: Trace) -> tuple[str, ...]:
    """The kernels of attention in a trace, each once, in the order in which they came.

    "math" is SDPA that no fused kernel took, "eager" attention that the model writes out: a softmax in a module that is
    called an attention.
    """
    found: dict[str, None] = {}
    for event in trace.events:
        if event.operator in _KERNELS:
            found.setdefault(_KERNELS[event.operator])
        elif event.operator == "_softmax" and "att" in event.module.lower():
            found.setdefault("eager")
    return tuple(found)


def attention_line(policy: str, trace: Trace, why_math: Sequence[str] = ()) -> str:
    """A policy of attention with what it came to: ``SDPA: math (no fused kernel takes …)``.

    Args:
        policy: the plan's words.
        why_math: why no fused kernel was taken, a sentence for each kind of call.
    """
    kernels = attention_kernels(trace)
    if kernels in ((), (policy,)):
        return policy
    reasons = f" ({'; '.join(why_math)})" if why_math and "math" in kernels else ""
    return f"{policy}: " + ", ".join(f"{kernel}{reasons}" if kernel == "math" else kernel for kernel in kernels)
