"""The recorder: every storage's birth and death while it is active, with phase, module, operator and kind.

It is a dispatch mode, so it sees each operator after autograd has decomposed it, and it follows storages by weak
references, so that a free is seen when it happens. It sees nothing that a kernel allocates and frees inside itself; the
data-less run adds that from the kernel table. The same recorder watches real tensors and data-less ones, which is how
the tests compare the two (tests/cpu/test_parity.py).
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from memtrain.place import said_place
from memtrain.trace.event import DEVICE, HOST, Event, Kind, Phase, Place, Trace, Work
from memtrain.trace.flops import flop_formula
from memtrain.trace.layouts import tensors_in

_PRECEDENCE = {kind: position for position, kind in enumerate(Kind)}


@dataclass(slots=True)
class _Storage:
    """One storage from birth to death; `segment` numbers the stretches of one phase."""

    number: int
    bytes: int
    operator: str
    module: str
    phase: Phase
    segment: int
    place: Place
    last_dim: int
    kind: Kind | None = None
    freed_in: int | None = None


@dataclass(frozen=True, slots=True)
class _Operator:
    """What is asked of an operator each time it runs: whether its results are old storages, its name, its flop formula."""

    aliases: bool
    name: str
    flops: Callable[..., float] | None

    @classmethod
    def of(cls, func: Any) -> Self:
        returns = func._schema.returns
        aliases = bool(returns) and all(one.alias_info is not None for one in returns)
        name = _short_name(func)
        return cls(aliases, name, flop_formula(func, name))


class Recorder(TorchDispatchMode):
    """Records what happens to memory while it is the active mode.

    Args:
        model: the model at work, where it is there already; see :meth:`watch`.
        vocabulary: width of the logits, to tell them from other activations; None where the model has none.
    """

    def __init__(self, model: nn.Module | None = None, vocabulary: int | None = None) -> None:
        super().__init__()
        self.assumed: dict[str, None] = {}
        self._hooks: list[Any] = []
        self._live: dict[int, tuple[weakref.ref[Any], _Storage]] = {}
        self._log: list[tuple[_Storage, bool, Phase]] = []
        self._numbers = 0
        self._operators: dict[int, _Operator] = {}
        self._marks: list[tuple[str, int]] = []
        self._work = {phase: Work() for phase in Phase}
        self._forced: Phase | None = None
        self._updated: set[str] = set()
        self._updating = 0
        self._update_phase, self._counts_work = Phase.FIRST_UPDATE, True
        # Live storages that are not on the device; while there are none, nothing can be computed elsewhere.
        self._elsewhere = 0
        self._last_phase = Phase.LOAD
        self._segment = 0
        # The path of each module being run, and whether it was entered from within backward (then it is recomputed).
        self._stack: list[tuple[str, bool]] = []
        # Autograd numbers its nodes in the order of creation: the module on top when a number is taken owns the nodes
        # from that number on, which is how backward is traced to modules without touching the graph.
        self._sequence_marks, self._sequence_paths = [0], [""]
        self.watch(nn.Module() if model is None else model, vocabulary)

    # ------------------------------------------------------------------ what the caller says

    def watch(self, model: nn.Module, vocabulary: int | None = None) -> None:
        """Take ``model`` for the model at work: its parameters and buffers are weights, its submodules name the owners.

        Gradients are tagged as soon as they are there, so this comes before any feature that takes them away.
        """
        self._model, self._vocabulary = model, vocabulary
        self._paths = {module: path for path, module in model.named_modules()}
        self._parameters: dict[Tensor, str] = {parameter: path for path, parameter in model.named_parameters()}
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        self._hooks += [parameter.register_post_accumulate_grad_hook(self._gradient_is_there) for parameter in trained]

    def track(self, tensor: Tensor, kind: Kind | None = None, path: str | None = None) -> None:
        """Count a tensor that was made out of sight, unless it is known; ``path`` is that of its module."""
        storage = tensor.untyped_storage()
        entry = self._live.get(storage._cdata)
        if entry is None:
            here = self._here() if path is None else path
            self._born(tensor, storage, "given", here, said_place() or self.place_of_given(tensor))
        elif path is not None:
            entry[1].module = path
        if kind is not None:
            self.tag(tensor, kind)

    def tag(self, tensor: Tensor, kind: Kind) -> None:
        """Say what a tracked storage holds; the kind of higher precedence stays."""
        entry = self._live.get(tensor.untyped_storage()._cdata)
        if entry is not None:
            storage = entry[1]
            if storage.kind is None or _PRECEDENCE[kind] < _PRECEDENCE[storage.kind]:
                storage.kind = kind

    def track_weights(self) -> None:
        """Count the model's parameters and buffers."""
        for path, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
            self.track(tensor, Kind.WEIGHT, path.rpartition(".")[0])

    def mark(self, name: str) -> None:
        """Begin a named section."""
        self._marks.append((name, len(self._log)))

    def first_step_done(self) -> None:
        """From here on an update finds the optimizer's state there, and work is not counted: steps are alike."""
        self._update_phase, self._counts_work = Phase.UPDATE, False

    @contextmanager
    def held(self, sizes: Iterable[int], operator: str, place: Place) -> Iterator[None]:
        """Memory that no operator allocates, held inside."""
        storages = [self._new(size, operator, "", place, last_dim=0) for size in sizes]
        try:
            yield
        finally:
            for storage in storages:
                self._died(storage)

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Everything inside belongs to ``phase``; an update to the first or a later one, whichever it is."""
        before, self._forced = self._forced, self._update_phase if phase is Phase.UPDATE else phase
        try:
            yield
        finally:
            self._forced = before

    def inside(self, phase: Phase, function: Callable[[], Any]) -> Callable[[], Any]:
        """``function``, run in ``phase``."""

        def within() -> Any:
            with self.phase(phase):
                return function()

        return within

    # ------------------------------------------------------------------ what the mode sees

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The guard against compilation costs as much as a small operator, and nothing here is compiled.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = self.execute(func, args, kwargs or {})
        # By identity: an operator's hash is computed in Python.
        operator = self._operators.get(id(func))
        if operator is None:
            operator = self._operators[id(func)] = _Operator.of(func)
        if not operator.aliases:
            made = [(tensor, tensor.untyped_storage()) for tensor in tensors_in(out)]
            new = [(tensor, storage) for tensor, storage in made if storage._cdata not in self._live]
            if new:
                here, place = self._here(), self._place_of(args)
                for tensor, storage in new:
                    self._born(tensor, storage, operator.name, here, place)
            # What is placed elsewhere is no work of the device.
            if self._counts_work and said_place() is None:
                self._count(operator, args, kwargs or {}, out)
        self.inside_kernel(func, args, kwargs or {})
        return out

    def execute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run one operator; the data-less run replaces this."""
        return func(*args, **kwargs)

    def place_of_given(self, tensor: Tensor) -> Place:
        """Where a tensor lies that was made out of sight and of which nothing is said."""
        return DEVICE

    def inside_kernel(self, func: Any, args: Any, kwargs: Any) -> None:
        """Memory that the kernel allocates inside itself; none is seen from outside."""

    def workspace(self, size: int, func: Any, *, kept: bool = False) -> None:
        """Count ``size`` bytes that the kernel of ``func`` takes, and frees again unless they are ``kept``."""
        storage = self._new(size, _short_name(func), self._here(), said_place() or DEVICE, last_dim=0)
        storage.kind = Kind.WORKSPACE
        if not kept:
            self._died(storage)

    def _place_of(self, args: Any) -> Place:
        """Where a result lies: where it is said to, else on the host if all that it is computed from is there."""
        said = said_place()
        if said is not None or not self._elsewhere:
            return said or DEVICE
        place = DEVICE
        for tensor in tensors_in(args):
            entry = self._live.get(tensor.untyped_storage()._cdata)
            if entry is not None:
                place = entry[1].place
                if place is not HOST:
                    return DEVICE
        return place

    def _born(self, tensor: Tensor, storage: Any, operator: str, module: str, place: Place) -> None:
        last_dim = tensor.shape[-1] if tensor.dim() > 1 else 0
        entry = self._new(storage.nbytes(), operator, module, place, last_dim)
        key = storage._cdata
        self._elsewhere += place is not DEVICE

        def died(_: Any) -> None:
            del self._live[key]
            self._elsewhere -= place is not DEVICE
            self._died(entry)

        self._live[key] = (weakref.ref(storage, died), entry)

    def _new(self, size: int, operator: str, module: str, place: Place, last_dim: int) -> _Storage:
        phase = self._now()
        self._numbers += 1
        entry = _Storage(self._numbers, size, operator, module, phase, self._segment, place, last_dim)
        self._log.append((entry, True, phase))
        return entry

    def _died(self, entry: _Storage) -> None:
        phase = self._now()
        entry.freed_in = self._segment
        self._log.append((entry, False, phase))

    def _count(self, operator: _Operator, args: Any, kwargs: Any, out: Any) -> None:
        work = self._work[self._last_phase]
        work.operators += 1
        if operator.flops is not None:
            work.flops += operator.flops(*args, **kwargs, out_val=out)
        for tensor in tensors_in((args, tuple(kwargs.values()), out)):
            work.bytes += tensor.nbytes

    # ------------------------------------------------------------------ when and where

    def _now(self) -> Phase:
        """The phase, and a new segment whenever it changes."""
        if self._updating:
            phase = self._update_phase
        elif self._forced is not None:
            phase = self._forced
        elif torch._C._current_autograd_node() is None:
            phase = Phase.FORWARD
        elif torch.is_grad_enabled() or (self._stack and self._stack[-1][1]):
            # Backward itself wants no gradients; what is run again in it does, but for the inside of a custom function.
            phase = Phase.RECOMPUTE
        else:
            phase = Phase.BACKWARD
        if phase is not self._last_phase:
            self._last_phase = phase
            self._segment += 1
        return phase

    def _here(self) -> str:
        """The path of the module at work."""
        node = torch._C._current_autograd_node()
        if node is None or (self._stack and self._stack[-1][1]):
            return self._stack[-1][0] if self._stack else ""
        variable = getattr(node, "variable", None)
        if variable is not None:
            return self._parameters.get(variable, "").rpartition(".")[0]
        return self._sequence_paths[bisect.bisect_right(self._sequence_marks, node._sequence_nr()) - 1]

    def _note_sequence(self) -> None:
        self._sequence_marks.append(torch._C._autograd._get_sequence_nr())
        self._sequence_paths.append(self._stack[-1][0] if self._stack else "")

    def _entering(self, module: nn.Module, _: Any) -> None:
        path = self._paths.get(module)
        if path is not None:
            self._stack.append((path, torch._C._current_autograd_node() is not None))
            self._note_sequence()

    def _leaving(self, module: nn.Module, _: Any, __: Any) -> None:
        if module in self._paths and self._stack:
            self._stack.pop()
            self._note_sequence()

    def _gradient_is_there(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._updated.add(self._parameters.get(parameter, ""))
            self.tag(parameter.grad, Kind.GRADIENT)

    def _before_update(self, optimizer: torch.optim.Optimizer, _: Any, __: Any) -> None:
        self._updating += 1
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._gradient_is_there(parameter)

    def _after_update(self, optimizer: torch.optim.Optimizer, _: Any, __: Any) -> None:
        # Of the weights that this step updated: it may be one of many.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                path = self._parameters.get(parameter, "").rpartition(".")[0]
                for value in optimizer.state.get(parameter, {}).values():
                    if isinstance(value, Tensor):
                        # Tracked, not only tagged: torch.tensor(0.0), a step count, is made below dispatch.
                        self.track(value, Kind.OPTIMIZER_STATE, path)
        self._updating -= 1

    def __enter__(self) -> Any:
        self._hooks += [
            register_module_forward_pre_hook(self._entering),
            # Also when forward raises: recomputation stops early by an exception once it has what it needs.
            register_module_forward_hook(self._leaving, always_call=True),
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
        ]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    # ------------------------------------------------------------------ the result

    def trace(self) -> Trace:
        """What was recorded so far."""
        kinds = {entry.number: self._kind_of(entry) for entry, born, _ in self._log if born}
        events = tuple(
            Event(
                storage=entry.number,
                bytes=entry.bytes if born else -entry.bytes,
                kind=kinds[entry.number],
                phase=phase,
                operator=entry.operator if born else "free",
                module=entry.module,
                place=entry.place,
            )
            for entry, born, phase in self._log
            if entry.bytes
        )
        work = {phase: work for phase, work in self._work.items() if work.operators}
        return Trace(events, work, tuple(self.assumed), frozenset(self._updated - {""}), self._positions_without_empty())

    def _positions_without_empty(self) -> tuple[tuple[str, int], ...]:
        """The marks, counted in events of the trace, which leaves storages of zero bytes out."""
        return tuple((name, sum(entry.bytes > 0 for entry, _, _ in self._log[:position])) for name, position in self._marks)

    def _kind_of(self, entry: _Storage) -> Kind:
        """Tags first, then what the shape says, then how long the storage lived (the precedence of Kind)."""
        if entry.kind is not None:
            return entry.kind
        if entry.last_dim == self._vocabulary:
            return Kind.LOGITS
        outlives = entry.freed_in is None or entry.freed_in != entry.segment
        if outlives and (entry.phase is Phase.FORWARD or entry.phase is Phase.RECOMPUTE):
            return Kind.SAVED_ACTIVATION
        return Kind.TEMPORARY


def _short_name(func: Any) -> str:
    """``aten.add.Tensor`` as ``add``, ``bitsandbytes.gemm.default`` as ``bitsandbytes.gemm``."""
    namespace, _, name = func._overloadpacket._qualified_op_name.partition("::")
    return str(name) if namespace == "aten" else f"{namespace}.{name}"
