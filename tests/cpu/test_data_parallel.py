"""Data parallel: two processes on this machine, asked everything at once, against one process and the data-less run."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from parity import differences, events
from test_parity import EVALUATION_ROWS, PROCESSOR, real_trace, shapes_of
from torch import Tensor, nn
from toys import CASES, Case, Mlp

from memtrain import Trainer, distributed, machine
from memtrain.__main__ import main
from memtrain.data.batches import StepBatches, evaluation_batches
from memtrain.data.rowset import alike
from memtrain.device import Cpu
from memtrain.features.data_parallel import data_parallel
from memtrain.job import AdamW, Approximation, Constant, Job
from memtrain.memory.timeline import MemoryTimeline
from memtrain.models.build import source
from memtrain.plan import ChunkedLogits, DataParallel, EightBit, Plan, Recompute, Single
from memtrain.precision import AutocastFp16
from memtrain.run import prepare
from memtrain.trace.event import Kind, Phase, Trace
from memtrain.trace.processes import processes_of
from memtrain.trace.simulate import simulate

REPOSITORY = Path(__file__).parents[2]
ROWS = 8
JOB = Job(
    model="toy",
    global_batch_size=ROWS,
    steps=3,
    optimizer=AdamW(learning_rate=1e-2, weight_decay=0.1),
    schedule=Constant(),
    max_grad_norm=0.05,
)
LLAMA = CASES["llama"]


def partly_frozen() -> nn.Module:
    """More than one bucket of gradients, and weights that get none."""
    model = Mlp(192)
    model.blocks[0].requires_grad_(False)
    return model


def _wide(number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return {"x": torch.randn(3, 192, generator=generator), "target": torch.randn(3, 192, generator=generator)}


PARITY_JOB = Job(model="toy", global_batch_size=4, steps=2, allow=frozenset(Approximation))
SCALED_JOB = dataclasses.replace(PARITY_JOB, precision=AutocastFp16())
PARITY: dict[str, tuple[Case, Plan, Job]] = {
    "one micro-batch": (LLAMA, Plan(micro_batch_size=2, sharding=DataParallel(2)), PARITY_JOB),
    "accumulated": (LLAMA, Plan(micro_batch_size=1, sharding=DataParallel(2)), PARITY_JOB),
    "with a scaled loss": (LLAMA, Plan(micro_batch_size=1, sharding=DataParallel(2)), SCALED_JOB),
    "with other savers": (
        CASES["gpt2_with_dropout"],
        Plan(
            micro_batch_size=1,
            activations=Recompute(),
            loss=ChunkedLogits(16),
            optimizer_state=EightBit(),
            sharding=DataParallel(2),
        ),
        PARITY_JOB,
    ),
    "partly frozen": (
        Case(lambda: source(partly_frozen()), _wide),
        Plan(micro_batch_size=2, sharding=DataParallel(2)),
        PARITY_JOB,
    ),
}


@dataclass
class Trained:
    """What three steps came to."""

    losses: list[float]
    norms: list[float]
    evaluation: float
    weights: dict[str, Tensor]


def trained(plan: Plan, *, seed: int, rank: int = 0, ranks: int = 1) -> Trained:
    """Three steps on three batches, whose rows count different numbers of tokens, and an evaluation."""
    torch.manual_seed(seed)
    model = LLAMA.build().load()
    run = prepare(JOB, plan, model)
    rows = [LLAMA.row(number) for number in range(20)]
    batches = StepBatches(alike(rows), global_batch_size=ROWS, seed=0)
    share = {"rank": rank, "ranks": ranks}
    results = [run.step(batches.micro_batches(step, plan.micro_batch_size, **share)) for step in range(3)]
    evaluation = run.evaluate(evaluation_batches(alike(rows[:5]), 2, **share)).item()
    run.release()
    norms = [result.grad_norm.item() for result in results if result.grad_norm is not None]
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return Trained([result.loss.item() for result in results], norms, evaluation, weights)


def refusal(call: Callable[[], Any]) -> str:
    """The sentence of the ValueError that a call raises."""
    try:
        call()
    except ValueError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def _settled(trace: Trace) -> list[tuple[int, str]]:
    """What is compared, without what gloo's thread frees when it comes to it: sums of scalars and the order of the buckets."""
    late = {e.storage for e in trace.events if 0 < e.bytes <= 8 or (e.operator == "empty" and e.bytes < 512)}
    kept = tuple(event for event in trace.events[trace.section("step 1")[0] :] if event.storage not in late)
    return events(dataclasses.replace(trace, events=kept, marks=(("step 1", 0),)))


