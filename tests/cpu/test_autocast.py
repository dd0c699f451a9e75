"""Autocast on data-less tensors: its lists against torch's own, the mechanism against real runs on a processor."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import pytest
import torch
from test_kernels_cuda import card
from test_parity import events
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import DefaultDeviceType, checkpoint
from toys import CASES, batch

from memtrain.device import Cpu, Cuda
from memtrain.trace import autocast
from memtrain.trace.kernels import kernels_of
from memtrain.trace.record import Recorder
from memtrain.trace.simulate import DatalessRecorder

HALF = torch.bfloat16
TO_COPY = "aten._to_copy.default"
CPU = Cpu(name="cpu", threads=1, flops_per_second=1e11, bytes_per_second=1e10, operator_seconds=1e-5)

# ---------------------------------------------------------------------------------------------- the lists


@pytest.mark.parametrize(("kind", "key"), [("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")])
def test_the_lists_name_what_autocast_acts_on(kind: str, key: str) -> None:
    registered = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    # Builds with CUDA register these beside the lists: recurrent layers are refused, and no layer takes the root of a matrix.
    beside = {"_cudnn_rnn", "linalg_matrix_sqrth"}
    # Named dimensions, which torch has given up.
    named = {name.removeprefix("aten::") for name in registered if "dimname" in name.lower() or "names_" in name}
    assert set(autocast.POLICIES[kind]) == {name.removeprefix("aten::") for name in registered} - beside - named


class Casts(TorchDispatchMode):
    """The casts that run before any other operator; that one is where it ends."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.dtype, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) != TO_COPY:
            raise InterruptedError
        out = func(*args, **kwargs)
        self.seen.append((out.dtype, tuple(out.shape)))
        return out


def first_casts(operator: Any, letters: str, device: str) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """What autocast of processors casts for an operator on inputs of these types in turn, each of another shape."""
    types = itertools.cycle(letters)
    sizes = itertools.count(2)

    def tensor() -> Tensor:
        return torch.zeros(next(sizes), dtype=TYPES[next(types)], device=device)

    def made(kind: str) -> Any:
        if "Tensor" in kind:
            return [tensor(), tensor()] if kind.startswith("List") else tensor()
        plain = {"int": 1, "float": 0.5, "bool": False, "number": 1, "str": "none"}
        return [1] if kind.startswith("List") else plain.get(kind)

    schema = operator._schema
    wanted = [one for one in schema.arguments if not one.has_default_value()]
    args = [made(str(one.type)) for one in wanted if not one.kwarg_only]
    kwargs = {one.name: made(str(one.type)) for one in wanted if one.kwarg_only}
    # Kernels never run, and some operators refuse such inputs; what they cast comes before.
    with torch.no_grad(), torch.autocast("cpu", dtype=HALF), Casts() as casts, suppress(Exception):
        operator(*args, **kwargs)
    return casts.seen


@pytest.mark.parametrize("name", autocast.POLICIES["cpu"])
def test_an_operator_casts_as_it_does_on_a_processor(name: str) -> None:
    (operator,) = autocast.operators_of({name: autocast.lower_precision})
    real = [first_casts(operator, letters, "cpu") for letters in ("f", "h", "fh", "hf", "d")]
    with kernels_of(CPU):
        emulated = [first_casts(operator, letters, "meta") for letters in ("f", "h", "fh", "hf", "d")]
    assert emulated == real
    assert any(real), f"nothing was cast for {name}, so nothing was compared"


