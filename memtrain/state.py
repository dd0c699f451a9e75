"""What a run is between two steps, as tensors and plain data, and putting it back so that the run goes on as if undisturbed.

The batches, the learning rate and the plan of a step follow from its number and the job, so what has to be written is what
training changes: the weights that train and the buffers that a state_dict holds, the optimizer's state, the scale of the loss,
and the generators of random numbers. Frozen weights come from where they came from at first; a digest tells if they differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memtrain import generators
from memtrain.generators import positions, set_positions
from memtrain.place import to_host
from memtrain.run import Run

# Of a frozen weight so many values from its beginning and its end go into the digest.
_EDGE = 64


class OtherRun(ValueError):
    """What was written belongs to another run; the message says what differs."""


@dataclass(frozen=True)
class RunState:
    """What a run is between two steps.

    Attributes:
        groups: tensors by name, in the groups "model", "optimizer" and "random".
        facts: plain data, as JSON takes it.
    """

    groups: Mapping[str, Mapping[str, Tensor]]
    facts: Mapping[str, Any]


def state_of(run: Run) -> RunState:
    """The state of a run; its tensors are the run's own and change with the next step."""
    tensors, optimizer = _optimizer_state(run)
    random, facts = positions()
    return RunState(
        groups={"model": dict(_changing(run.model)), "optimizer": tensors, "random": random},
        facts={"optimizer": optimizer, "scaler": run.scaler.state_dict(), "frozen": _digest(run.model), **facts},
    )


@torch.no_grad()
def restore_(
    run: Run, groups: Mapping[str, Iterable[tuple[str, Tensor]]], facts: Mapping[str, Any], *, state_on_host: bool = False
) -> None:
    """Put a state into a run that has been prepared from the same job. In place.

    Args:
        groups: tensors on the host by name, each group read once.
        facts: those that :func:`state_of` gave.
        state_on_host: whether the plan keeps the optimizer's state in the host's memory.

    Raises:
        OtherRun: the model's tensors are others, its frozen weights have other values, or the optimizer's state another form;
            the run is of no use then.
    """
    if facts["frozen"] != _digest(run.model):
        raise OtherRun("the frozen weights are not those that were trained beside: give the model that the run began with.")
    _copy_(dict(_changing(run.model)), groups["model"])
    _restore_optimizer_(run, facts["optimizer"], groups["optimizer"], state_on_host)
    run.scaler.load_state_dict(dict(facts["scaler"]))
    set_positions(dict(groups["random"]), facts)


def persistent_buffers(model: nn.Module) -> list[Tensor]:
    """The buffers that a state_dict holds: those that a forward may change, such as running statistics."""
    return [tensor for module in model.modules() for tensor in _persistent(module).values()]


@torch.no_grad()
def remember(run: Run, buffers: Iterable[Tensor]) -> Callable[[], None]:
    """What undoes a step that was broken off before it changed a weight: in random state, buffers, loss scale and gradients.

    Args:
        buffers: are copied to the host, as :func:`persistent_buffers` finds them once for all steps.
    """
    generators_back = generators.remember()
    copies = [(tensor, to_host(tensor)) for tensor in buffers]
    scale = run.scaler.state_dict()

    @torch.no_grad()
    def put_back() -> None:
        generators_back()
        for tensor, before in copies:
            tensor.copy_(before)
        run.scaler.load_state_dict(scale)
        run.optimizer.zero_grad(set_to_none=True)

    return put_back


def carry_over_(before: Run, make: Callable[[], Run], *, same_place: bool, state_on_host: bool) -> Run:
    """Release a run and go on with the one that ``make`` makes of its model; optimizer state and random state are its own.

    Args:
        same_place: whether the state stays where it is and in the form that it has; else it is moved, tensor by tensor.
        state_on_host: whether the new run keeps the state in the host's memory.
    """
    kept, state, scale = state_of(before), before.optimizer.state, before.scaler.state_dict()
    generators_back = generators.remember()
    before.release()
    after = make()
    if same_place:
        after.optimizer.state.update(state)
        after.scaler.load_state_dict(scale)
        generators_back()
    else:
        groups = {group: tensors.items() for group, tensors in kept.groups.items()}
        restore_(after, groups, kept.facts, state_on_host=state_on_host)
    return after


# ---------------------------------------------------------------------- model


