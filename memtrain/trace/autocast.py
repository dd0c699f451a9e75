"""Autocast of processors and NVIDIA cards, emulated for data-less tensors.

The C++ autocast acts at a dispatch key of the device's tensors, which data-less ones do not carry. Here the same cast lists
act at the key of the kernel table (kernels.py), and ``torch.autocast`` itself is led to keep its state under a device that no
tensor is on (``hpu``), so nesting, the data type in force, and what checkpointing restores for recomputation are torch's own.
Small tensors of known value are ordinary processor tensors; since no autocast of the processor is on, none casts them.

Sources: ATen/autocast_mode.h (policies, the lists of cards) and ATen/autocast_mode.cpp (the cache, the lists of processors).
tests/cpu/test_autocast.py holds the lists against those of the installed torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import DefaultDeviceType

aten = torch.ops.aten

_DRIVER = "hpu"
# Before it is led elsewhere.
_is_enabled = torch.is_autocast_enabled

Call = tuple[Any, list[Any], dict[str, Any]]
"""An operator with its arguments."""

Policy = Callable[[Any, tuple[Any, ...], dict[str, Any]], Call]

# Casts to the lower precision of weights, for as long as the outermost autocast lasts.
_cache: dict[Tensor, Tensor] = {}
_policies: Mapping[str, Policy] = {}


def is_on() -> bool:
    """Whether the emulated autocast is in force."""
    return bool(_policies) and _is_enabled(_DRIVER)


# ---------------------------------------------------------------------- policies


def lower_precision(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """All inputs in the lower precision."""
    return _cast_all(operator, args, kwargs, torch.get_autocast_dtype(_DRIVER))


def single_precision(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """All inputs in fp32."""
    return _cast_all(operator, args, kwargs, torch.float32)


def widest(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """All inputs in fp32 where one of them is, else in the lower precision."""
    inputs = [part for value in (*args, *kwargs.values()) for part in (value if isinstance(value, list | tuple) else [value])]
    wide = any(_is_eligible(part) and part.dtype is torch.float32 for part in inputs)
    return _cast_all(operator, args, kwargs, torch.float32 if wide else torch.get_autocast_dtype(_DRIVER))


def single_precision_result(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The result in fp32, unless a data type is asked for; the cast is the operator's own."""
    position = [argument.name for argument in operator._schema.arguments].index("dtype")
    given = args[position] if position < len(args) else kwargs.get("dtype")
    if not _is_eligible(args[0]) or given is not None:
        return operator, list(args), kwargs
    if position < len(args):
        return operator, [*args[:position], torch.float32, *args[position + 1 :]], kwargs
    return operator, list(args), {**kwargs, "dtype": torch.float32}