# Per operator of each list, shapes and types of its inputs; "h" is bfloat16, "f" float32, "d" float64.
LISTED: dict[str, tuple[Callable[..., object], list[tuple[tuple[int, ...], str]]]] = {
    "linear casts its bias, weight and input": (F.linear, [((2, 8), "f"), ((4, 8), "f"), ((4,), "f")]),
    "matmul leaves what is cast": (torch.matmul, [((2, 3, 8), "h"), ((8, 4), "f")]),
    "matmul leaves double precision": (torch.matmul, [((2, 3), "d"), ((3, 4), "d")]),
    "conv1d": (F.conv1d, [((2, 8, 5), "f"), ((3, 8, 2), "f")]),
    "einsum": (lambda x, y: torch.einsum("ij,kj->ik", x, y), [((2, 8), "h"), ((2, 8), "f")]),
    "softmax": (lambda x: x.softmax(-1), [((2, 8), "h")]),
    "softmax to a type that is asked for": (lambda x: x.softmax(-1, dtype=HALF), [((2, 8), "h")]),
    "cumsum": (lambda x: x.cumsum(-1), [((2, 8), "h")]),
    "sum of integers": (lambda x: x.long().sum(), [((2, 8), "f")]),
    "layer_norm": (lambda x, w: F.layer_norm(x, [8], w), [((2, 8), "h"), ((8,), "f")]),
    "pow": (lambda x: x.pow(2), [((2, 8), "h")]),
    "mse_loss": (F.mse_loss, [((2, 8), "h"), ((2, 8), "f")]),
    "cross_entropy, whose parts are called from C++": (
        lambda x: F.cross_entropy(x, torch.zeros(2, dtype=torch.long, device=x.device)),
        [((2, 8), "h")],
    ),
    "norm": (lambda x: x.norm(), [((2, 8), "h")]),
    "norm over a dimension": (lambda x: torch.norm(x, 2, -1), [((2, 8), "h")]),
    "addcmul of both widths": (torch.addcmul, [((2, 8), "h"), ((2, 8), "f"), ((2, 8), "h")]),
    "addcmul of one width": (torch.addcmul, [((2, 8), "h"), ((2, 8), "h"), ((2, 8), "h")]),
    "tensordot, and nothing inside it": (lambda x, y: torch.tensordot(x, y, 1), [((2, 3), "f"), ((3, 4), "f")]),
    "cat is in no list": (lambda x, y: torch.cat([x, y]), [((2, 8), "h"), ((2, 8), "f")]),
}
TYPES = {"h": HALF, "f": torch.float32, "d": torch.float64}


class Listing(TorchDispatchMode):
    """The operators that run, each with the types and sizes of its results."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[tuple[torch.dtype, tuple[int, ...]]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not str(func).startswith("prim."):
            results = out if isinstance(out, tuple | list) else (out,)
            self.seen.append((str(func), [(t.dtype, tuple(t.shape)) for t in results if isinstance(t, Tensor)]))
        return out


@contextmanager
def real_autocast_of_cuda() -> Iterator[None]:
    """torch's own cast lists, on tensors that only say that they are on a card; none wants gradients, which takes one."""
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", HALF)
    try:
        with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_dtype("cuda", torch.float16)
        torch.set_autocast_enabled("cuda", False)


def operators(run: Callable[..., object], inputs: list[Any]) -> list[Any]:
    with Listing() as listing:
        run(*inputs)
    return listing.seen


@pytest.mark.parametrize("name", LISTED)
def test_an_operator_of_the_lists_of_cards_casts_as_it_does_there(name: str) -> None:
    run, shapes = LISTED[name]

    def inputs(device: str) -> list[Any]:
        return [torch.empty(shape, dtype=TYPES[letter], device=device) for shape, letter in shapes]

    with real_autocast_of_cuda():
        real = operators(run, inputs("cuda"))
    with torch.no_grad(), kernels_of(card()), torch.autocast("cuda", dtype=HALF):
        emulated = operators(run, inputs("meta"))
    assert emulated == real


def dataless_llama() -> Any:
    with torch.device("meta"):
        return CASES["llama"].build().build()


def test_each_weight_of_a_layer_is_cast_once_in_a_forward() -> None:
    model = dataless_llama()
    shapes = [tuple(module.weight.shape) for module in model.modules() if isinstance(module, nn.Linear)]
    ids = torch.empty(2, 20, dtype=torch.long, device="meta")
    with kernels_of(card()), torch.autocast("cuda", dtype=HALF), DatalessRecorder(card()), Listing() as listing:
        model(input_ids=ids, use_cache=False)
    # The head's weight is that of the embedding.
    cast = [sizes for name, [(dtype, sizes), *_] in ((n, r) for n, r in listing.seen if r) if name == TO_COPY and dtype is HALF]
    assert sorted(shape for shape in cast if len(shape) == 2) == sorted(shapes)