def _changing(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Weights that train and persistent buffers, each once."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        weights = {name: one for name, one in module._parameters.items() if one is not None and one.requires_grad}
        for name, tensor in (*weights.items(), *_persistent(module).items()):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{prefix}.{name}" if prefix else name, tensor


def _persistent(module: nn.Module) -> dict[str, Tensor]:
    """A module's own buffers that a state_dict holds."""
    kept = {name: one for name, one in module._buffers.items() if name not in module._non_persistent_buffers_set}
    return {name: one for name, one in kept.items() if one is not None}


def _digest(model: nn.Module) -> str:
    """Of names, shapes and the first and last values of the weights that do not train."""
    digest = hashlib.sha256()
    for path, weight in model.named_parameters():
        if not weight.requires_grad:
            values = weight.detach().reshape(-1)
            digest.update(f"{path} {tuple(weight.shape)} {weight.dtype}".encode())
            # One after the other: side by side they would take memory of the device.
            for edge in (values[:_EDGE], values[-_EDGE:]):
                digest.update(edge.cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _copy_(own: Mapping[str, Tensor], written: Iterable[tuple[str, Tensor]]) -> None:
    missing = set(own)
    for name, tensor in written:
        target = own.get(name)
        if target is None or target.shape != tensor.shape or target.dtype != tensor.dtype:
            here = "no such tensor is here" if target is None else f"{tuple(target.shape)} {target.dtype} is here"
            raise OtherRun(f"{name} was written as {tuple(tensor.shape)} {tensor.dtype}, and {here}: give the same model.")
        target.copy_(tensor)
        missing.discard(name)
    if missing:
        raise OtherRun(f"{min(missing)} is here and was not written: give the same model.")


# ---------------------------------------------------------------------- optimizer


def _optimizer_state(run: Run) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of the optimizer's state, each once, by the path of the weight and their own name; and what is no tensor."""
    tensors: dict[str, Tensor] = {}
    by_identity: dict[int, str] = {}
    facts: dict[str, Any] = {"kind": _kind(run.optimizer), "values": {}, "names": [], "same": {}, "on_host": []}
    for path, parameter in run.model.named_parameters():
        for own, value in run.optimizer.state.get(parameter, {}).items():
            name = f"{path}/{own}"
            if not isinstance(value, Tensor):
                facts["values"].setdefault(path, {})[own] = value
                continue
            facts["names"].append(name)
            # The tables of 8-bit state are one tensor for all weights.
            first = by_identity.setdefault(id(value), name)
            if first != name:
                facts["same"][name] = first
                continue
            tensors[name] = value
            if value.device.type == "cpu" and parameter.device.type != "cpu":
                facts["on_host"].append(name)
    return tensors, facts


def _kind(optimizer: torch.optim.Optimizer) -> str:
    """Which library's rule it is and in how many bits, which decide the form of its state."""
    bits = getattr(getattr(optimizer, "args", None), "optim_bits", None)
    return f"{type(optimizer).__module__.partition('.')[0]} {type(optimizer).__name__}" + (f" in {bits} bits" if bits else "")


def _restore_optimizer_(run: Run, facts: Mapping[str, Any], written: Iterable[tuple[str, Tensor]], on_host: bool) -> None:
    kind = _kind(run.optimizer)
    if facts["kind"] != kind:
        raise OtherRun(
            f"the optimizer's state was written by {facts['kind']}, and this plan makes {kind}: resume with the optimizer and the "
            f"optimizer_state that it was written with."
        )
    weights = dict(run.model.named_parameters())
    made: dict[str, Tensor] = {}
    state: dict[Tensor, dict[str, Any]] = {weights[path]: dict(values) for path, values in facts["values"].items()}
    for name, tensor in written:
        path, _, own = name.rpartition("/")
        if path not in weights:
            raise OtherRun(f"state was written of {path}, and the model has no such weight: give the same model.")
        made[name] = _as_made(run.optimizer, weights[path], own, tensor, name in facts["on_host"] or on_host)
    for name in facts["names"]:
        path, _, own = name.rpartition("/")
        state.setdefault(weights[path], {})[own] = made[facts["same"].get(name, name)]
    run.optimizer.state.clear()
    run.optimizer.state.update(state)


def _as_made(optimizer: Any, parameter: Tensor, own: str, tensor: Tensor, on_host: bool) -> Tensor:
    """A tensor of state where the optimizer's first step would have put it."""
    if own.startswith("state") and hasattr(optimizer, "get_state_buffer"):
        # bitsandbytes', which knows what it pages.
        found: Tensor = optimizer.get_state_buffer(parameter, dtype=tensor.dtype)
        return found.copy_(tensor.view_as(found))
    if tensor.shape == parameter.shape:
        # Fused rules walk through a weight and its state side by side in memory, whatever the order of the dimensions.
        tensor = torch.empty_like(parameter, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return to_host(tensor) if on_host else tensor.to(parameter.device)
