"""The terminal: the choice before training, one line while training, predicted beside measured after it.

The views are rich renderables made of borderless grids, so that the same text reads well on a terminal, in a pipe and in
a log. Values become ``Text`` before rich sees them: a module path or a reason may hold square brackets, which rich would
otherwise read as markup. Columns fold instead of ending in an ellipsis, because what is cut off is what someone needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from memtrain.job import Budget
from memtrain.memory.footprint import Footprint
from memtrain.method import Full, Unquantized
from memtrain.plan import POLICIES, Plan, Single, policy_name
from memtrain.planner.choice import Choice, Comparison, Rejected
from memtrain.trace.attention import attention_line
from memtrain.trace.event import Kind
from memtrain.units import format_bytes, format_count, format_seconds

OWNERS_SHOWN = 5
REJECTED_SHOWN = 12
UNKNOWN = "–"
# The fields of a plan as they are printed.
FIELD_NAMES = {"micro_batch_size": "micro-batch", **{field: field.replace("_", " ") for field in POLICIES}}


def choice_view(choice: Choice) -> RenderableType:
    """What is about to be trained, how it is fitted into memory, what that takes and why not something faster."""
    peak = choice.footprint
    rows: list[tuple[str, RenderableType]] = [
        ("job", _job(choice)),
        ("budget", _budget(choice.budget)),
        ("plan", _plan(choice)),
        ("why", Text("\n".join([_fastest(choice), *_why(choice)]))),
        ("peak", peak_view(peak, choice.budget)),
        *([("host", _host(peak, choice.budget))] if peak.host_bytes else []),
        *([("allocator", Text(choice.allocator))] if choice.allocator else []),
        ("reached", Text(f"in {peak.peak_phase}, by {source_words(peak.peak_operator, peak.peak_module)}")),
        ("held by", owners_view(peak)),
        ("by phase", Columns([Text(f"{phase} {format_bytes(size)}") for phase, size in peak.by_phase.items()], padding=(0, 3))),
        (
            "step",
            Text(
                f"about {format_seconds(choice.step_seconds)} predicted on {choice.device.name}, planned in {format_seconds(choice.planning_seconds)}"
            ),
        ),
    ]
    if choice.rejected:
        rows.append(("rejected", _rejected(choice.rejected, choice.plan)))
    if choice.trace.assumed:
        rows.append(("assumed", Text("\n".join(choice.trace.assumed))))

    view = Table.grid(Column(style="bold", no_wrap=True), Column(overflow="fold"), padding=(0, 2, 0, 0))
    for label, content in rows:
        view.add_row(label, content)
    return view


def comparison_view(comparison: Comparison, budget: Budget, evaluations: Sequence[Mapping[str, float]]) -> RenderableType:
    """Predicted beside measured, then what training did to the evaluation loss.

    Args:
        comparison: both sides; a kind that one side lacks held 0 bytes there, a phase that it lacks was not seen.
        budget: what the measured peak had to stay within.
        evaluations: what was logged of each, in order; the first is from before training.
    """
    table = bytes_table(comparison)
    table.add_row("seconds per step", *_second_cells(comparison.predicted.step_seconds, comparison.measured.step_seconds))

    lines: list[RenderableType] = [table, Text()]
    if evaluations:
        lines.append(Text(_evaluation_sentence(evaluations)))
    return Group(*lines, Text(_closing_sentence(comparison, budget), style="bold"))


def bytes_table(comparison: Comparison) -> Table:
    """Predicted beside measured bytes: the peak, its kinds, what is taken of the device, and the peak of each phase."""
    predicted, measured = comparison.predicted, comparison.measured
    table = Table(
        Column(""),
        *(Column(header, justify="right", no_wrap=True) for header in ("predicted", "measured", "difference", "")),
        box=None,
        pad_edge=False,
        padding=(0, 3, 0, 0),
    )
    table.add_row("peak", *_byte_cells(predicted.peak_allocated_bytes, measured.peak_allocated_bytes), style="bold")
    for kind in dict.fromkeys([*predicted.by_kind, *measured.by_kind]):
        # A side that tells no kinds has not measured them; one that tells some held nothing of the others.
        held = [side.by_kind.get(kind, 0) if side.by_kind else None for side in (predicted, measured)]
        table.add_row(f"  {kind}", *_byte_cells(*held))
    if predicted.total_device_bytes != predicted.peak_allocated_bytes:
        table.add_row("reserved", *_byte_cells(predicted.peak_reserved_bytes, measured.peak_reserved_bytes))
        table.add_row("in total", *_byte_cells(predicted.total_device_bytes, measured.total_device_bytes))
    for phase in dict.fromkeys([*predicted.by_phase, *measured.by_phase]):
        table.add_row(f"peak in {phase}", *_byte_cells(predicted.by_phase.get(phase), measured.by_phase.get(phase)))
    return table


class TrainingProgress:
    """One line that follows training: a live bar on a terminal, about ten plain lines where the output is a log.

    Args:
        total_steps: optimizer steps of the whole run.
        budget_bytes: what the peak is a percentage of.
        console: where to print; standard output by default.
        unit: what the speed counts.
    """

    def __init__(self, total_steps: int, budget_bytes: int, console: Console | None = None, unit: str = "tok") -> None:
        self.total_steps = total_steps
        self.budget_bytes = budget_bytes
        self.console = console or Console()
        self.unit = unit
        self.live = self.console.is_interactive
        self.steps_per_line = math.ceil(total_steps / 10)
        # A disabled Progress draws nothing and still estimates the time left. The estimate looks back ten minutes, because
        # the default of 30 s holds less than one step of a large model.
        self.progress = Progress(
            MofNCompleteColumn(),
            BarColumn(bar_width=None, table_column=Column(ratio=1)),
            TextColumn("{task.description}", markup=False),
            TimeRemainingColumn(compact=True),
            console=self.console,
            refresh_per_second=4,
            speed_estimate_period=600,
            expand=True,
            disable=not self.live,
        )
        self.task = self.progress.add_task("", total=total_steps)

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.progress.stop()

    def update(self, step: int, *, loss: float, per_second: float, memory_bytes: int, peak_bytes: int) -> None:
        """Show the state after ``step`` steps.

        Args:
            step: optimizer steps done, counted from the beginning of the run.
            loss: training loss of that step.
            per_second: units per second in that step.
            memory_bytes: bytes allocated now.
            peak_bytes: highest bytes allocated so far.
        """
        state = (
            f"loss {loss:.3f}",
            f"{format_count(round(per_second))} {self.unit}/s",
            f"{format_bytes(memory_bytes)}, peak {100 * peak_bytes / self.budget_bytes:.0f} % of budget",
        )
        self.progress.update(self.task, completed=step, description=" ".join(state))
        if not self.live and (step % self.steps_per_line == 0 or step == self.total_steps):
            left = self.progress.tasks[0].time_remaining
            remaining = [f"{format_seconds(left)} left"] if left else []
            self.note(f"step {step}/{self.total_steps}: {', '.join([*state, *remaining])}")

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        # A log is not wrapped at the width of a terminal that it does not have.
        self.console.print(Text(text), soft_wrap=not self.live)


def _job(choice: Choice) -> Text:
    job = choice.job
    optimizer = f"{type(job.optimizer).__name__} at learning rate {job.optimizer.learning_rate:g}"
    packed = "" if isinstance(job.quantization, Unquantized) else f", {job.quantization}"
    # Adapters have a type of their own, so the precision says what the rest is in.
    trained = isinstance(job.method, Full)
    facts = f"precision {job.precision}" if trained else f"{job.method}{packed}, precision {policy_name(type(job.precision))}"
    return Text(f"{job.model}, global batch size {job.global_batch_size}, {job.steps} steps, {optimizer}, {facts}")


def _budget(budget: Budget) -> RenderableType:
    headroom = f"less {format_bytes(budget.headroom_bytes)} headroom" if budget.headroom_bytes else "no headroom"
    limits = _grid(Column(justify="right", no_wrap=True), Column(overflow="fold"))
    for limit in budget.limits:
        mark = " (the tightest)" if limit is budget.tightest else ""
        limits.add_row(format_bytes(limit.bytes), Text(f"{limit.source}{mark}"))
    for limit in budget.host_limits:
        limits.add_row(format_bytes(limit.bytes), Text(f"of the host, {limit.source}"))
    return Group(Text(f"{format_bytes(budget.device_bytes)}: the tightest limit, {headroom}"), limits)


def _plan(choice: Choice) -> Table:
    size, rows = choice.plan.micro_batch_size, choice.job.global_batch_size
    table = _grid(Column(no_wrap=True), Column(overflow="fold"))
    ranks = f" × {choice.plan.ranks} processes" if choice.plan.ranks > 1 else ""
    table.add_row("micro-batch", f"{size} × accumulation {choice.plan.accumulation(rows)}{ranks} = global batch {rows}")
    for field in POLICIES:
        policy = getattr(choice.plan, field)
        words = attention_line(str(policy), choice.trace, choice.trace.why_math) if field == "attention" else str(policy)
        # One process is what everyone expects.
        if not isinstance(policy, Single):
            table.add_row(FIELD_NAMES[field], words)
    return table


def _fastest(choice: Choice) -> str:
    if choice.resumed_step is not None:
        return f"the plan of the checkpoint of step {choice.resumed_step}"
    given = [f"{FIELD_NAMES[field]} {getattr(choice.plan, field)}" for field in choice.given]
    return "the fastest plan that fits" + (f" with {', '.join(given)}, as it is set" if given else "")


def _why(choice: Choice) -> Iterator[str]:
    """For each field that is not at its plainest, what the plainest would have taken in a plan as near as there is."""
    chosen, plainest = choice.plan, Plan(micro_batch_size=choice.job.global_batch_size)
    tried = [other for other in choice.rejected if other.total_device_bytes is not None]
    for field, name in FIELD_NAMES.items():
        plain = getattr(plainest, field)
        alike = [other for other in tried if getattr(other.plan, field) == plain]
        if getattr(chosen, field) == plain or not alike:
            continue
        nearest = min(alike, key=lambda other: sum(getattr(other.plan, one) != getattr(chosen, one) for one in FIELD_NAMES))
        assert nearest.total_device_bytes is not None
        least = "at least " if nearest.is_bound else ""
        size = nearest.plan.micro_batch_size
        of_size = "" if field == "micro_batch_size" or size == chosen.micro_batch_size else f" and micro-batch {size}"
        yield f"with {name} {plain}{of_size} it would take {least}{format_bytes(nearest.total_device_bytes)}"


def peak_view(peak: Footprint, budget: Budget) -> RenderableType:
    """What the peak takes of the budget, and its kinds."""
    total = peak.peak_allocated_bytes
    kinds = _grid(
        Column(no_wrap=True), Column(justify="right", no_wrap=True), Column(justify="right", no_wrap=True), Column(max_width=40)
    )
    for kind in Kind:
        if size := peak.by_kind.get(kind, 0):
            kinds.add_row(str(kind), format_bytes(size), f"{100 * size / total:.1f} %", ProgressBar(total, size))
    taken = [f"{format_bytes(total)} allocated"]
    if peak.total_device_bytes != total:
        taken += [
            f"{format_bytes(peak.peak_reserved_bytes)} reserved",
            f"{format_bytes(peak.total_device_bytes)} with the context",
        ]
    share = f"{100 * peak.total_device_bytes / budget.device_bytes:.1f} %"
    headline = Text(f"{', '.join(taken)} of {format_bytes(budget.device_bytes)} ({share}), predicted", style="bold")
    return Group(headline, kinds)


def _host(peak: Footprint, budget: Budget) -> Text:
    bound = ", which nothing bounds" if budget.host_bytes is None else f" of {format_bytes(budget.host_bytes)}"
    kinds = [f"{kind} {format_bytes(size)}" for kind, size in peak.host_by_kind.items() if size >= peak.host_bytes / 1000]
    return Text(f"{format_bytes(peak.host_bytes)}{bound}: {', '.join(kinds)}")


def owners_view(peak: Footprint) -> Table:
    """Who holds the most of the peak."""
    table = _grid(Column(justify="right", no_wrap=True), Column(no_wrap=True), Column(overflow="fold"))
    for owner in peak.owners[:OWNERS_SHOWN]:
        source = f"{owner.phase}: {owner.storages} × {source_words(owner.operator, owner.module)}"
        table.add_row(format_bytes(owner.bytes), str(owner.kind), Text(source))
    return table


def _rejected(rejected: Sequence[Rejected], chosen: Plan) -> RenderableType:
    table = Table(
        Column("faster, differing in", overflow="fold"),
        Column("takes", justify="right", no_wrap=True),
        Column("why not", overflow="fold"),
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        header_style="dim",
    )
    groups: dict[tuple[str, int | None], list[Rejected]] = {}
    for other in rejected:
        groups.setdefault((other.reason, other.total_device_bytes), []).append(other)
    for (reason, size), alike in list(groups.items())[:REJECTED_SHOWN]:
        bound = "≥ " if alike[0].is_bound else ""
        shown = UNKNOWN if size is None else f"{bound}{format_bytes(size)}"
        table.add_row(_difference([other.plan for other in alike], chosen), shown, Text(reason))
    hidden = sum(len(alike) for alike in list(groups.values())[REJECTED_SHOWN:])
    return Group(table, Text(f"and {hidden} more", style="dim")) if hidden > 0 else table


def _difference(plans: Sequence[Plan], chosen: Plan) -> str:
    """What the plans have in common that the chosen one has not."""
    sizes = {plan.micro_batch_size for plan in plans}
    named = [f"micro-batch {sizes.pop()}"] if len(sizes) == 1 else []
    for field in POLICIES:
        policies = {getattr(plan, field) for plan in plans}
        if len(policies) == 1 and (policy := policies.pop()) != getattr(chosen, field):
            named.append(f"state {policy}" if field == "optimizer_state" else str(policy))
    return ", ".join(named) + (f" ({len(plans)} plans)" if len(plans) > 1 else "")


def source_words(operator: str, module: str) -> str:
    """An operator and the module that called it."""
    return f"{operator} in {module}" if module else operator


def _grid(*columns: Column) -> Table:
    return Table.grid(*columns, padding=(0, 2, 0, 0))


def _byte_cells(predicted: int | None, measured: int | None) -> tuple[str, str, str, str]:
    if predicted is None or measured is None:
        left, right = (UNKNOWN if size is None else format_bytes(size) for size in (predicted, measured))
        return left, right, "", ""
    difference = predicted - measured
    sign = "+" if difference > 0 else ""
    return format_bytes(predicted), format_bytes(measured), f"{sign}{format_bytes(difference)}", _relative(difference, measured)


def _second_cells(predicted: float, measured: float) -> tuple[str, str, str, str]:
    difference = predicted - measured
    sign = "-" if difference < 0 else "+"
    return (
        format_seconds(predicted),
        format_seconds(measured),
        f"{sign}{format_seconds(abs(difference))}",
        _relative(difference, measured),
    )


def _relative(difference: float, measured: float) -> str:
    if not measured:
        return UNKNOWN
    percent = round(100 * difference / measured, 2)
    return f"{percent:+.2f} %" if percent else "0.00 %"


def _evaluation_sentence(rows: Sequence[Mapping[str, float]]) -> str:
    before, after = rows[0], rows[-1]
    begins = f"after {before['step']:.0f} steps" if before["step"] else "before training"
    shown = [f"{before['eval_loss']:.4f} {begins}"]
    if len(rows) > 1:
        shown.append(f"{after['eval_loss']:.4f} after {after['step']:.0f} steps")
    others = [name for name in before if name.startswith("eval_") and name != "eval_loss" and name in after]
    ends = [before, after][: len(rows)]
    told = ", ".join(f"{name.removeprefix('eval_')} {' and '.join(_short(row[name]) for row in ends)}" for name in others)
    return f"Evaluation loss {' and '.join(shown)}{f' ({told})' if told else ''}."


def _short(value: float) -> str:
    return "infinite" if value == math.inf else f"{value:.4g}"


def _closing_sentence(comparison: Comparison, budget: Budget) -> str:
    # Never "within 0.00 %" of something that was missed by a byte.
    error = 100 * abs(comparison.peak_error)
    accuracy = f"within {max(error, 0.01):.2f} %" if error else "to the byte"
    distance = 100 * (1 - comparison.measured.total_device_bytes / budget.device_bytes)
    digits = 0 if abs(distance) >= 10 else 1 if abs(distance) >= 1 else 2
    place = f"stayed {distance:.{digits}f} % under" if distance >= 0 else f"went {-distance:.{digits}f} % over"
    return f"The peak was predicted {accuracy} and {place} the budget."
