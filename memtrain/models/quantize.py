"""The frozen linear layers of a model in 4 or 8 bits, by bitsandbytes, and building such a model block by block.

Frees 2 bytes of a 16-bit weight down to 0.52 (4-bit NormalFloat with double quantisation), 0.56 (without) or 1 (8 bits).
Costs a weight's unpacking in forward and again in backward, one layer at a time. Not exact: weights are rounded, once, when
the model is loaded. Sources: Dettmers et al. 2023, arXiv 2305.14314; Dettmers et al. 2022, arXiv 2208.07339.

For a card each weight goes there from the host and is packed there, before the next one comes. What is called works on tensors
without data too, so that planning builds the model in the same way.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, MutableMapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from memtrain import place
from memtrain.method import Int8, Nf4
from memtrain.models.adapters import head_path, is_inside, is_linear, is_transposed
from memtrain.models.blocks import blocks
from memtrain.models.quietly import quietly
from memtrain.trace.event import DEVICE
from memtrain.units import format_bytes

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig

# Names of the tensors beside a packed weight, in what bitsandbytes keeps for a layer.
_SCALES = ("absmax", "code", "offset")


def quantize_(
    model: nn.Module,
    quantization: Nf4 | Int8,
    products: torch.dtype,
    *,
    keep: Collection[str] = (),
    below: str | None = None,
    card: str | None = None,
) -> nn.Module:
    """Pack the weights of linear layers, one after another. In place; the layers are replaced.

    The head, embeddings, and what the model keeps in 32 bits stay as they are.

    Args:
        products: the data type that packed weights are multiplied in.
        keep: names of modules that stay as they are as well, since they are trained.
        below: the path of the part of the model that is packed; the whole by default.
        card: the torch device that layers go to and are packed on; where they are by default.

    Raises:
        ValueError: the model has weights that cannot be packed, such as experts that are one tensor.
    """
    kept = _kept(model, keep)
    _refuse_experts(model)
    # By their paths alone, since a list of layers would keep each of them until the last is packed.
    paths = [path for path, layer in model.named_modules() if _is_packable(path, layer, kept)]
    for path in paths:
        if below is None or path == below or path.startswith(f"{below}."):
            model.set_submodule(path, _packed(model.get_submodule(path), quantization, products, card))
    # peft asks these which layers to look for.
    model.is_loaded_in_4bit = isinstance(quantization, Nf4)  # type: ignore[assignment]
    model.is_loaded_in_8bit = isinstance(quantization, Int8)  # type: ignore[assignment]
    return model


def is_quantized(model: nn.Module) -> bool:
    """Whether the model has layers in 4 or 8 bits."""
    return any(is_packed(module) for module in model.modules())


def scales(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each tensor that a packed layer holds besides its parameters and buffers, with the layer's path."""
    for path, module in model.named_modules():
        if is_packed(module):
            for holder, name in _held_beside(module):
                yield path, getattr(holder, name)


def move_unpacked_(model: nn.Module, device: str) -> nn.Module:
    """Move a model from the host, tensor by tensor, but for its packed layers, which are there."""
    carrier = nn.ModuleList()
    for module in model.modules():
        if not is_packed(module):
            # The same dictionaries, so that what is moved is found where it was.
            shell = nn.Module()
            shell._parameters, shell._buffers = module._parameters, module._buffers
            carrier.append(shell)
    place.move_to_device_(carrier, device)
    return model


def build_quantized(
    model_class: Any,
    config: Any,
    dtype: torch.dtype,
    quantization: Nf4 | Int8,
    products: torch.dtype,
    *,
    keep: Collection[str] = (),
    card: str | None = None,
) -> nn.Module:
    """A transformers model with random weights from torch's generator, never whole: each block is packed when it is made.

    Made on torch's default device; on "meta" it has no data.

    Raises:
        ValueError: the model has weights that cannot be packed.
    """
    from transformers.initialization import no_init_weights

    device = torch.get_default_device()
    with no_init_weights(), _hollow():
        model: Any = model_class._from_config(config, dtype=dtype)
    model.tie_weights()
    _refuse_experts(model)
    # A weight that is packed must not be kept by it.
    filled: WeakValueDictionary[nn.Parameter, nn.Parameter] = WeakValueDictionary()
    for path in blocks(model):
        block = model.get_submodule(path)
        _fill_(block, device, filled)
        _initialise_(model, path)
        quantize_(model, quantization, products, keep=keep, below=path, card=card)
    _fill_(model, device, filled)
    model.initialize_weights()
    return quantize_(model, quantization, products, keep=keep, card=card)


