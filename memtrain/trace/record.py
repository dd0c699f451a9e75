"""The recorder: every storage's birth and death while it is active, with phase, module, operator and kind.

It is a dispatch mode, so it sees each operator after autograd has decomposed it, and it follows storages by weak
references, so that a free is seen when it happens. It sees nothing that a kernel allocates and frees inside itself; the
data-less run adds that from the kernel table. The same recorder watches real tensors and data-less ones, which is how
the tests compare the two (tests/cpu/test_parity.py).
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from memtrain.trace.event import DEVICE, Event, Kind, Phase, Place, Trace, Work
from memtrain.trace.values import tensors_in


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


class Recorder(TorchDispatchMode):
    """Records what happens to memory while it is the active mode.

    Args:
        model: its parameters and buffers are weights, its submodules name the owners.
        vocabulary: width of the logits, to tell them from other activations; None where the model has none.
    """

    def __init__(self, model: nn.Module, vocabulary: int | None = None) -> None:
        super().__init__()
        self.assumed: dict[str, None] = {}
        self._vocabulary = vocabulary
        self._model = model
        self._paths = {module: path for path, module in model.named_modules()}
        self._parameters = {parameter: path for path, parameter in model.named_parameters()}
        self._live: dict[int, tuple[weakref.ref[Any], _Storage]] = {}
        self._log: list[tuple[_Storage, bool, Phase]] = []
        self._numbers = 0
        self._aliases: dict[Any, bool] = {}
        self._marks: list[tuple[str, int]] = []
        self._work = {phase: Work() for phase in Phase}
        self._forced: Phase | None = None
        self._updating = 0
        self._last_phase = Phase.LOAD
        self._segment = 0
        # The path of each module being run, and whether it was entered from within backward (then it is recomputed).
        self._stack: list[tuple[str, bool]] = []
        # Autograd numbers its nodes in the order of creation: the module on top when a number is taken owns the nodes
        # from that number on, which is how backward is traced to modules without touching the graph.
        self._sequence_marks, self._sequence_paths = [0], [""]

    # ------------------------------------------------------------------ what the caller says

    def track(self, tensor: Tensor, kind: Kind | None = None, path: str | None = None) -> None:
        """Count a tensor that was made out of sight, unless it is known."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._live:
            self._born(tensor, storage, operator="given", module=self._here() if path is None else path)
        if kind is not None:
            self.tag(tensor, kind)

    def tag(self, tensor: Tensor, kind: Kind) -> None:
        """Say what a tracked storage holds; the kind of higher precedence stays."""
        entry = self._live.get(tensor.untyped_storage()._cdata)
        if entry is not None:
            storage = entry[1]
            order = list(Kind)
            if storage.kind is None or order.index(kind) < order.index(storage.kind):
                storage.kind = kind

    def track_weights(self) -> None:
        """Count the model's parameters and buffers."""
        for path, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
            self.track(tensor, Kind.WEIGHT, path.rpartition(".")[0])

    def mark(self, name: str) -> None:
        """Begin a named section."""
        self._marks.append((name, len(self._log)))

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Everything inside belongs to ``phase``."""
        before, self._forced = self._forced, phase
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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = self.execute(func, args, kwargs or {})
        aliases = self._aliases.get(func)
        if aliases is None:
            returns = func._schema.returns
            aliases = self._aliases[func] = bool(returns) and all(one.alias_info is not None for one in returns)
        if not aliases:
            for tensor in tensors_in(out):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._live:
                    self._born(tensor, storage, _short_name(func), self._here())
            self._workspace(self.scratch(func, args, kwargs or {}), _short_name(func))
            self._count(func, args, kwargs or {}, out)
        return out

    def execute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run one operator; the data-less run replaces this."""
        return func(*args, **kwargs)

    def scratch(self, func: Any, args: Any, kwargs: Any) -> int:
        """Bytes that the kernel allocates and frees inside itself; none are seen from outside."""
        return 0

    def _workspace(self, size: int, operator: str) -> None:
        if size:
            storage = self._new(size, operator, self._here(), DEVICE, last_dim=0)
            storage.kind = Kind.WORKSPACE
            self._died(storage)

    def _born(self, tensor: Tensor, storage: Any, operator: str, module: str) -> None:
        last_dim = tensor.shape[-1] if tensor.dim() > 1 else 0
        entry = self._new(storage.nbytes(), operator, module, DEVICE, last_dim)
        key = storage._cdata

        def died(_: Any) -> None:
            del self._live[key]
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

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        work = self._work[self._last_phase]
        work.operators += 1
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            work.flops += formula(*args, **kwargs, out_val=out)
        for tensor in tensors_in((*args, *kwargs.values(), *(out if isinstance(out, tuple | list) else (out,)))):
            work.bytes += tensor.numel() * tensor.element_size()

    # ------------------------------------------------------------------ when and where

    def _now(self) -> Phase:
        """The phase, and a new segment whenever it changes."""
        if self._updating:
            phase = Phase.UPDATE
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

    def _before_update(self, optimizer: torch.optim.Optimizer, _: Any, __: Any) -> None:
        self._updating += 1
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.tag(parameter.grad, Kind.GRADIENT)

    def _after_update(self, optimizer: torch.optim.Optimizer, _: Any, __: Any) -> None:
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    # Tracked, not only tagged: torch.tensor(0.0), a step count, is made below dispatch.
                    self.track(value, Kind.OPTIMIZER_STATE)
        self._updating -= 1

    def __enter__(self) -> Any:
        self._hooks = [
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

    # ------------------------------------------------------------------ the result

    def trace(self) -> Trace:
        """What was recorded so far."""
        events = tuple(
            Event(
                storage=entry.number,
                bytes=entry.bytes if born else -entry.bytes,
                kind=self._kind_of(entry),
                phase=phase,
                operator=entry.operator if born else "free",
                module=entry.module,
                place=entry.place,
            )
            for entry, born, phase in self._log
            if entry.bytes
        )
        work = {phase: work for phase, work in self._work.items() if work.operators}
        return Trace(events, work, tuple(self.assumed), self._positions_without_empty())

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
        if entry.phase in (Phase.FORWARD, Phase.RECOMPUTE) and outlives:
            return Kind.SAVED_ACTIVATION
        return Kind.TEMPORARY


def _short_name(func: Any) -> str:
    """``aten.add.Tensor`` as ``add``, ``bitsandbytes.gemm.default`` as ``bitsandbytes.gemm``."""
    namespace, _, name = func._overloadpacket._qualified_op_name.partition("::")
    return str(name) if namespace == "aten" else f"{namespace}.{name}"