def in_each_process(rank: int, folder: Path, port: int) -> None:
    """All that is asked of two real processes, in one go: starting them takes most of the time."""
    warnings.simplefilter("error")
    world = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in world.items()}, MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    share = {"rank": rank, "ranks": 2}
    distributed.start(machine.processes(), cards=False)
    answers: dict[str, Any] = {}
    # Weights that differ, so that they have to be sent.
    answers["trained"] = {
        size: trained(Plan(micro_batch_size=size, sharding=DataParallel(2)), seed=rank, **share) for size in (4, 2)
    }
    answers["parity"] = {}
    for name, (case, plan, job) in PARITY.items():
        trace = real_trace(case, job, plan)
        answers["parity"][name] = _settled(trace), MemoryTimeline(trace).peak_by_phase()[Phase.LOAD]
    torch.manual_seed(0)
    distributed.differ_by_rank(0, rank)
    answers["random"] = torch.rand(4)
    answers["agreed"] = distributed.from_first(lambda: f"planned by process {rank}")
    answers["stopped"] = refusal(lambda: distributed.from_first(lambda: source("no/such/model")))
    answers["other number"] = refusal(lambda: distributed.require(4))
    strided = torch.arange(6.0).reshape(2, 3).t()
    answers["strided"] = distributed.sum_over_ranks(strided[:2])
    rows = [LLAMA.row(number) for number in range(20)]
    trainer = Trainer(
        model=LLAMA.build().load(),
        data=rows,
        eval_data=rows[:5],
        budget="64MiB",
        global_batch_size=ROWS,
        steps=3,
        run_dir=folder / f"run {rank}",
        progress=False,
    )
    answers["result"], answers["plan"] = trainer.train(), trainer.choice.plan
    trainer.save_model(folder / f"saved {rank}")
    torch.save(answers, folder / f"{rank}.pt")
    dist.barrier()
    if rank == 0:
        with pytest.raises(ValueError, match="lost") as lost, distributed.naming_a_lost_process():
            # The other process ends here.
            distributed.sum_over_ranks(torch.ones(()))
        (folder / "lost").write_text(str(lost.value))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(in_each_process, args=(path, port), nprocs=2)
    return path


