"""Constraints of the planner, as people write them."""

from __future__ import annotations

from typing import Any

import pytest

from memtrain.plan import Foreach, Recompute, parse_constraints


def test_a_policy_is_taken_as_itself_by_name_and_with_settings() -> None:
    assert parse_constraints({"activations": Recompute(2)}) == {"activations": Recompute(2)}
    assert parse_constraints({"activations": {"policy": "recompute", "every": 2}}) == {"activations": Recompute(2)}
    assert parse_constraints({"optimizer_kernel": "foreach", "micro_batch_size": 3}) == {
        "optimizer_kernel": Foreach(),
        "micro_batch_size": 3,
    }


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        (
            {"activation": "keep"},
            "a plan has no field 'activation', and it must be micro_batch_size or one of activations, loss,",
        ),
        ({"activations": "keeps"}, "plan.activations is 'keeps', and it must be one of keep, recompute, recompute_first,"),
        (
            {"activations": Foreach()},
            r"plan.activations is Foreach\(\), and it must be one of keep, recompute, recompute_first,",
        ),
        ({"loss": {"policy": "whole_logits", "chunk": 2}}, "plan.loss: whole_logits has no setting 'chunk'; it has none."),
        ({"micro_batch_size": 0}, "micro_batch_size is 0, and it must be a whole number of 1 or more."),
    ],
)
def test_a_constraint_that_is_none_is_refused(written: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse_constraints(written)