def single_precision_norm(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The overload of ``norm`` that takes the data type of its result."""
    dtype = torch.float32 if _is_eligible(args[0]) else args[0].dtype
    if operator is aten.norm.Scalar:
        return aten.norm.ScalarOpt_dtype, [args[0], args[1] if len(args) > 1 else 2], {"dtype": dtype}
    keepdim = args[3] if len(args) > 3 else kwargs.get("keepdim", False)
    return aten.norm.ScalarOpt_dim_dtype, [*args[:3], keepdim], {"dtype": dtype}


def banned(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """binary_cross_entropy_banned."""
    raise RuntimeError(
        "binary_cross_entropy and BCELoss are unsafe to autocast: use binary_cross_entropy_with_logits or BCEWithLogitsLoss."
    )


def _cast_all(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> Call:
    """From the last argument to the first: the order in which the compiler evaluates them."""
    last_first = {name: _cast(value, dtype) for name, value in reversed(kwargs.items())}
    cast_args = [_cast(value, dtype) for value in reversed(args)]
    return operator, cast_args[::-1], {name: last_first[name] for name in kwargs}


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """cached_cast: casts to the lower precision of fp32 leaves that want gradients are kept."""
    if isinstance(value, list | tuple):
        return [_cast(part, dtype) for part in value]
    if not _is_eligible(value) or value.dtype is dtype:
        return value
    cacheable = (
        dtype is torch.get_autocast_dtype(_DRIVER)
        and value.dtype is torch.float32
        and value.requires_grad
        and value.is_leaf
        and not value._is_view()
        and torch.is_autocast_cache_enabled()
    )
    if not cacheable:
        return value.to(dtype)
    if value not in _cache:
        # Also where no gradients are wanted, since whoever finds it later may want them.
        with torch.enable_grad():
            _cache[value] = value.to(dtype)
    return _cache[value]


def _is_eligible(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta and value.is_floating_point() and value.dtype is not torch.float64


# ---------------------------------------------------------------------- the lists


def _listed(names: str, policy: Policy) -> dict[str, Policy]:
    return dict.fromkeys(names.split(), policy)


_ON_CARDS: dict[str, Policy] = {
    **_listed(
        "_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input "
        "conv_transpose3d.input convolution cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr matmul "
        "einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell "
        "_thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention "
        "scaled_dot_product_attention",
        lower_precision,
    ),
    **_listed(
        "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar "
        "pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim "
        "nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d "
        "hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss "
        "multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss "
        "binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d "
        "_upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d "
        "_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d "
        "upsample_bicubic2d _upsample_bicubic2d_aa",
        single_precision,
    ),
    **_listed(
        "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm "
        "linalg_matrix_norm.str_ord sum sum.dim_IntList",
        single_precision_result,
    ),
    **_listed("norm.Scalar norm.ScalarOpt_dim", single_precision_norm),
    **_listed(
        "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add",
        widest,
    ),
    **_listed("binary_cross_entropy", banned),
}

_ON_PROCESSORS: dict[str, Policy] = {
    **_listed(
        "conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding bmm mm linalg_vecdot baddbmm addmm "
        "_addmm_activation addbmm linear _convolution.deprecated matmul conv_tbc mkldnn_rnn_layer conv_transpose1d "
        "conv_transpose2d.input conv_transpose3d.input prelu scaled_dot_product_attention _native_multi_head_attention",
        lower_precision,
    ),
    **_listed(
        "avg_pool3d binary_cross_entropy grid_sampler polar prod prod.dim_int quantile quantile.scalar nanquantile "
        "nanquantile.scalar stft stft.center cdist grid_sampler_2d _grid_sampler_2d_cpu_fallback grid_sampler_3d trace "
        "view_as_complex cholesky cholesky_inverse cholesky_solve inverse lu_solve orgqr ormqr pinverse max_pool3d "
        "max_unpool2d max_unpool3d adaptive_avg_pool3d reflection_pad1d reflection_pad2d replication_pad1d "
        "replication_pad2d replication_pad3d mse_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss "
        "poisson_nll_loss smooth_l1_loss cross_entropy_loss l1_loss huber_loss margin_ranking_loss soft_margin_loss "
        "triplet_margin_loss multi_margin_loss ctc_loss.IntList ctc_loss.Tensor kl_div multilabel_margin_loss "
        "binary_cross_entropy_with_logits fft_fft fft_ifft fft_fft2 fft_ifft2 fft_fftn fft_ifftn fft_rfft fft_irfft "
        "fft_rfft2 fft_irfft2 fft_rfftn fft_irfftn fft_hfft fft_ihfft linalg_cond linalg_cond.p_str linalg_matrix_rank "
        "linalg_matrix_rank.tol_tensor linalg_matrix_rank.atol_rtol_tensor linalg_matrix_rank.atol_rtol_float "
        "linalg_solve linalg_cholesky linalg_svdvals linalg_eigvals linalg_eigvalsh linalg_inv "
        "linalg_householder_product linalg_tensorinv linalg_tensorsolve fake_quantize_per_tensor_affine geqrf "
        "_lu_with_info qr svd triangular_solve fractional_max_pool2d fractional_max_pool3d adaptive_max_pool3d "
        "multilabel_margin_loss_forward linalg_qr linalg_cholesky_ex linalg_svd linalg_eig linalg_eigh linalg_lstsq "
        "linalg_inv_ex",
        single_precision,
    ),
    **_listed("stack cat index_copy", widest),
}


def _acted_on(policies: Mapping[str, Policy], key: str) -> dict[str, Policy]:
    """Torch adds to the lists: what the one that is installed does not act on is not cast."""
    registered = {name.removeprefix("aten::") for name in torch._C._dispatch_get_registrations_for_dispatch_key(key)}
    return {name: policy for name, policy in policies.items() if name in registered}


POLICIES: dict[str, dict[str, Policy]] = {
    "cpu": _acted_on(_ON_PROCESSORS, "AutocastCPU"),
    "cuda": _acted_on(_ON_CARDS, "AutocastCUDA"),
}
"""By kind of device, what its autocast does to each operator, named ``name`` or ``name.overload`` of the ATen namespace."""


def _name(operator: Any) -> str:
    schema = operator._schema
    return str(schema.name).removeprefix("aten::") + (f".{schema.overload_name}" if schema.overload_name else "")


def operators_of(policies: Mapping[str, Policy]) -> list[Any]:
    """The operators of a list; a name that this torch does not have is left out."""
    found = []
    for name in policies:
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(aten, packet, None), overload or "default", None)
        if operator is not None:
            found.append(operator)
    return found


# ---------------------------------------------------------------------- in force


@contextmanager
def casts(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Call]:
    """The operator and arguments that autocast makes of these, and no autocast inside: the rule of every list."""
    policy = _policies.get(_name(operator)) if torch.is_autocast_enabled(_DRIVER) else None
    if policy is None:
        yield operator, list(args), kwargs
        return
    torch.set_autocast_enabled(_DRIVER, False)
    try:
        yield policy(operator, args, kwargs)
    finally:
        torch.set_autocast_enabled(_DRIVER, True)


@contextmanager
def emulated(kind: str) -> Iterator[None]:
    """Let ``torch.autocast`` for this kind of device, and for that of data-less tensors, act on these as it does there.

    It needs no CUDA build. What asks torch about autocast gets the answer that it would get on the device.
    """
    global _policies
    autocast: Any = torch.amp.autocast_mode.autocast
    init, clear = autocast.__init__, torch.clear_autocast_cache
    enabled, dtype_of, available = torch.is_autocast_enabled, torch.get_autocast_dtype, torch.amp.is_autocast_available

    def driver(device: str) -> str:
        return _DRIVER if device in (kind, "meta") else device

    def led_init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        init(self, driver(device_type), *args, **kwargs)

    def led_clear() -> None:
        _cache.clear()
        clear()

    replaced: list[tuple[Any, str, Any]] = [
        (autocast, "__init__", led_init),
        (torch, "clear_autocast_cache", led_clear),
        (torch, "is_autocast_enabled", lambda device="cuda": enabled(driver(device))),
        (torch, "get_autocast_dtype", lambda device: dtype_of(driver(device))),
        (torch.amp, "is_autocast_available", lambda device: available(driver(device))),
        *_transformers(),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    before = (_policies, enabled(_DRIVER), dtype_of(_DRIVER), _is_enabled(kind))
    # Where a recomputed module gets its tensors by name, torch takes the autocast of the accelerator that the machine has.
    default = DefaultDeviceType.get_device_type()
    if kind != "cpu":
        DefaultDeviceType.set_device_type(kind)
    _policies = POLICIES[kind]
    torch.set_autocast_dtype(_DRIVER, dtype_of(kind))
    torch.set_autocast_enabled(_DRIVER, enabled(kind))
    # The real one would cast the small tensors that stand for known values.
    torch.set_autocast_enabled(kind, False)
    for owner, name, substitute in replaced:
        setattr(owner, name, substitute)
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)
        DefaultDeviceType.set_device_type(default)
        _policies = before[0]
        torch.set_autocast_enabled(_DRIVER, before[1])
        torch.set_autocast_dtype(_DRIVER, before[2])
        torch.set_autocast_enabled(kind, before[3])
        _cache.clear()


def _transformers() -> list[tuple[Any, str, Any]]:
    """Its ``maybe_autocast`` leaves out data-less tensors, which here stand for those of the device.

    Models hold the function by name, so its code is replaced.
    """
    from transformers.utils import generic

    if not hasattr(generic, "maybe_autocast"):
        # Before transformers 5, models call torch.autocast itself.
        return []

    def maybe_autocast(device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: bool | None = None) -> Any:
        from contextlib import nullcontext

        import torch

        if torch.is_autocast_enabled(device_type) or enabled:
            return torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)
        return nullcontext()

    return [(generic.maybe_autocast, "__code__", maybe_autocast.__code__)]
