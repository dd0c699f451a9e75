"""Known values on data-less tensors: what is known stays known, what is not is never made up without saying so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memtrain.trace import values as values_module
from memtrain.trace.values import Values, lift

META = torch.device("meta")


class Run:
    """Runs functions on data-less tensors and tells what is known of the results and what was assumed."""

    def __init__(self) -> None:
        self.assumed: list[str] = []
        self.values = Values(self.assumed.append)

    def __call__(self, function: Callable[[], Any]) -> Any:
        """What is known of the result: a list, None where it is unknown; what is no tensor is itself."""
        with self.values.mode():
            out = function()
        if isinstance(out, tuple | list):
            return [self.known(part) for part in out]
        return self.known(out)

    def known(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        known = self.values.value(value)
        return None if known is None else known.tolist()


@pytest.fixture
def run() -> Run:
    return Run()


def known(*numbers: Any) -> Tensor:
    return lift(torch.tensor(numbers))


def unknown(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


# ---------------------------------------------------------------------------------------------- what is known


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda: torch.arange(4, device=META), [0, 1, 2, 3]),
        (lambda: torch.arange(0, 1, 0.25, device=META), [0.0, 0.25, 0.5, 0.75]),
        (lambda: torch.full((2, 2), 3.0, device=META), [[3.0, 3.0], [3.0, 3.0]]),
        (lambda: torch.ones(2, 3, dtype=torch.long, device=META).cumsum(-1), [[1, 2, 3], [1, 2, 3]]),
        (lambda: torch.ones(2, 2, dtype=torch.bool, device=META).tril(), [[True, False], [True, True]]),
        (
            lambda: torch.arange(3, device=META)[:, None] >= torch.arange(2, device=META),
            [[True, False], [True, True], [True, True]],
        ),
        (lambda: torch.where(known(1, 5, 2) > 1, known(7, 8, 9), 0), [0, 8, 9]),
        (lambda: known(5, 6, 7)[known(2, 0)], [7, 5]),
        (lambda: torch.cat([known(1), torch.zeros(2, dtype=torch.long, device=META)]), [1, 0, 0]),
        (lambda: known(1, 2, 3, 4).view(2, 2).t(), [[1, 3], [2, 4]]),
        (lambda: known(1).expand(3), [1, 1, 1]),
        (lambda: known(1, 2).to(torch.float32), [1.0, 2.0]),
        (lambda: known(3, 1, 2).sort(), [[1, 2, 3], [1, 2, 0]]),
        (lambda: torch.arange(5, device=META).split(2), [[0, 1], [2, 3], [4]]),
        (lambda: torch._foreach_add([known(1), known(2)], 1), [[2], [3]]),
        (lambda: torch.tensor([1, 2]).to(META), [1, 2]),
        (lambda: torch.tensor([10, 20]) + known(1, 2), [11, 22]),
        (lambda: torch.add(known(1), known(2), out=known(9)), [3]),
        # Shapes and constants alone decide these, whatever the tensor holds.
        (lambda: torch.zeros_like(unknown(2)), [0, 0]),
        (lambda: unknown(2).new_full((3,), 4), [4, 4, 4]),
        (lambda: torch.ones_like(unknown(2), dtype=torch.bool), [True, True]),
    ],
)
def test_what_is_made_from_constants_and_known_values_is_known(run: Run, function: Callable[[], Any], expected: Any) -> None:
    assert run(function) == expected
    assert run.assumed == []


@pytest.mark.parametrize(
    "function",
    [
        lambda: unknown(2) + known(1, 2),
        lambda: torch.where(unknown(2) > 0, known(1, 2), 0),
        lambda: torch.cat([known(1), unknown(1)]),
        lambda: known(5, 6, 7)[unknown(2)],
        lambda: torch.empty(3, device=META),
        lambda: torch.empty_like(known(1, 2)),
        lambda: known(1, 2).new_empty(2),
        lambda: torch.empty(3, device=META).fill_(2),
        lambda: torch.zeros_like(unknown(2, dtype=torch.float32)),
    ],
)
def test_what_depends_on_an_unknown_value_is_unknown(run: Run, function: Callable[[], Any]) -> None:
    assert run(function) is None
    assert run.assumed == []


@pytest.mark.parametrize(
    "function",
    [
        lambda: torch.rand(3, device=META),
        lambda: torch.randint(0, 5, (3,), device=META),
        lambda: torch.randperm(4, device=META),
        lambda: torch.bernoulli(known(0.5, 0.5)),
        lambda: torch.multinomial(known(1.0, 1.0), 2),
        lambda: torch.randint_like(known(1, 2), 5),
        lambda: nn.functional.dropout(known(1.0, 1.0)),
        lambda: known(1.0, 1.0).normal_(),
        lambda: known(1.0, 1.0).uniform_(),
        lambda: known(1, 2).random_(),
        lambda: known(1.0, 1.0).bernoulli_(),
        lambda: known(1.0, 1.0).exponential_(),
    ],
)
def test_what_is_drawn_at_random_is_never_known_and_draws_nothing(run: Run, function: Callable[[], Any]) -> None:
    state = torch.get_rng_state()
    assert run(function) is None
    assert torch.equal(torch.get_rng_state(), state)


def test_real_tensors_among_themselves_stay_real(run: Run) -> None:
    with run.values.mode():
        total = torch.arange(3) + 1
    assert total.device.type == "cpu"
    assert total.tolist() == [1, 2, 3]


def test_a_result_has_the_shape_type_and_strides_of_the_operator(run: Run) -> None:
    with run.values.mode():
        out = known(1, 2, 3, 4).view(2, 2).t().to(torch.float64)
    assert (out.device, out.dtype, out.shape, out.stride()) == (META, torch.float64, (2, 2), (1, 2))


# ---------------------------------------------------------------------------------------------- in place


def test_an_update_in_place_by_known_values_is_followed_through_views(run: Run) -> None:
    whole = known(1, 2, 3, 4)

    def update() -> list[Tensor]:
        part = whole[1:3]
        part.add_(10)
        whole[3] = 9
        whole[known(1, 0, 0, 0) > 0] = 0
        return [whole, part]

    assert run(update) == [[0, 12, 13, 9], [12, 13]]


@pytest.mark.parametrize(
    "overwrite",
    [
        lambda tensor: tensor.copy_(unknown(4)),
        lambda tensor: tensor.add_(unknown(4)),
        lambda tensor: tensor.view(2, 2)[0].copy_(unknown(2)),
        lambda tensor: tensor.detach().copy_(unknown(4)),
        lambda tensor: tensor.data.copy_(unknown(4)),
        lambda tensor: tensor.random_(),
        lambda tensor: tensor.masked_fill_(unknown(4) > 0, 0),
        lambda tensor: tensor.index_put_((unknown(2),), known(1, 2)),
        lambda tensor: torch.add(unknown(4), 1, out=tensor),
        lambda tensor: torch._foreach_add_([tensor], [unknown(4)]),
    ],
)
def test_what_is_overwritten_by_an_unknown_value_is_forgotten_in_every_view(
    run: Run, overwrite: Callable[[Tensor], Any]
) -> None:
    whole, other = known(1, 2, 3, 4), known(5)

    def update() -> list[Tensor]:
        before = whole[2:]
        overwrite(whole)
        return [whole, before, whole[:2], whole + 1, other]

    assert run(update) == [None, None, None, None, [5]]


def test_an_overwritten_tensor_that_is_filled_again_stays_unknown(run: Run) -> None:
    def fill() -> Tensor:
        tensor = known(1, 2)
        tensor.copy_(unknown(2))
        return tensor.zero_()

    assert run(fill) is None


def test_an_operator_in_place_returns_its_tensor(run: Run) -> None:
    tensor = known(1, 2)
    with run.values.mode():
        assert tensor.add_(unknown(2)) is tensor


def test_the_address_of_a_forgotten_storage_serves_another_tensor(run: Run) -> None:
    addresses = set()
    with run.values.mode():
        for number in range(100):
            tensor = known(number)
            assert run.known(tensor) == [number]
            tensor.add_(unknown(1))
            tensor.add_(unknown(1))
            assert run.known(tensor) is None
            addresses.add(tensor.untyped_storage()._cdata)
            del tensor
    assert len(addresses) < 100, "no address was used again, so this has tested nothing"
    assert run.values._overwritten == {}


# ---------------------------------------------------------------------------------------------- questions


def test_the_answer_to_a_question_of_known_values_is_theirs(run: Run) -> None:
    def ask() -> list[Any]:
        tensor = known(1, 5, 2)
        return [tensor.max().item(), int(tensor[2]), bool((tensor > 4).any()), bool((tensor > 4).all()), tensor.tolist()]

    assert run(ask) == [5, 2, True, False, [1, 5, 2]]
    assert run.assumed == []


@pytest.mark.parametrize(
    ("dtype", "answer"), [(torch.bool, False), (torch.int64, 0), (torch.int32, 0), (torch.float32, 0.0), (torch.bfloat16, 0.0)]
)
def test_a_question_of_an_unknown_value_is_answered_by_a_stated_assumption(run: Run, dtype: torch.dtype, answer: Any) -> None:
    got = run(lambda: unknown(1, dtype=dtype).item())
    assert got == answer
    assert type(got) is type(answer)
    name = str(dtype).removeprefix("torch.")
    assert run.assumed == [f"a {name} value that only data can tell was taken for {answer}"]


@pytest.mark.parametrize(("other", "same"), [((1, 2), True), ((1, 3), False)])
def test_equality_of_known_tensors_is_known(run: Run, other: tuple[int, int], same: bool) -> None:
    assert run(lambda: torch.equal(known(1, 2), known(*other))) is same
    assert run.assumed == []


def test_a_copy_to_the_host_is_real_and_known_where_the_value_is(run: Run) -> None:
    with run.values.mode():
        copied, asked = known(1, 2).cpu(), unknown(2, 2).to("cpu", torch.float64)
    assert (copied.device.type, copied.tolist()) == ("cpu", [1, 2])
    assert run.assumed == ["a tensor of shape (2, 2) that was copied to the host was taken for zeros"]
    assert (asked.device.type, asked.dtype, asked.tolist()) == ("cpu", torch.float64, [[0.0, 0.0], [0.0, 0.0]])


def test_a_copy_on_the_host_is_not_the_value_itself(run: Run) -> None:
    tensor = known(1, 2)
    with run.values.mode():
        tensor.cpu().add_(5)
    assert run.known(tensor) == [1, 2]


# ---------------------------------------------------------------------------------------------- shapes from values


@pytest.mark.parametrize(
    ("function", "shape", "value"),
    [
        (lambda: known(5, 6, 7)[known(1, 0, 1) > 0], (2,), [5, 7]),
        (lambda: unknown(3, 4)[known(1, 0, 1) > 0], (2, 4), None),
        (lambda: torch.masked_select(unknown(3), known(1, 0, 1) > 0), (2,), None),
        (lambda: known(0, 3, 0, 4).nonzero(), (2, 1), [[1], [3]]),
        (lambda: torch.where(known(0, 3, 4) > 0)[0], (2,), [1, 2]),
        (lambda: torch.unique(known(3, 3, 1)), (2,), [1, 3]),
        (lambda: torch.arange(3, device=META).repeat_interleave(known(1, 0, 2)), (3,), [0, 2, 2]),
    ],
)
def test_a_shape_that_depends_on_known_values_is_right(run: Run, function: Any, shape: tuple[int, ...], value: Any) -> None:
    with run.values.mode():
        out = function()
    assert (out.device, tuple(out.shape), run.known(out)) == (META, shape, value)
    assert run.assumed == []


@pytest.mark.parametrize(
    ("function", "shape", "operator"),
    [
        (lambda: known(5, 6, 7)[unknown(3) > 0], (3,), "index.Tensor"),
        (lambda: unknown(3, 4)[unknown(3, 4) > 0], (12,), "index.Tensor"),
        (lambda: torch.masked_select(known(1, 2, 3), unknown(3) > 0), (3,), "masked_select.default"),
        (lambda: unknown(2, 3).nonzero(), (6, 2), "nonzero.default"),
    ],
)
def test_an_unknown_mask_selects_everything_and_that_is_said(
    run: Run, function: Any, shape: tuple[int, ...], operator: str
) -> None:
    with run.values.mode():
        out = function()
    assert (out.device, tuple(out.shape), run.known(out)) == (META, shape, None)
    assert run.assumed == [f"{operator} of unknown values was taken to select everything"]


def test_indexing_by_unknown_numbers_needs_no_assumption(run: Run) -> None:
    with run.values.mode():
        assert known(5, 6, 7)[unknown(2)].shape == (2,)
    assert run.assumed == []


def test_an_operator_without_a_data_less_form_gives_its_shapes_and_that_is_said(run: Run) -> None:
    with pytest.raises(NotImplementedError):
        torch.geqrf(torch.empty(4, 3, device=META))
    with run.values.mode():
        factors, scales = torch.geqrf(torch.empty(4, 3, device=META))
    assert (factors.device, factors.shape, scales.shape) == (META, (4, 3), (3,))
    assert run.assumed == ["geqrf.default has no data-less form and ran on zeros for its shape"]


@pytest.mark.parametrize(
    ("operator", "value"),
    [(torch.cholesky_inverse, torch.eye(2, dtype=torch.float16)), (lambda tensor: tensor.gather(0, tensor), torch.tensor([5]))],
    ids=["type", "value"],
)
def test_what_the_processor_refuses_to_compute_of_known_values_is_unknown(run: Run, operator: Any, value: Tensor) -> None:
    with pytest.raises(RuntimeError):
        operator(value)
    assert run(lambda: operator(lift(value))) is None


# ---------------------------------------------------------------------------------------------- sizes and lift


def test_values_are_kept_up_to_a_size_that_is_larger_for_whole_numbers(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values_module, "_MOST_FLOATS", 2)
    monkeypatch.setattr(values_module, "_MOST_INTEGERS", 4)
    assert run(lambda: torch.ones(2, device=META)) == [1.0, 1.0]
    assert run(lambda: torch.ones(3, device=META)) is None
    assert run(lambda: torch.arange(4, device=META)) == [0, 1, 2, 3]
    assert run(lambda: torch.arange(5, device=META)) is None
    # What is computed from kept values may grow too large as well.
    assert run(lambda: torch.cat([known(1, 2, 3), known(4)])) == [1, 2, 3, 4]
    assert run(lambda: torch.cat([known(1, 2, 3), known(4, 5)])) is None
    assert run(lambda: known(1, 2, 3).to(torch.float32)) is None
    assert run(lambda: torch.arange(5, device=META).to("meta")[:2]) is None
    assert run(lambda: torch.zeros_like(unknown(5))) is None
    assert run.known(lift(torch.ones(2))) == [1.0, 1.0]
    assert run.known(lift(torch.ones(3))) is None


@pytest.mark.parametrize(
    "function",
    [
        lambda: torch.ones(1 << 40, device=META),
        lambda: torch.ones(1 << 17).to(META),
        lambda: torch.zeros_like(unknown(1 << 40)),
    ],
)
def test_a_value_that_would_be_too_large_is_not_computed(run: Run, function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def unwanted(*_: Any) -> None:
        raise AssertionError("computed")

    monkeypatch.setattr(values_module, "_try", unwanted)
    assert run(function) is None


def test_lifting_copies_the_value_and_keeps_type_and_strides(run: Run) -> None:
    real = torch.arange(6, dtype=torch.int32).view(2, 3).t()
    lifted = lift(real)
    real.zero_()
    assert run.known(lifted) == [[0, 3], [1, 4], [2, 5]]
    assert (lifted.device, lifted.dtype, lifted.shape, lifted.stride()) == (META, torch.int32, (3, 2), (1, 3))


def test_lifting_a_tensor_that_wants_gradients_keeps_no_graph(run: Run) -> None:
    lifted = lift(torch.ones(2, requires_grad=True) * 2)
    assert run.known(lifted) == [2.0, 2.0]
    value = run.values.value(lifted)
    assert value is not None
    assert value.grad_fn is None