def settings_for(
    model: nn.Module, quantization: Nf4 | Int8, products: torch.dtype, keep: Collection[str]
) -> BitsAndBytesConfig:
    """How from_pretrained packs the same layers, one by one as it reads them.

    Args:
        model: the architecture, without data.

    Raises:
        ValueError: the model has weights that cannot be packed.
    """
    from transformers import BitsAndBytesConfig

    _refuse_experts(model)
    kept = _kept(model, keep)
    skipped = [path for path, layer in model.named_modules() if is_linear(layer) and not _is_packable(path, layer, kept)]
    if isinstance(quantization, Int8):
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=quantization.threshold, llm_int8_skip_modules=skipped)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=quantization.double_quantization,
        bnb_4bit_compute_dtype=products,
        # The name is of the first of the two; it says the same for both.
        llm_int8_skip_modules=skipped,
    )


def settle_(model: nn.Module, products: torch.dtype | None = None) -> nn.Module:
    """Let packed layers that from_pretrained or a user made be as :func:`quantize_` makes them.

    Args:
        products: the data type that they are multiplied in; None for the one that they have.
    """
    for module in model.modules():
        if is_packed(module):
            _settle_(module, products)
    return model


@contextmanager
def read_by_tensor() -> Iterator[None]:
    """Let from_pretrained read each tensor when it is packed, where it would map the files into memory whole."""
    import transformers.modeling_utils

    modeling_utils: Any = transformers.modeling_utils
    open_file = modeling_utils.safe_open

    def open_unmapped(*args: Any, **kwargs: Any) -> Any:
        return open_file(*args, **{**kwargs, "backend": "pread"} if "backend" in kwargs else kwargs)

    modeling_utils.safe_open = open_unmapped
    try:
        yield
    finally:
        modeling_utils.safe_open = open_file


# ---------------------------------------------------------------------------------------------- which layers


def _kept(model: nn.Module, keep: Collection[str]) -> tuple[str, ...]:
    head = head_path(model)
    in_32_bits = getattr(model, "_keep_in_fp32_modules", None) or ()
    return (*keep, *in_32_bits, *([] if head is None else [head]))


def _is_packable(path: str, module: nn.Module, kept: tuple[str, ...]) -> bool:
    # A module that is kept is kept with all that is in it.
    return bool(path) and is_linear(module) and not is_packed(module) and not is_inside(path, kept)


def is_packed(module: nn.Module) -> bool:
    """Whether a module is a layer of bitsandbytes in 4 or 8 bits."""
    # peft calls what it puts around such a layer by the same names.
    return type(module).__name__ in ("Linear4bit", "Linear8bitLt") and type(module).__module__.startswith("bitsandbytes.")


def _refuse_experts(model: nn.Module) -> None:
    """Refuse weights of experts that are one tensor of three dimensions, which no layer of bitsandbytes holds."""
    # A learned table of positions has three dimensions too, the first of them 1.
    experts = {
        path: parameter
        for path, parameter in model.named_parameters()
        if parameter.dim() == 3
        and parameter.shape[0] > 1
        and not isinstance(model.get_submodule(path.rpartition(".")[0]), nn.Conv1d | nn.ConvTranspose1d)
    }
    if experts:
        path, first = next(iter(experts.items()))
        size = sum(parameter.nbytes for parameter in experts.values())
        raise ValueError(
            f"{path} holds the weights of several experts as one tensor, which bitsandbytes does not quantise, and "
            f"{format_bytes(size)} of {type(model).__name__} would stay in {8 * first.element_size()} bits: set quantization to "
            f"unquantized, or take a model without such experts."
        )


# ---------------------------------------------------------------------------------------------- one layer


