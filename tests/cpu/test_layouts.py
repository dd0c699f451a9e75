"""Results that are remembered are those that would be computed, and only where that is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from memtrain.trace.layouts import Layouts, tensors_in
from memtrain.trace.values import Values

aten = torch.ops.aten


class Counted:
    """Runs operators through Layouts and counts those that were computed."""

    def __init__(self) -> None:
        self.layouts, self.computed = Layouts(), 0

    def __call__(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        def compute() -> Any:
            self.computed += 1
            return func(*args, **kwargs)

        return self.layouts.result(func, args, kwargs, compute)


@pytest.fixture
def run() -> Counted:
    return Counted()


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def described(out: Any) -> Any:
    """Everything of a result that a run depends on; each tensor with the bytes of its storage."""
    if isinstance(out, Tensor):
        return tuple(out.shape), out.stride(), out.dtype, out.storage_offset(), out.untyped_storage().nbytes()
    return type(out), [described(one) for one in out] if isinstance(out, tuple | list) else out


# ---------------------------------------------------------------------------------------------- what is remembered


def test_a_second_call_of_the_same_arguments_computes_nothing(run: Counted) -> None:
    first = run(aten.add.Tensor, meta(2, 3), meta(3))
    second = run(aten.add.Tensor, meta(2, 3), meta(3))
    assert run.computed == 1
    assert described(first) == described(second)
    assert first.untyped_storage()._cdata != second.untyped_storage()._cdata


@pytest.mark.parametrize(
    ("func", "args", "others"),
    [
        (aten.add.Tensor, (meta(2, 3), meta(3)), (meta(2, 3), meta(1))),
        (aten.add.Tensor, (meta(2, 3), meta(3)), (meta(2, 3), meta(3, dtype=torch.float64))),
        (aten.relu.default, (meta(2, 3),), (meta(3, 2).t(),)),
        (aten.mm.default, (meta(2, 3), meta(3, 4)), (meta(2, 3), meta(3, 5))),
        (aten.sum.dim_IntList, (meta(2, 3), [0]), (meta(2, 3), [1])),
        (aten.cat.default, ([meta(2), meta(3)],), ([meta(2), meta(3), meta(3)],)),
    ],
)
def test_another_shape_type_stride_or_number_is_computed(run: Counted, func: Any, args: Any, others: Any) -> None:
    for given_args in (args, others, args, others):
        assert described(run(func, *given_args)) == described(func(*given_args))
    assert run.computed == 2


@pytest.mark.parametrize("one", [1, 1.0, True])
def test_numbers_that_are_equal_are_told_apart_by_their_type(run: Counted, one: float) -> None:
    """An integer tensor times 1 is an integer tensor, times 1.0 it is not."""
    numbers = meta(2, dtype=torch.int64)
    for number in (1, 1.0, True, one):
        expected = aten.mul.Scalar(numbers, number)
        assert described(run(aten.mul.Scalar, numbers, number)) == described(expected)
    assert run.computed == 3


def test_the_same_numbers_in_a_list_are_told_apart_by_their_type(run: Counted) -> None:
    assert run(aten.full.default, [2], 1, device="meta").dtype == torch.int64
    assert run(aten.full.default, [2], 1.0, device="meta").dtype == torch.float32
    assert run(aten.full.default, [2], True, device="meta").dtype == torch.bool
    assert run.computed == 3


def test_keyword_arguments_count(run: Counted) -> None:
    for dtype in (torch.float32, torch.float64, torch.float32):
        assert run(aten.sum.default, meta(2, 3), dtype=dtype).dtype == dtype
    assert run.computed == 2


def test_several_results_and_an_absent_one_come_back_as_they_were(run: Counted) -> None:
    x, weight = meta(2, 3), meta(3)
    statistics = meta(2, 1), meta(2, 1)
    args = (meta(2, 3), x, [3], *statistics, weight, weight, [True, False, True])
    first, second = run(aten.native_layer_norm_backward.default, *args), run(aten.native_layer_norm_backward.default, *args)
    assert run.computed == 1
    assert type(second) is tuple
    assert [one is None for one in second] == [False, True, False]
    assert [None if one is None else described(one) for one in first] == [
        None if one is None else described(one) for one in second
    ]


def test_what_works_in_place_element_by_element_is_asked_once_and_gives_its_argument(run: Counted) -> None:
    for _ in range(3):
        changed = meta(2, 3)
        assert run(aten.addcmul_.default, changed, meta(3), meta(2, 3), value=0.5) is changed
    assert run.computed == 1
    assert run(aten.addcmul_.default, meta(2, 3), meta(3), meta(2, 3), value=2).shape == (2, 3)
    assert run.computed == 2


def test_what_torch_refuses_in_place_is_refused_each_time(run: Counted) -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError):
            run(aten.add_.Tensor, meta(3), meta(2, 3))
        assert described(run(aten.add_.Tensor, meta(2, 3), meta(3))) == described(meta(2, 3))
    assert run.computed == 3


# ---------------------------------------------------------------------------------------------- what is not


@pytest.mark.parametrize(
    ("func", "args"),
    [
        # Says that it returns a view.
        (aten.view.default, (meta(2, 3), [6])),
        (aten.t.default, (meta(2, 3),)),
        # Returns one and does not say so.
        (aten._unsafe_view.default, (meta(2, 3), [6])),
        (aten._reshape_alias.default, (meta(2, 3), [6], [1])),
        # Changes its argument.
        (aten.t_.default, (meta(2, 3),)),
        (aten.copy_.default, (meta(2), meta(2))),
        (aten.mul.out, (meta(2), meta(2))),
    ],
    ids=lambda value: str(value) if not isinstance(value, tuple) else "",
)
def test_what_lies_in_the_storage_of_an_argument_is_computed_each_time(run: Counted, func: Any, args: Any) -> None:
    kwargs = {"out": meta(2)} if func is aten.mul.out else {}
    given_storages = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, tuple(kwargs.values())))}
    for _ in range(3):
        out = run(func, *args, **kwargs)
        assert out.untyped_storage()._cdata in given_storages
    assert run.computed == 3


@pytest.mark.parametrize(
    "part",
    [
        lambda made: made[1:],
        lambda made: made[:1],
        lambda made: made[:, :1],
        lambda made: torch.as_strided(made, (2, 3), (3, 1), 6),
    ],
    ids=["later", "earlier", "narrow", "offset"],
)
def test_a_part_of_what_was_allocated_is_computed_each_time(run: Counted, part: Callable[[Tensor], Tensor]) -> None:
    """Some kernels return a slice of what they allocate, and the whole storage is what is held."""
    with torch.library._scoped_library("memtrain_layouts", "DEF") as library:
        library.define("part(Tensor x) -> Tensor")
        library.impl("part", lambda x: part(torch.empty(4, 3, device="meta")), "CompositeExplicitAutograd")
        func = torch.ops.memtrain_layouts.part.default
        sizes = [run(func, meta(1)).untyped_storage().nbytes() for _ in range(3)]
    assert sizes == [48] * 3
    assert run.computed == 3


def test_a_real_tensor_is_never_answered_from_memory(run: Counted) -> None:
    one, two = torch.ones(2), torch.full((2,), 2.0)
    assert run(aten.neg.default, one).tolist() == [-1.0, -1.0]
    assert run(aten.neg.default, two).tolist() == [-2.0, -2.0]
    for _ in range(2):
        assert run(aten.mul.Tensor, meta(2), torch.tensor(3.0)).is_meta
    assert run(aten.cat.default, [one, two]).tolist() == [1.0, 1.0, 2.0, 2.0]
    assert [run(aten.add_.Tensor, one, two).tolist() for _ in range(2)] == [[3.0, 3.0], [5.0, 5.0]]
    assert run.computed == 7


def test_what_is_no_tensor_is_computed_each_time(run: Counted) -> None:
    assert [run(aten.is_same_size.default, meta(2), meta(2)) for _ in range(2)] == [True, True]
    assert run.computed == 2


def test_a_list_of_results_is_computed_each_time(run: Counted) -> None:
    for _ in range(2):
        assert [tuple(one.shape) for one in run(aten._foreach_add.Scalar, [meta(2), meta(3)], 1)] == [(2,), (3,)]
    assert run.computed == 2


# ---------------------------------------------------------------------------------------------- all together

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool])
NUMBERS = st.sampled_from([1, 1.0, True, 2, 0.5])


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """A data-less tensor of one of few shapes, so that calls are alike, perhaps transposed."""
    made = meta(*draw(st.sampled_from([(2, 2), (2, 3)])), dtype=draw(DTYPES))
    return made.t() if draw(st.booleans()) else made


@st.composite
def calls(draw: st.DrawFn) -> tuple[Any, tuple[Any, ...]]:
    """An operator with arguments, some of which it refuses."""
    one = draw(tensors())
    other = draw(tensors())
    return draw(
        st.sampled_from(
            [
                (aten.add.Tensor, (one, other)),
                (aten.mul_.Tensor, (one, other)),
                (aten.mul.Scalar, (one, draw(NUMBERS))),
                (aten.mm.default, (one, other)),
                (aten.sum.dim_IntList, (one, [draw(st.integers(0, 1))], draw(st.booleans()))),
                (aten.cat.default, ([one, other], draw(st.integers(0, 1)))),
                (aten.clone.default, (one,)),
                (aten.transpose.int, (one, 0, 1)),
                (aten._unsafe_view.default, (one, [one.numel()])),
                (aten.native_dropout.default, (one, 0.5, True)),
                (aten.max.dim, (one, 0)),
                (aten.eq.Tensor, (one, other)),
            ]
        )
    )


def outcome(call: Callable[[], Any]) -> Any:
    """What a call gives, or the kind of error that it raises."""
    try:
        return described(call())
    except (RuntimeError, IndexError, NotImplementedError) as error:
        return type(error)


@given(listed=st.lists(calls(), min_size=1, max_size=12))
@settings(max_examples=150)
def test_results_are_the_same_with_and_without_remembering(listed: list[tuple[Any, tuple[Any, ...]]]) -> None:
    run = Counted()
    for func, args in [*listed, *listed]:
        assert outcome(lambda func=func, args=args: run(func, *args)) == outcome(lambda func=func, args=args: func(*args))


def test_a_data_less_run_computes_the_layout_of_equal_blocks_once() -> None:
    values = Values(lambda _: None)
    computed = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            computed.append(func)
            return func(*args, **(kwargs or {}))

    x, weights = meta(2, 4), [meta(4, 4) for _ in range(5)]
    with Watching(), values.mode():
        for weight in weights:
            x = torch.relu(torch.mm(x, weight))
    # Everything else is an empty tensor made like the first.
    assert {func: computed.count(func) for func in computed if func is not aten.empty_strided.default} == {
        aten.mm.default: 1,
        aten.relu.default: 1,
    }
