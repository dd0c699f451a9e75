"""The views say everything they know, cut nothing off, and stay short."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from memtrain.device import Cpu
from memtrain.job import Budget, Job, Limit
from memtrain.memory.footprint import Footprint
from memtrain.memory.timeline import Owner
from memtrain.plan import ChunkedLogits, EightBit, Keep, Plan, Recompute
from memtrain.planner.choice import Choice, Comparison, Rejected, Side
from memtrain.report.terminal import TrainingProgress, choice_view, comparison_view
from memtrain.trace.event import Kind, Phase, Trace

MIB = 2**20


def make_choice(*, rejected: int = 0, reason: str = "40.0 MiB over the budget.", assumed: tuple[str, ...] = ()) -> Choice:
    """A choice with a peak of 100 MiB under a budget of 152 MiB, with every kind and nearly every phase."""
    module = "model.layers.11.mlp.gate_proj"
    return Choice(
        job=Job(model="HuggingFaceTB/SmolLM2-135M", global_batch_size=32, steps=500),
        budget=Budget(
            limits=(
                Limit("physical memory", 16 * 1024 * MIB),
                Limit("asked for", 160 * MIB),
                Limit("free now", 9 * 1024 * MIB),
            ),
            headroom_bytes=8 * MIB,
        ),
        device=Cpu(name="cpu", threads=2, flops_per_second=1e11, bytes_per_second=1e10, operator_seconds=1e-5),
        plan=Plan(micro_batch_size=4, activations=Recompute(), loss=ChunkedLogits(512)),
        footprint=Footprint(
            peak_allocated_bytes=100 * MIB,
            peak_reserved_bytes=100 * MIB,
            total_device_bytes=100 * MIB,
            by_kind={kind: (40 if kind is Kind.WEIGHT else 12 if kind is Kind.INPUT else 8) * MIB for kind in Kind},
            by_phase={phase: (90 + number) * MIB for number, phase in enumerate(Phase) if phase is not Phase.SAVE},
            peak_phase=Phase.BACKWARD,
            peak_module=module,
            peak_operator="aten.mm",
            owners=tuple(
                Owner((40 - number) * MIB, Kind.SAVED_ACTIVATION, Phase.FORWARD, module, f"aten.operator_{number}", 24)
                for number in range(7)
            ),
        ),
        trace=Trace((), assumed=assumed),
        step_seconds=0.83,
        rejected=tuple(
            Rejected(plan=Plan(micro_batch_size=32, activations=Keep(), loss=ChunkedLogits(512)), reason=reason)
            for _ in range(rejected)
        ),
        planning_seconds=3.42,
    )


def make_side(weight_mib: int, phases: dict[str, int], step_seconds: float) -> Side:
    return Side(
        peak_allocated_bytes=weight_mib * MIB,
        peak_reserved_bytes=weight_mib * MIB,
        total_device_bytes=weight_mib * MIB,
        by_kind={"weight": weight_mib * MIB},
        by_phase={phase: size * MIB for phase, size in phases.items()},
        step_seconds=step_seconds,
    )


def lines_of(view: RenderableType, width: int = 80) -> list[str]:
    """The lines a pipe receives."""
    console = Console(file=io.StringIO(), width=width)
    console.print(view)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def words_of(view: RenderableType, width: int = 80) -> str:
    """Everything printed, with line breaks and alignment taken out."""
    return " ".join(" ".join(lines_of(view, width)).split())


def test_every_limit_is_printed_and_the_tightest_is_marked() -> None:
    lines = lines_of(choice_view(make_choice()))
    start = next(number for number, line in enumerate(lines) if line.startswith("budget"))
    assert [" ".join(line.split()) for line in lines[start : start + 4]] == [
        "budget 152 MiB: the tightest limit, less 8.00 MiB headroom",
        "16.0 GiB physical memory",
        "160 MiB asked for (the tightest)",
        "9.00 GiB free now",
    ]


def test_every_field_of_the_plan_has_a_row_in_plain_words() -> None:
    words = words_of(choice_view(make_choice()))
    for row in (
        "micro-batch 4 × accumulation 8 = global batch 32",
        "activations recompute every block",
        "loss logits in chunks of 512 tokens",
        "update after backward",
        "optimizer kernel fused",
    ):
        assert row in words


def test_kinds_stand_in_their_order_with_their_share_of_the_peak() -> None:
    lines = lines_of(choice_view(make_choice()))
    start = next(number for number, line in enumerate(lines) if line.startswith("peak"))
    assert lines[start] == "peak      100 MiB allocated of 152 MiB (65.8 %), predicted"
    rows = [" ".join(line.replace("━", "").replace("╸", "").split()) for line in lines[start + 1 : start + 1 + len(Kind)]]
    assert rows[0] == "weight 40.0 MiB 40.0 %"
    assert rows[3] == "input 12.0 MiB 12.0 %"
    assert [row.partition(" 8.00")[0] for row in rows[1:3]] == ["gradient", "optimizer state"]


def test_a_bar_is_as_long_as_its_share() -> None:
    lines = lines_of(choice_view(make_choice()))
    weight, gradient = (next(line for line in lines if kind in line) for kind in ("weight ", "gradient "))
    assert weight.count("━") == 13
    assert gradient.count("━") == 2


def test_the_first_five_owners_are_named_whole() -> None:
    words = words_of(choice_view(make_choice()))
    assert "36.0 MiB saved activation forward: 24 × aten.operator_4 in model.layers.11.mlp.gate_proj" in words
    assert "operator_5" not in words


def test_where_and_when_the_peak_is_and_each_phase_are_printed() -> None:
    words = words_of(choice_view(make_choice()))
    assert "reached in backward, by aten.mm in model.layers.11.mlp.gate_proj" in words
    assert "by phase load 90.0 MiB forward 91.0 MiB recompute 92.0 MiB backward 93.0 MiB" in words
    assert "830 ms predicted on cpu, planned in 3.4 s" in words


def test_a_rejected_plan_is_told_by_what_differs_from_the_chosen_one() -> None:
    lines = lines_of(choice_view(make_choice(rejected=1)), width=120)
    row = next(line for line in lines if "micro-batch 32" in line)
    assert " ".join(row.split()) == "micro-batch 32, keep – 40.0 MiB over the budget."


def rejected_for(reasons: int) -> tuple[Rejected, ...]:
    plan = Plan(micro_batch_size=32, activations=Keep(), loss=ChunkedLogits(512))
    return tuple(Rejected(plan=plan, reason=f"reason {number}") for number in range(reasons))


def test_twelve_reasons_are_shown_and_the_plans_of_others_counted() -> None:
    words = words_of(choice_view(replace(make_choice(), rejected=rejected_for(14))))
    assert "and 2 more" in words
    assert words.count("micro-batch 32") == 12
    assert "more" not in words_of(choice_view(replace(make_choice(), rejected=rejected_for(12))))


def test_plans_rejected_alike_are_one_line_that_says_what_they_share() -> None:
    alike = tuple(
        Rejected(
            plan=Plan(micro_batch_size=4, activations=activations, loss=ChunkedLogits(512), optimizer_state=EightBit()),
            reason="at least 2.00 MiB over the budget",
            total_device_bytes=154 * MIB,
            is_bound=True,
        )
        for activations in (Keep(), Recompute(2))
    )
    words = words_of(choice_view(replace(make_choice(), rejected=alike)), width=200)
    assert "micro-batch 4, state in 8 bits (2 plans) ≥ 154 MiB at least 2.00 MiB over the budget" in words


def test_why_says_what_was_set_and_what_plainer_choices_would_take() -> None:
    tried = Rejected(
        plan=Plan(micro_batch_size=32, loss=ChunkedLogits(512)), reason="over", total_device_bytes=300 * MIB, is_bound=True
    )
    choice = replace(make_choice(), given=("loss", "micro_batch_size"), rejected=(tried,))
    words = words_of(choice_view(choice), width=200)
    assert "why the fastest plan that fits with loss logits in chunks of 512 tokens, micro-batch 4, as it is set" in words
    assert "with activations keep and micro-batch 32 it would take at least 300 MiB" in words


def test_a_card_shows_what_is_reserved_and_in_total_and_the_host() -> None:
    choice = make_choice()
    peak = replace(
        choice.footprint,
        peak_reserved_bytes=110 * MIB,
        total_device_bytes=130 * MIB,
        host_bytes=70 * MIB,
        host_by_kind={Kind.GRADIENT: 20 * MIB, Kind.OPTIMIZER_STATE: 50 * MIB},
    )
    budget = replace(choice.budget, host_limits=(Limit("asked for", 80 * MIB),))
    words = words_of(choice_view(replace(choice, footprint=peak, budget=budget)), width=200)
    assert "100 MiB allocated, 110 MiB reserved, 130 MiB with the context of 152 MiB (85.5 %), predicted" in words
    assert "host 70.0 MiB of 80.0 MiB: gradient 20.0 MiB, optimizer state 50.0 MiB" in words
    assert "80.0 MiB of the host, asked for" in words


def test_what_was_assumed_is_printed_only_where_something_was() -> None:
    assert "assumed mask.all() is [True]" in words_of(choice_view(make_choice(assumed=("mask.all() is [True]",))))
    assert "assumed" not in words_of(choice_view(make_choice()))


@pytest.mark.parametrize("width", [80, 120])
def test_the_choice_keeps_to_the_width_and_cuts_nothing_off(width: int) -> None:
    reason = "the head is scaled, so a loss in chunks [1] would not be its own loss."
    view = choice_view(make_choice(rejected=8, reason=reason, assumed=("attention_mask.all() is True",)))
    lines = lines_of(view, width)
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)


def test_a_word_longer_than_the_line_is_folded() -> None:
    path = "/data/" + "/".join(f"folder_{number}" for number in range(20))
    choice = make_choice()
    lines = lines_of(choice_view(replace(choice, job=replace(choice.job, model=path))))
    assert path in "".join("".join(lines).split())


def test_a_budget_without_headroom_says_so() -> None:
    choice = replace(make_choice(), budget=Budget.of("152MiB"))
    assert "budget 152 MiB: the tightest limit, no headroom 152 MiB asked for (the tightest)" in words_of(choice_view(choice))


def test_a_typical_choice_has_fewer_than_45_lines_at_80_columns() -> None:
    assert len(lines_of(choice_view(make_choice(rejected=8)))) < 45


def test_the_difference_is_predicted_less_measured_relative_to_the_measurement() -> None:
    comparison = Comparison(make_side(126, {"forward": 90}, 1.5), make_side(120, {"forward": 100}, 1.0))
    lines = [" ".join(line.split()) for line in lines_of(comparison_view(comparison, Budget.of("150MiB"), []))]
    assert lines == [
        "predicted measured difference",
        "peak 126 MiB 120 MiB +6.00 MiB +5.00 %",
        "weight 126 MiB 120 MiB +6.00 MiB +5.00 %",
        "peak in forward 90.0 MiB 100 MiB -10.0 MiB -10.00 %",
        "seconds per step 1.5 s 1.0 s +500 ms +50.00 %",
        "",
        "The peak was predicted within 5.00 % and stayed 20 % under the budget.",
    ]


def test_a_phase_that_one_side_did_not_see_has_no_difference() -> None:
    comparison = Comparison(make_side(100, {"recompute": 90}, 1.0), make_side(100, {}, 1.0))
    lines = [" ".join(line.split()) for line in lines_of(comparison_view(comparison, Budget.of("150MiB"), []))]
    assert "peak in recompute 90.0 MiB –" in lines


def test_a_kind_that_one_side_lacks_held_nothing_there_unless_it_tells_no_kinds() -> None:
    predicted = make_side(100, {}, 1.0)
    measured = replace(predicted, by_kind={"gradient": 100 * MIB})
    lines = [
        " ".join(line.split()) for line in lines_of(comparison_view(Comparison(predicted, measured), Budget.of("1GiB"), []))
    ]
    assert "weight 100 MiB 0 B +100 MiB –" in lines
    counted = comparison_view(Comparison(predicted, replace(predicted, by_kind={})), Budget.of("1GiB"), [])
    assert "weight 100 MiB –" in [" ".join(line.split()) for line in lines_of(counted)]


def test_reserved_and_total_are_shown_where_they_differ_from_allocated() -> None:
    side = make_side(100, {}, 1.0)
    card = replace(side, peak_reserved_bytes=110 * MIB, total_device_bytes=130 * MIB)
    lines = [" ".join(line.split()) for line in lines_of(comparison_view(Comparison(card, card), Budget.of("1GiB"), []))]
    assert "reserved 110 MiB 110 MiB 0 B 0.00 %" in lines
    assert "in total 130 MiB 130 MiB 0 B 0.00 %" in lines
    assert not any(
        line.startswith("reserved") for line in lines_of(comparison_view(Comparison(side, side), Budget.of("1GiB"), []))
    )


@pytest.mark.parametrize(
    ("predicted", "measured", "sentence"),
    [
        (100 * MIB, 100 * MIB, "The peak was predicted to the byte and stayed 33 % under the budget."),
        (100 * MIB + 1, 100 * MIB, "The peak was predicted within 0.01 % and stayed 33 % under the budget."),
        (150 * MIB, 147 * MIB, "The peak was predicted within 2.04 % and stayed 2.0 % under the budget."),
        (150 * MIB, 165 * MIB, "The peak was predicted within 9.09 % and went 10 % over the budget."),
    ],
)
def test_the_last_sentence_judges_the_prediction(predicted: int, measured: int, sentence: str) -> None:
    sides = (
        Side(
            peak_allocated_bytes=size,
            peak_reserved_bytes=size,
            total_device_bytes=size,
            by_kind={"weight": size},
            by_phase={},
            step_seconds=1.0,
        )
        for size in (predicted, measured)
    )
    assert lines_of(comparison_view(Comparison(*sides), Budget.of("150MiB"), []))[-1] == sentence


@pytest.mark.parametrize(
    ("evaluations", "sentence"),
    [
        (
            [(0, 3.0, {"perplexity": 20.0855}), (50, 2.5, {}), (100, 2.0, {"perplexity": 7.38906})],
            "Evaluation loss 3.0000 before training and 2.0000 after 100 steps (perplexity 20.09 and 7.389).",
        ),
        ([(0, 3.0, {"perplexity": 20.0855})], "Evaluation loss 3.0000 before training (perplexity 20.09)."),
        (
            [(0, 3.0, {"perplexity": 20.0855, "accuracy": 0.25}), (9, 1e4, {"perplexity": math.inf, "accuracy": 0.5})],
            "Evaluation loss 3.0000 before training and 10000.0000 after 9 steps (perplexity 20.09 and infinite, accuracy 0.25 and 0.5).",
        ),
        ([(5, 0.5, {}), (9, 0.25, {})], "Evaluation loss 0.5000 after 5 steps and 0.2500 after 9 steps."),
    ],
)
def test_the_evaluation_is_told_before_and_after(evaluations: list[tuple[int, float, dict[str, float]]], sentence: str) -> None:
    side = make_side(100, {}, 1.0)
    rows = [
        {"step": step, "epoch": 0.5, "eval_loss": loss, **{f"eval_{name}": value for name, value in more.items()}}
        for step, loss, more in evaluations
    ]
    assert sentence in words_of(comparison_view(Comparison(side, side), Budget.of("150MiB"), rows))


def logged(steps: range, total_steps: int) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    with TrainingProgress(total_steps, 200 * MIB, console) as progress:
        for step in steps:
            progress.update(step, loss=2.5, per_second=1234.5, memory_bytes=100 * MIB, peak_bytes=150 * MIB)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_a_log_gets_a_line_every_tenth_of_the_steps_and_the_last() -> None:
    lines = logged(range(1, 26), total_steps=25)
    assert [line.partition(":")[0] for line in lines] == [f"step {step}/25" for step in (3, 6, 9, 12, 15, 18, 21, 24, 25)]
    assert lines[-1] == "step 25/25: loss 2.500, 1.2 k tok/s, 100 MiB, peak 75 % of budget"


def test_a_log_line_says_the_time_left() -> None:
    assert logged(range(1, 11), total_steps=100)[0].endswith("s left")


def test_a_note_in_a_log_is_one_line_and_keeps_its_brackets() -> None:
    console = Console(file=io.StringIO(), width=40)
    with TrainingProgress(10, MIB, console) as progress:
        progress.note("saved [step 5] to " + "a/long/path/" * 10)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "saved [step 5] to " + "a/long/path/" * 10 + "\n"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Console:
    """A terminal of 80 columns; rich draws no live bar where TERM says that the terminal is dumb."""
    monkeypatch.setenv("TERM", "xterm")
    return Console(file=io.StringIO(), force_terminal=True, color_system=None, width=80)


def test_the_live_bar_is_one_line_even_with_the_longest_values(terminal: Console) -> None:
    with TrainingProgress(100_000, 1018 * MIB, terminal) as progress:
        progress.update(99_999, loss=10.935, per_second=123_456.0, memory_bytes=1018 * MIB, peak_bytes=1018 * MIB)
    assert isinstance(terminal.file, io.StringIO)
    last = terminal.file.getvalue().rpartition("\x1b[2K")[2].partition("\n")[0]
    assert last.lstrip().startswith("99999/100000 ")
    assert "loss 10.935 123.5 k tok/s 1018 MiB, peak 100 % of budget" in last
    assert len(last) <= 80


def test_a_note_stands_above_the_live_bar(terminal: Console) -> None:
    with TrainingProgress(10, MIB, terminal) as progress:
        progress.note("step 1: evaluation loss 2.9")
        progress.update(1, loss=1.0, per_second=1.0, memory_bytes=MIB, peak_bytes=MIB)
    assert isinstance(terminal.file, io.StringIO)
    shown = terminal.file.getvalue()
    assert shown.index("step 1: evaluation loss 2.9\n") < shown.index("1/10")