@pytest.fixture(scope="module")
def answers(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("size", [4, 2])
def test_two_processes_train_what_one_does_with_the_whole_batch(size: int, answers: list[dict[str, Any]]) -> None:
    whole, shared = trained(Plan(micro_batch_size=ROWS), seed=0), answers[0]["trained"][size]
    assert shared.losses == pytest.approx(whole.losses, rel=1e-5)
    assert shared.norms == pytest.approx(whole.norms, rel=1e-4)
    assert shared.evaluation == pytest.approx(whole.evaluation, rel=1e-5)
    for name, weight in whole.weights.items():
        torch.testing.assert_close(
            shared.weights[name], weight, rtol=1e-3, atol=2e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("size", [4, 2])
def test_all_processes_have_the_same_weights_to_the_bit(size: int, answers: list[dict[str, Any]]) -> None:
    first, second = (answer["trained"][size] for answer in answers)
    assert (first.losses, first.norms, first.evaluation) == (second.losses, second.norms, second.evaluation)
    assert all(torch.equal(weight, second.weights[name]) for name, weight in first.weights.items())


@pytest.mark.parametrize("name", PARITY)
def test_the_simulated_share_allocates_what_a_real_one_allocates(name: str, answers: list[dict[str, Any]]) -> None:
    case, plan, job = PARITY[name]
    predicted = simulate(job, plan, case.build(), shapes_of(case), PROCESSOR, evaluation_rows=EVALUATION_ROWS)
    real, loading = answers[0]["parity"][name]
    simulated = _settled(predicted)
    assert real == simulated, "\n".join(differences(real, simulated)[:40])
    assert loading == MemoryTimeline(predicted).peak_by_phase()[Phase.LOAD]
    assert not [assumed for assumed in predicted.assumed if "attention" not in assumed]


def test_the_measured_peak_is_the_predicted_one(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        comparison = answer["result"].comparison
        assert comparison.measured.peak_allocated_bytes == pytest.approx(comparison.predicted.peak_allocated_bytes, rel=1e-3)
    assert answers[0]["result"].evaluations == answers[1]["result"].evaluations


def test_processes_take_the_plan_of_the_first(answers: list[dict[str, Any]]) -> None:
    assert [answer["agreed"] for answer in answers] == ["planned by process 0"] * 2
    assert answers[0]["plan"] == answers[1]["plan"]
    assert answers[1]["plan"].sharding == DataParallel(2)


def test_a_failure_of_the_first_process_stops_all(answers: list[dict[str, Any]]) -> None:
    assert "no/such/model" in answers[0]["stopped"]
    assert answers[1]["stopped"] == "the first process has stopped and says why: nothing was trained here."


def test_only_the_first_process_writes(folder: Path, answers: list[dict[str, Any]]) -> None:
    assert (folder / "run 0" / "comparison.json").exists()
    assert (folder / "saved 0").exists()
    assert not (folder / "run 1").exists()
    assert not (folder / "saved 1").exists()


def test_random_numbers_differ_and_the_first_process_draws_its_own(answers: list[dict[str, Any]]) -> None:
    torch.manual_seed(0)
    assert torch.equal(answers[0]["random"], torch.rand(4))
    assert not torch.equal(answers[0]["random"], answers[1]["random"])


def test_sums_are_right_whatever_the_strides(answers: list[dict[str, Any]]) -> None:
    assert answers[1]["strided"].tolist() == [[0.0, 6.0], [2.0, 8.0]]


def test_a_plan_for_other_processes_is_refused(answers: list[dict[str, Any]]) -> None:
    assert answers[0]["other number"] == (
        "the plan is for 4 processes and 2 run: start it with torchrun --nproc_per_node=4 -m memtrain, "
        "or only plan with mode=plan in one process."
    )
    assert refusal(lambda: distributed.require(2)).startswith("the plan is for 2 processes and 1 runs: start it with torchrun")


def test_a_process_that_is_left_alone_says_so(folder: Path, answers: list[dict[str, Any]]) -> None:
    told = (folder / "lost").read_text()
    assert told.startswith("process 0 has lost another of the 2 processes (")
    assert told.endswith("): look for what that one said, and start all of them again.")


def test_other_errors_are_left_as_they_are() -> None:
    with pytest.raises(RuntimeError, match=r"^something else$"), distributed.naming_a_lost_process():
        raise RuntimeError("something else")


# ---------------------------------------------------------------------- one process, the others not there


def test_buckets_are_as_large_as_the_gradients_and_stay() -> None:
    case, plan, _ = PARITY["partly frozen"]
    trained = sum(parameter.nbytes for parameter in partly_frozen().parameters() if parameter.requires_grad)
    held = {}
    for sharding in (Single(), plan.sharding):
        trace = simulate(PARITY_JOB, dataclasses.replace(plan, sharding=sharding), case.build(), shapes_of(case), PROCESSOR)
        timeline, end = MemoryTimeline(trace), trace.section("save")[0]
        held[sharding] = sum(event.bytes for event in timeline.live_at(end - 1) if event.kind is Kind.GRADIENT)
    assert held == {Single(): 0, DataParallel(2): trained}


def test_gradients_add_up_beside_the_buckets() -> None:
    """Of one micro-batch they are views of the buckets; of more, all but the last one's are tensors of their own."""
    peaks = {}
    for name in ("one micro-batch", "accumulated"):
        case, plan, job = PARITY[name]
        trace = simulate(job, plan, case.build(), shapes_of(case), PROCESSOR)
        timeline = MemoryTimeline(trace)
        peaks[name] = sum(e.bytes for e in timeline.live_at(timeline.peak_position) if e.kind is Kind.GRADIENT)
    weights = sum(parameter.nbytes for parameter in LLAMA.build().load().parameters())
    assert peaks["accumulated"] > 1.8 * weights
    assert peaks["one micro-batch"] < 1.3 * weights


def test_a_parameter_without_a_gradient_is_named() -> None:
    class Unused(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(2, 2)

    plain = CASES["plain_module"]
    plan = Plan(micro_batch_size=2, sharding=DataParallel(2))
    with pytest.raises(
        ValueError, match=r"^spare\.weight got no gradient, and data parallel adds up those of all .*: freeze what"
    ):
        simulate(PARITY_JOB, plan, source(Unused()), shapes_of(plain), PROCESSOR)


def test_a_released_model_is_as_it_was() -> None:
    torch.manual_seed(0)
    model = Mlp()
    untouched = [set(module.__dict__) for module in model.modules()]
    row = CASES["plain_module"].row(0)
    with processes_of(2):
        sharded = data_parallel(model, 2)
        with sharded.accumulating(0, 1):
            sharded.forward_module(**row).backward()
        assert len(sharded.buckets()) == 1
        sharded.release()
    assert [set(module.__dict__) for module in model.modules()] == untouched
    model.zero_grad()
    model(**row).backward()
    weight = model.blocks[0][0].weight
    assert weight.grad is not None
    # A tensor of its own, and no view of a bucket.
    assert weight.grad.untyped_storage().nbytes() == weight.nbytes
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (
            DataParallel(3),
            "plan.sharding is data parallel over 3 processes, and 2 processes were started: leave it out, or start 3 of them.",
        ),
        (Single(), "plan.sharding is one process, and 2 processes were started: leave it out, or start it without torchrun."),
    ],
)
def test_a_sharding_for_other_processes_is_refused(asked: Any, sentence: str) -> None:
    assert refusal(lambda: distributed.shared_by(2, {"sharding": asked})) == sentence


def test_processes_on_one_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Cpu(name="cpu", threads=1, flops_per_second=1e9, bytes_per_second=1e9, operator_seconds=1e-6)
    whole = machine.budget_for(device, 1 << 20)
    for name, value in {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    shared = machine.budget_for(device, 1 << 20)
    assert [limit.source for limit in shared.limits] == ["asked for", "installed, a share of 1/4", "free now, a share of 1/4"]
    assert [limit.bytes for limit in shared.limits[:2]] == [1 << 20, whole.limits[1].bytes // 4]


def test_a_process_without_a_card_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    processes = machine.Processes(rank=3, ranks=4, local_rank=1, local_ranks=2)
    assert refusal(lambda: distributed.start(processes, cards=True)) == (
        "process 1 of this machine has no card of its own, since there is 1: start one process per card."
    )


def test_planning_under_torchrun_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": 1, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    assert main(["recipe=quickstart", "mode=plan", f"run.dir={tmp_path / 'run'}"]) == 1
    assert capsys.readouterr().err == (
        "memtrain: mode plan trains nothing that 4 processes could share: start it without torchrun, "
        "with plan.sharding=data_parallel plan.sharding.ranks=N to plan for N.\n"
    )


def test_torchrun_trains_from_the_command_line(tmp_path: Path) -> None:
    job = [
        *("recipe=quickstart", "run.dir=run", "steps=2", "global_batch_size=4", "data.sequence_length=32", "data.held_out=0"),
        *("data.source=null", "data.path=text.txt", "data.tokenizer.train_vocab_size=259", "model.config.num_hidden_layers=1"),
    ]
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 40, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "memtrain", *job]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("× 2 processes = global batch 4") == 1
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