def test_what_transformers_takes_out_of_autocast_is_out_of_it_for_data_less_tensors_too() -> None:
    from transformers.utils.generic import maybe_autocast

    def product() -> torch.dtype:
        return (torch.empty(2, 3, device="meta") @ torch.empty(3, 2, device="meta")).dtype

    with kernels_of(card()):
        with torch.autocast("cuda", dtype=HALF):
            with maybe_autocast(device_type="meta", enabled=False):
                assert product() is torch.float32
            assert product() is HALF
        with maybe_autocast(device_type="cuda", dtype=HALF):
            assert product() is HALF
        with maybe_autocast(device_type="cpu", dtype=HALF):
            assert product() is torch.float32


def test_an_unsafe_loss_is_refused_as_on_a_card() -> None:
    chances = torch.empty(2, 3, device="meta")
    with kernels_of(card()), torch.autocast("cuda", dtype=HALF), pytest.raises(RuntimeError, match="unsafe to autocast"):
        F.binary_cross_entropy(chances, chances)


# ---------------------------------------------------------------------------------------------- what torch is told


def test_torch_answers_as_on_a_card_inside_and_as_before_outside() -> None:
    def answers() -> list[Any]:
        return [
            torch.is_autocast_enabled(),
            torch.is_autocast_enabled("cuda"),
            torch.get_autocast_dtype("cuda"),
            torch.amp.is_autocast_available("meta"),
            torch.is_autocast_enabled("hpu"),
            torch.get_autocast_dtype("hpu"),
            DefaultDeviceType.get_device_type(),
        ]

    before = answers()
    with kernels_of(card()):
        assert answers()[:4] == [False, False, torch.float16, True]
        # By which recomputation takes the autocast of a forward whose tensors came by name.
        assert answers()[-1] == "cuda"
        with torch.autocast("cuda"):
            assert answers()[:4] == [True, True, torch.float16, True]
            with torch.autocast("meta", dtype=HALF):
                assert answers()[:4] == [True, True, HALF, True]
                with torch.autocast("cuda", enabled=False):
                    assert answers()[:3] == [False, False, HALF]
                with torch.autocast("cpu", dtype=HALF):
                    assert answers()[:3] == [True, True, HALF]
            assert answers()[:3] == [True, True, torch.float16]
    assert answers() == before == [False, False, torch.float16, False, False, HALF, "cpu"]


def test_everything_is_undone_when_the_inside_fails() -> None:
    from transformers.utils import generic

    code, init = generic.maybe_autocast.__code__, torch.autocast.__init__
    with kernels_of(card()):
        assert generic.maybe_autocast.__code__ is not code
    with pytest.raises(KeyError, match="stop"), kernels_of(card()), torch.autocast("cuda", dtype=HALF):
        raise KeyError("stop")
    assert generic.maybe_autocast.__code__ is code
    assert torch.autocast.__init__ is init
    assert not torch.is_autocast_enabled("hpu")
    weight = torch.empty(3, 3, device="meta")
    assert (weight @ weight).dtype is torch.float32


@pytest.mark.parametrize("device", [CPU, card()], ids=["cpu", "cuda"])
def test_tensors_with_data_are_not_cast(device: Cpu | Cuda) -> None:
    with kernels_of(device), torch.autocast(device.kind, dtype=HALF):
        assert (torch.ones(2, 2, device="meta") @ torch.ones(2, 2, device="meta")).dtype is HALF
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32


def test_autocast_of_a_processor_that_is_on_already_stays_on_for_data_less_tensors_alone() -> None:
    real, dataless = torch.ones(2, 2), torch.ones(2, 2, device="meta")
    with torch.autocast("cpu", dtype=torch.float16):
        with kernels_of(CPU):
            assert [torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled()] == [True, False]
            assert [(tensor @ tensor).dtype for tensor in (real, dataless)] == [torch.float32, torch.float16]
            with kernels_of(CPU):
                assert [(tensor @ tensor).dtype for tensor in (real, dataless)] == [torch.float32, torch.float16]
            assert [(tensor @ tensor).dtype for tensor in (real, dataless)] == [torch.float32, torch.float16]
        assert [(tensor @ tensor).dtype for tensor in (real, dataless)] == [torch.float16, torch.float32]
    assert not torch.is_autocast_enabled("cpu")


