"""Small tensors of known value in a data-less run.

Model code asks its masks and positions questions (is any row padded? how long is the longest?) and takes another path by
the answer. So a data-less tensor whose value is known carries that value, as an ordinary tensor, in an attribute: made by
factories with constants, copied from real tensors, and passed on by operators whose inputs are all known. Whatever is
asked of an unknown value is answered by a stated assumption, which is shown with the prediction.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from memtrain.trace.layouts import Layouts, tensors_in
from memtrain.trace.routing import Routing, choices

aten = torch.ops.aten
_META = torch.device("meta")

# Values larger than this many elements are not kept: they cost time, and models ask their questions of small ones.
_MOST_FLOATS, _MOST_INTEGERS = 1 << 16, 1 << 22
# What follows from the choices of a router counts tokens × choices × experts.
_MOST_ROUTED = 1 << 27

# Factories that fill like another tensor: their value does not depend on that tensor's.
_LIKE = {aten.ones_like, aten.zeros_like, aten.full_like, aten.new_ones, aten.new_zeros, aten.new_full}
# Kernels that update parameters in place and return nothing that is new; meta has none of them.
_FUSED = {aten._fused_adamw_, aten._fused_adam_, aten._fused_sgd_, aten._fused_adagrad_}
# What a scaled loss asks of its gradients: a flag of the last but one argument is set where one is not finite.
_FINITE = aten._amp_foreach_non_finite_check_and_unscale_
_INDEX = {aten.index, aten._unsafe_index}
# The shape of these depends on the values of the second argument only.
_SELECT = {*_INDEX, aten.masked_select}


def lift(tensor: Tensor) -> Tensor:
    """A data-less tensor of the same shape that knows the value of ``tensor`` if that is small."""
    dataless = torch.empty_like(tensor, device=_META)
    if tensor.is_meta:
        dataless.__dict__.update(tensor.__dict__)
    elif _is_small(tensor):
        # Out of the recorder's sight: the value is ours, and no part of the run.
        with torch._C._DisableTorchDispatch():
            dataless._memtrain_value = tensor.detach().to("cpu", copy=True)  # type: ignore[attr-defined]
    return dataless


class Values:
    """Runs operators on data-less tensors and keeps the values that are known.

    Args:
        assume: called with one sentence for every answer that had to be assumed.
        routing: how the choices of a router fall; unknown without it.
        decides_on_update: whether what is asked now decides on an update that has begun; never by default.

    Attributes:
        followed_routing: whether any answer followed from the choices of a router.
    """

    def __init__(
        self,
        assume: Callable[[str], object],
        routing: Routing | None = None,
        decides_on_update: Callable[[], bool] = lambda: False,
    ) -> None:
        self._assume = assume
        self._routing = routing
        self._decides_on_update = decides_on_update
        self._routed = False
        self.followed_routing = False
        self._layouts = Layouts()
        self._looks: dict[int, bool] = {}
        # Storages whose known value was overwritten by an unknown one, by address, for as long as they live.
        self._overwritten: dict[int, weakref.ref[Any]] = {}

    def mode(self) -> TorchDispatchMode:
        """A dispatch mode that runs every operator through :meth:`execute`, without recording it."""
        values = self

        class _Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                return values.execute(func, args, kwargs or {})

        return _Mode()

    def execute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run one operator: on its data-less inputs for shapes, and on their values where all are known."""
        tensors = tensors_in((args, tuple(kwargs.values())))
        wanted = kwargs.get("device")
        target = None if wanted is None else torch.device(wanted).type
        if target != "meta" and not any(tensor.is_meta for tensor in tensors):
            return func(*args, **kwargs)
        packet = func._overloadpacket
        if packet is aten._local_scalar_dense:
            return self._item(args[0])
        if packet in _FUSED:
            return None
        if target == "cpu":
            return self._copy_to_host(func, args, kwargs)

        known = self._known_inputs(func, packet, args, kwargs, tensors)
        value = None if known is None else _try(func, *known)
        routed = self._routed and value is not None and any(map(self._is_routed, tensors))
        if isinstance(value, bool):
            self.followed_routing |= routed
            return value
        if routed:
            _mark_routed(value)
        if self._asks_for_a_shape(func, packet, args):
            # A mask that is known picks from what is not.
            self.followed_routing |= self._routed and any(map(self._is_routed, tensors))
            out = self._shape_from_values(func, packet, args, kwargs, value)
        else:
            out = self._layouts.result(func, args, kwargs, lambda: _shape(func, args, kwargs, self._assume))
        if func._schema.is_mutable:
            self._keep_or_forget(func, args, kwargs, value)
        elif value is not None:
            self._attach(out, value)
        elif packet is aten.topk and self._routing is not None:
            self._route(self._routing, args[0], out[1])
        return out

    def is_plain_view(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether the operator only looks at one data-less tensor of unknown value: half of all operators do."""
        looks = self._looks.get(id(func))
        if looks is None:
            schema = func._schema
            looks = not schema.is_mutable and bool(schema.returns) and all(one.alias_info is not None for one in schema.returns)
            self._looks[id(func)] = looks
        if not looks or kwargs:
            return False
        viewed = args[0]
        return isinstance(viewed, Tensor) and viewed.is_meta and "_memtrain_value" not in viewed.__dict__

    # ------------------------------------------------------------------ routing

    def _route(self, routing: Routing, scores: Tensor, chosen: Tensor) -> None:
        """Take the indices of the largest scores for a router's choices among as many experts as there are scores."""
        if scores.dim() and scores.shape[:-1] == chosen.shape[:-1] and 0 < chosen.numel() <= _MOST_INTEGERS:
            per_token = chosen.shape[-1]
            value = choices(routing, chosen.numel() // per_token, per_token, scores.shape[-1]).view(chosen.shape)
            _mark_routed(value)
            self._routed = True
            self._attach(chosen, value)

    def _is_routed(self, tensor: Tensor) -> bool:
        value = self.value(tensor)
        return value is not None and "_memtrain_routed" in value.__dict__

    # ------------------------------------------------------------------ values

    def _is_small(self, tensor: Tensor) -> bool:
        # Once a router was seen, integers follow from it, and so may sums over what they pick.
        if "_memtrain_routed" in tensor.__dict__:
            return tensor.numel() <= _MOST_ROUTED
        return _is_small(tensor, _MOST_ROUTED if self._routed else _MOST_INTEGERS)

    def _makes_small(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether a factory makes a tensor whose value is worth keeping."""
        shape = func(*args, **{**kwargs, "device": _META})
        return isinstance(shape, Tensor) and self._is_small(shape)

    def _attach(self, out: Any, value: Any) -> None:
        for tensor, known in zip(tensors_in(out), tensors_in(value), strict=True):
            if self._is_small(known):
                tensor._memtrain_value = known  # type: ignore[attr-defined]

    def value(self, tensor: Tensor) -> Tensor | None:
        """The value of a tensor, or None where it is not known."""
        if not tensor.is_meta:
            return tensor
        value: Tensor | None = tensor.__dict__.get("_memtrain_value")
        if value is not None and tensor.untyped_storage()._cdata in self._overwritten:
            return None
        return value

    def _known_inputs(self, func: Any, packet: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> tuple[Any, Any] | None:
        """The arguments with values in place of data-less tensors, or None where the result cannot be known."""
        if torch.Tag.nondeterministic_seeded in func.tags or "empty" in func.__name__:
            return None
        if packet in _LIKE:
            if not self._is_small(tensors[0]) or kwargs.get("dtype", tensors[0].dtype).is_floating_point:
                return None
            stand_ins = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
        else:
            stand_ins = []
            for tensor in tensors:
                value = self.value(tensor)
                if value is None or not self._is_small(value):
                    return None
                stand_ins.append(value)
            if not tensors and not self._makes_small(func, args, kwargs):
                return None
        remaining = iter(stand_ins)
        swap = _mapper(lambda _: next(remaining))
        # `tensors` lists positional arguments first, so they are swapped first.
        positional = [swap(item) for item in args]
        swapped = {name: swap(item) for name, item in kwargs.items()}
        if swapped.get("device") is not None:
            swapped["device"] = torch.device("cpu")
        return positional, swapped

    def _keep_or_forget(self, func: Any, args: Any, kwargs: Any, value: Any) -> None:
        """After an operator in place: a value was updated with it, or is not known any more."""
        if value is not None:
            return
        if func._overloadpacket is _FINITE:
            # The flag goes on saying that all are: the update that is taken is what needs memory, one left out needs less.
            self._forget(args[0])
            return
        for argument, given in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._forget(given)
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write and argument.name in kwargs:
                self._forget(kwargs[argument.name])

    def _forget(self, written: Any) -> None:
        for tensor in tensors_in(written):
            if "_memtrain_value" in tensor.__dict__:
                storage = tensor.untyped_storage()
                gone = functools.partial(self._died, storage._cdata)
                self._overwritten[storage._cdata] = weakref.ref(storage, gone)

    def _died(self, address: int, _: Any) -> None:
        """The storage is gone: its address may belong to another from now on."""
        del self._overwritten[address]

    # ------------------------------------------------------------------ questions

    def _item(self, tensor: Tensor) -> Any:
        value = self.value(tensor)
        if value is not None:
            self.followed_routing |= self._is_routed(tensor)
            return value.item()
        answer = False if tensor.dtype is torch.bool else 0.0 if tensor.is_floating_point() else 0
        # The norm of a gradient is finite, as the flag of a scaled loss says that all are: the update that is taken is what needs
        # memory, one left out needs less, and nothing is assumed.
        if self._decides_on_update() and tensor.is_floating_point():
            return answer
        self._assume(f"a {str(tensor.dtype).removeprefix('torch.')} value that only data can tell was taken for {answer}")
        return answer

    def _copy_to_host(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """A real tensor in place of a copy to the host: the value where it is known, else zeros."""
        value = self.value(args[0])
        self.followed_routing |= self._is_routed(args[0])
        if value is None:
            self._assume(f"a tensor of shape {tuple(args[0].shape)} that was copied to the host was taken for zeros")
            value = torch.zeros(args[0].shape, dtype=args[0].dtype)
        copied: Tensor = func(value, *args[1:], **kwargs)
        return copied

    def _asks_for_a_shape(self, func: Any, packet: Any, args: Any) -> bool:
        """Whether the shape of the result depends on values; that of an index only where it is a mask."""
        if packet in _INDEX:
            return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors_in(args[1]))
        return torch.Tag.dynamic_output_shape in func.tags

    def _shape_from_values(self, func: Any, packet: Any, args: Any, kwargs: Any, value: Any) -> Any:
        """The result of an operator whose shape depends on values; unknown masks are taken to be all true."""
        if value is None:
            selecting = args[1] if packet in _SELECT else args
            if any(self.value(tensor) is None for tensor in tensors_in(selecting)):
                self._assume(f"{func.__name__} of unknown values was taken to select everything")

            def stand_in(tensor: Tensor) -> Tensor:
                known = self.value(tensor)
                return torch.ones(tensor.shape, dtype=tensor.dtype) if known is None else known

            swap = _mapper(stand_in)
            value = func(*map(swap, args), **{name: swap(item) for name, item in kwargs.items()})
        like = _mapper(lambda tensor: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META))
        return like(value)


def _shape(func: Any, args: Any, kwargs: Any, assume: Callable[[str], object]) -> Any:
    """The data-less result; real tensors that meet data-less ones lose their data first."""
    bare = _mapper(lambda tensor: tensor if tensor.is_meta else tensor.to(_META))
    if func is aten._to_copy.default and not args[0].is_meta:
        return torch.empty_like(args[0], dtype=kwargs.get("dtype") or args[0].dtype, device=_META)
    bare_args, bare_kwargs = [bare(item) for item in args], {name: bare(item) for name, item in kwargs.items()}
    own = _OWN_SHAPES.get(func._overloadpacket)
    if own is not None:
        return own(*bare_args, **bare_kwargs)
    try:
        out = func(*bare_args, **bare_kwargs)
    except NotImplementedError:
        assume(f"{func.__name__} has no data-less form and ran on zeros for its shape")
        zeros = _mapper(lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype))
        out = func(*map(zeros, bare_args), **{name: zeros(item) for name, item in bare_kwargs.items()})
        return _mapper(lambda tensor: tensor.to(_META))(out)
    return out


def _grouped_product(
    first: Tensor,
    second: Tensor,
    offsets: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Products of groups of rows, each with a matrix of its own; meta takes bfloat16 alone and lays it out by the build of torch.

    Rows begin at multiples of 16 bytes (create_grouped_gemm_output_tensor in ATen/native/GroupedMMUtils.h).
    """
    rows, columns = first.shape[-2], second.shape[-1]
    dtype = out_dtype or first.dtype
    wide = -(-columns * dtype.itemsize // 16) * 16 // dtype.itemsize
    if first.dim() != second.dim():
        return torch.empty_strided((rows, columns), (wide, 1), dtype=dtype, device=_META)
    groups = first.shape[0] if offsets is None else offsets.shape[0]
    return torch.empty_strided((groups, rows, columns), (rows * wide, wide, 1), dtype=dtype, device=_META)


def _histogram(tensor: Tensor, bins: int = 100, *_: Any, **__: Any) -> Tensor:
    """Counts in equal bins; meta has no such kernel (histogram_histc in ATen/native/Histogram.cpp, cuda/SummaryOps.cu)."""
    return torch.empty(bins, dtype=tensor.dtype, device=_META)


# The layouts of results that meta cannot tell, or tells by how torch was built.
_OWN_SHAPES: dict[Any, Callable[..., Tensor]] = {aten.histc: _histogram}
# From torch 2.8 on.
if hasattr(aten, "_grouped_mm"):
    _OWN_SHAPES[aten._grouped_mm] = _grouped_product


def _try(func: Any, args: Any, kwargs: Any) -> Any:
    """The value of an operator, or None where the processor has no kernel for these types, or refuses these values."""
    try:
        return func(*args, **kwargs)
    except RuntimeError:
        return None


def _mark_routed(value: Any) -> None:
    for tensor in tensors_in(value):
        tensor._memtrain_routed = True  # type: ignore[attr-defined]


def _is_small(tensor: Tensor, most_integers: int = _MOST_INTEGERS) -> bool:
    return tensor.numel() <= (_MOST_FLOATS if tensor.is_floating_point() else most_integers)


def _mapper(change: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    """A function that changes every tensor of an argument, which may be a list."""

    def mapped(item: Any) -> Any:
        if isinstance(item, Tensor):
            return change(item)
        if isinstance(item, tuple | list):
            return type(item)(mapped(part) for part in item)
        return item

    return mapped