def _packed(layer: nn.Module, quantization: Nf4 | Int8, products: torch.dtype, card: str | None) -> nn.Module:
    """A layer of bitsandbytes with the weight and bias of ``layer``, on the card if there is one."""
    if card is not None:
        place.move_to_device_(layer, card)
    with quietly(), _out_of_sight():
        import bitsandbytes

        layers: Any = bitsandbytes.nn
    weight: Tensor = layer.weight.detach()  # type: ignore[operator]
    weight = weight.T if is_transposed(layer) else weight
    outputs, inputs = weight.shape
    bias: nn.Parameter | None = layer.bias  # type: ignore[assignment]
    made: Any
    # Its own weight is made and thrown away.
    with _out_of_sight():
        if isinstance(quantization, Nf4):
            made = layers.Linear4bit(inputs, outputs, bias is not None, compute_dtype=products, quant_type="nf4", device="meta")
            # Made here once, and not on what the first layer lies on.
            functional: Any = bitsandbytes.functional
            functional.name2qmap.setdefault("dynamic", functional.create_dynamic_map())
        else:
            made = layers.Linear8bitLt(
                inputs, outputs, bias is not None, has_fp16_weights=False, threshold=quantization.threshold, device="meta"
            )
    made.bias = bias if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
    with nullcontext() if card is None else place.placed(DEVICE):
        _pack_(made, weight.contiguous(), quantization)
    _settle_(made, products)
    packed: nn.Module = made.train(layer.training)
    return packed


def _pack_(made: Any, weight: Tensor, quantization: Nf4 | Int8) -> None:
    import bitsandbytes

    functional: Any = bitsandbytes.functional
    layers: Any = bitsandbytes.nn
    if isinstance(quantization, Nf4):
        packed, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=quantization.double_quantization)
        made.quant_state = state
        made.weight = layers.Params4bit(
            packed,
            requires_grad=False,
            quant_state=state,
            compress_statistics=quantization.double_quantization,
            quant_type="nf4",
            bnb_quantized=True,
        )
    else:
        rounded, row_scales, _ = functional.int8_vectorwise_quant(weight.to(torch.float16))
        made.weight = layers.Int8Params(rounded, requires_grad=False, CB=rounded, SCB=row_scales)


def _settle_(layer: Any, products: torch.dtype | None) -> None:
    """Set what bitsandbytes would set at the first forward, or not at all."""
    # A layer that is there is not drawn again by transformers.
    layer._is_hf_initialized = True
    if type(layer).__name__ == "Linear8bitLt":
        if layer.weight.CB is not None:
            layer.init_8bit_state()
        # It says at each call that it rounds its input to 16 bits.
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
        return
    if products is not None:
        # In backward the weight is unpacked to this type, and then cast.
        layer.weight.quant_state.dtype = products
    # In evaluation on some processors, the library lays the weight out anew, and no gradient flows through that.
    layer.support_avx512bf16_for_cpu = False


def _held_beside(layer: Any) -> list[tuple[Any, str]]:
    """Who holds each tensor beside the packed weight, and by which name."""
    if type(layer).__name__ == "Linear8bitLt":
        return [(layer.state, "SCB")]
    states = [layer.weight.quant_state, layer.weight.quant_state.state2]
    return [(state, name) for state in states if state is not None for name in _SCALES if getattr(state, name) is not None]


# ---------------------------------------------------------------------------------------------- block by block


@contextmanager
def _out_of_sight() -> Iterator[None]:
    """Whatever is made inside is on the processor and is not recorded."""
    with torch.device("cpu"), torch._C._DisableTorchDispatch():
        yield


class _Hollow(nn.Parameter):
    """A parameter that is yet to get memory."""


@contextmanager
def _hollow() -> Iterator[None]:
    """Every parameter that is registered inside has no data, and its own is let go at once. Buffers stay."""
    register = nn.Module.register_parameter

    def register_hollow(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not isinstance(parameter, _Hollow):
            with torch._C._DisableTorchDispatch():
                parameter = _Hollow(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_hollow  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _fill_(module: nn.Module, device: torch.device, filled: MutableMapping[nn.Parameter, nn.Parameter]) -> None:
    """Give each hollow parameter memory, and one that several modules share once."""
    for parent in module.modules():
        for name, parameter in parent._parameters.items():
            if isinstance(parameter, _Hollow):
                made = filled.get(parameter)
                if made is None:
                    empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                    made = filled[parameter] = nn.Parameter(empty, parameter.requires_grad)
                parent._parameters[name] = made


def _initialise_(model: Any, path: str) -> None:
    """Draw the weights of a block as the model that it belongs to draws them: from the inside out."""
    from transformers import PreTrainedModel
    from transformers.initialization import guard_torch_init_functions

    owner = model
    for end in range(1, path.count(".") + 1):
        above = model.get_submodule(".".join(path.split(".")[:end]))
        owner = above if isinstance(above, PreTrainedModel) else owner
    with torch.no_grad(), guard_torch_init_functions():
        for module in reversed(list(model.get_submodule(path).modules())):
            owner._initialize_weights(module)