# ---------------------------------------------------------------------------------------------- against real runs


def real_and_emulated(make: Callable[[str], Callable[[str], object]]) -> tuple[list[Any], list[Any]]:
    """What a run allocates under the processor's autocast, on data and without; ``make(device)`` makes the run."""
    listed = []
    for device in ("cpu", "meta"):
        run = make(device)
        dataless = device == "meta"
        with kernels_of(CPU) if dataless else nullcontext(), DatalessRecorder(CPU) if dataless else Recorder() as recorder:
            recorder.mark("step 1")
            run(device)
        listed.append(events(recorder.trace()))
    return listed[0], listed[1]


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2_with_dropout"])
def test_a_training_step_casts_and_caches_as_a_real_one(name: str, reentrant: bool | None) -> None:
    def make(device: str) -> Callable[[str], object]:
        with torch.device(device):
            model = CASES[name].build().build().train()
        if reentrant is not None:
            model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": reentrant})
            model.enable_input_require_grads()
        for part in model.modules():
            # Dropout has another kernel under test_kernels.py; here it would only draw numbers.
            if isinstance(part, nn.Dropout):
                part.p = 0.0
        rows = {key: value.to(device) for key, value in batch(CASES[name], 2).items()}

        def step(device: str) -> None:
            for _ in range(2):
                with torch.autocast(device, dtype=HALF):
                    loss = model(**rows, use_cache=False).loss
                loss.backward()

        return step

    real, emulated = real_and_emulated(make)
    assert "_to_copy" in str(real)
    assert emulated == real


class Two(nn.Module):
    """Two layers, the first of which is used twice, so that its cast is found in the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(self.first(x)).relu())


def disabled_inside(model: Two, x: Tensor, device: str) -> Tensor:
    with torch.autocast(device, dtype=HALF):
        hidden = model.first(x)
        with torch.autocast(device, enabled=False):
            hidden = model.first(hidden.float())
        return model(hidden)


def without_gradients_first(model: Two, x: Tensor, device: str) -> Tensor:
    with torch.autocast(device, dtype=HALF):
        with torch.no_grad():
            model(x)
        return model(x)


def without_cache(model: Two, x: Tensor, device: str) -> Tensor:
    with torch.autocast(device, dtype=HALF, cache_enabled=False):
        return model(x)


def recomputed(model: Two, x: Tensor, device: str) -> Tensor:
    with torch.autocast(device, dtype=HALF):
        return checkpoint(model, x, use_reentrant=False)


def entered_twice(model: Two, x: Tensor, device: str) -> Tensor:
    with torch.autocast(device, dtype=HALF):
        first = model(x)
    with torch.autocast(device, dtype=HALF):
        return model(first)


def in_fp16_inside(model: Two, x: Tensor, device: str) -> Tensor:
    with torch.autocast(device, dtype=HALF):
        first = model.first(x)
        with torch.autocast(device, dtype=torch.float16):
            return model.second(first)


WAYS = [disabled_inside, without_gradients_first, without_cache, recomputed, entered_twice, in_fp16_inside]


@pytest.mark.parametrize(("way", "backward_inside"), list(itertools.product(WAYS, [False, True])))
def test_the_cache_keeps_and_forgets_as_the_real_one(way: Callable[..., Tensor], backward_inside: bool) -> None:
    def make(device: str) -> Callable[[str], object]:
        with torch.device(device):
            model, x = Two(), torch.zeros(4, 16, requires_grad=True)

        def run(device: str) -> None:
            with torch.autocast(device, dtype=HALF) if backward_inside else nullcontext():
                for _ in range(2):
                    way(model, x, device).float().sum().backward()

        return run

    real, emulated = real_and_emulated(make)
    assert "_to_copy" in str(real)
    assert emulated == real
