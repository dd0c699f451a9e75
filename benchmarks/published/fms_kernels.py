"""The fused operators of fms-acceleration: their real Python code on data-less tensors, with launches that do nothing.

``fms_acceleration_foak`` replaces parts of a model by triton kernels: norms, rotary embeddings, the loss, and projections with
adapters on packed weights. What Python allocates around a launch is a fact of that package, so the package itself runs here, with a
stand-in for triton. Its own rules say what is replaced in which model (get_mp_rules in models/*.py): in a GPT-BigCode the loss
alone. Its patcher changes modules of transformers for the whole process; here the same changes go into one model.

Which rules are active says framework_plugin_fast_kernels.py, from the files in sample-configurations of the framework. Those for
packed weights misspell the setting of the norms (``fast_rsm_layernorm``), and so leave them to the default, which changed with 0.4.0.
The published peaks are those with fused norms.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from published.fms import framework
from published.record import Record
from published.run import NotExpressible

if TYPE_CHECKING:
    from torch import nn

_PACKAGE = "fms_acceleration_foak"
# Endings of the rules' names, by what the configuration asks for (FILTER_MAP).
_LORA, _NORM, _ROPE = ("qkvo", "mlp"), ("rms",), ("rope",)
_LOSS, _LINEAR_LOSS = ("cross-ent", "custom-loss"), ("fused-lce",)


def apply(model: nn.Module, record: Record) -> nn.Module:
    """Replace what the framework replaces in the model of a record. In place; returns the model.

    Raises:
        NotExpressible: the framework has no rules for models of this family.
    """
    endings = active(record)
    base = "auto_gptq" if "gptq" in framework(record) else "bitsandbytes"
    names: dict[str, Any] = {}
    for rule in _rules(model, base):
        if not rule.rule_id.endswith(endings):
            continue
        if rule.import_and_maybe_reload is not None:
            path, substitute, _ = rule.import_and_maybe_reload
            names[path.rpartition(".")[2]] = substitute
        else:
            _replace_forwards_(model, rule)
    _replace_names_(model, names)
    return model


def active(record: Record) -> tuple[str, ...]:
    """The endings of the rules that the record's configuration activates."""
    loss = _LINEAR_LOSS if "liger" in framework(record) else _LOSS
    # Projections are fused on packed weights alone.
    return (*(_LORA if record.method == "qlora" else ()), *_NORM, *_ROPE, *loss)


# ---------------------------------------------------------------------- rules


def _rules(model: Any, base: str) -> list[Any]:
    """The package's rules for the family of a model."""
    kind = model.config.model_type
    with stand_ins(_PACKAGE, "fms_acceleration"):
        if importlib.util.find_spec(f"{_PACKAGE}.models.{kind}") is None:
            raise NotExpressible(f"fms-acceleration has no fused operators for models of the kind {kind!r}")
        module = importlib.import_module(f"{_PACKAGE}.models.{kind}")
    lead_to_dataless_(_PACKAGE)
    arguments = (base, model.config)[: len(inspect.signature(module.get_mp_rules).parameters)]
    rules: list[Any] = module.get_mp_rules(*arguments)
    return rules


def _replace_forwards_(model: nn.Module, rule: Any) -> None:
    """What ModelPatcher._patch_forwards does with one rule."""
    for path, module in list(model.named_modules()):
        if rule.trigger is None or not rule.trigger.is_triggered(module, path.rpartition(".")[2]):
            continue
        built = rule.forward_builder(module) if rule.forward_builder is not None else rule.forward
        if isinstance(built, list):
            for trigger, forward in built:
                part = getattr(module, trigger.module_name)
                if trigger.is_triggered(part, trigger.module_name):
                    part.forward = MethodType(forward, part)
        elif built is not None:
            # A rule without a forward has done its work when its trigger was asked: it sets the model's kind of loss.
            module.forward = MethodType(built, module)


def _replace_names_(model: Any, names: dict[str, Any]) -> None:
    """Let the forwards of the model's family find other functions and classes by these names."""
    family = type(model.get_base_model() if hasattr(model, "get_base_model") else model).__module__
    for module in model.modules():
        forward = type(module).forward
        if "forward" in vars(module) or type(module).__module__ != family or not isinstance(forward, FunctionType):
            continue
        used = {name: substitute for name, substitute in names.items() if name in forward.__code__.co_names}
        if used:
            known = {**forward.__globals__, **used}
            led = FunctionType(forward.__code__, known, forward.__name__, forward.__defaults__, forward.__closure__)
            led.__kwdefaults__ = forward.__kwdefaults__
            module.forward = MethodType(led, module)


# ---------------------------------------------------------------------- the package without triton and without a card


@contextmanager
def stand_ins(*packages: str) -> Iterator[None]:
    """Import modules of these packages without running the packages' own first modules, and without triton's kernels.

    The first modules register plugins, and import what these need.
    """
    triton = _triton()
    temporary: dict[str, ModuleType] = {
        "triton": triton,
        "triton.language": triton.language,
        "bitsandbytes": _bitsandbytes(),
        "pandas": ModuleType("pandas"),
    }
    before = {name: sys.modules.get(name) for name in temporary}
    sys.modules.update(temporary)
    try:
        for package in packages:
            _hollow(package)
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def _hollow(package: str) -> None:
    """Put a package without contents in its place, in which its modules are found."""
    if package in sys.modules:
        return
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError(f"the package {package} is not installed: add it to the environment of this record.")
    hollow = ModuleType(package)
    hollow.__path__ = list(spec.submodule_search_locations)
    hollow.__spec__ = spec
    sys.modules[package] = hollow


class _Kernel:
    """What triton makes of a function: launching it does nothing."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: None


class _Language(ModuleType):
    constexpr = int

    def __getattr__(self, name: str) -> Any:
        return None


def _triton() -> Any:
    triton: Any = ModuleType("triton")
    kernel = _Kernel()
    triton.jit = lambda function: kernel
    triton.autotune = triton.heuristics = lambda *args, **kwargs: lambda function: kernel
    triton.Config = lambda *args, **kwargs: None
    triton.cdiv = lambda of, by: -(-of // by)
    triton.next_power_of_2 = lambda number: 1 << (number - 1).bit_length()
    triton.language = _Language("triton.language")
    return triton


def _bitsandbytes() -> Any:
    """Functions of its compiled library that fill tensors which are there."""

    class Compiled:
        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *args: None

    library: Any = ModuleType("bitsandbytes")
    library.functional = SimpleNamespace(get_ptr=lambda tensor: None, lib=Compiled())
    return library


class _Dataless:
    """The module torch for code that asks for a card by name."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules["torch"], name)

    def empty(self, *size: Any, device: Any = None, **settings: Any) -> Any:
        """A tensor without data."""
        return sys.modules["torch"].empty(*size, device="meta", **settings)

    def get_autocast_gpu_dtype(self) -> Any:
        """The type of the autocast in force, which a simulation keeps elsewhere."""
        return sys.modules["torch"].get_autocast_dtype("cuda")


def lead_to_dataless_(package: str) -> None:
    """Let the loaded modules of a package make their tensors without data, and take those of a GPTQ layer where they are."""
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{package}.") and vars(module).get("torch") is sys.modules["torch"]:
            module.torch = _Dataless()  # type: ignore[attr-defined]
            if "extract_gptq_state" in vars(module):
                # The package's own sends them to the card once more, which copies nothing.
                module.extract_gptq_state = lambda layer: layer  # type: ignore[attr-defined]
