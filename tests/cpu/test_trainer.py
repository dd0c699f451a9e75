"""The Trainer from data to saved model, on models that train in a second."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from toys import BYTES, CASES, Mlp

from memtrain import AdamW, Constant, NoPlanFits, Trainer, machine
from memtrain.plan import ChunkedLogits, DuringBackward, from_dict
from memtrain.units import format_bytes

LLAMA = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
TEXT = "The quick brown fox jumps over the lazy dog. " * 60


def rows(count: int, length: int = 32) -> list[dict[str, Tensor]]:
    ids = [(torch.arange(length) * (3 + number % 5) + number) % 500 for number in range(count)]
    return [{"input_ids": row, "labels": row} for row in ids]


def trainer(**given: Any) -> Trainer:
    settings: dict[str, Any] = {
        "model": LLAMA,
        "data": rows(24),
        "eval_data": rows(5),
        "budget": "64MiB",
        "global_batch_size": 8,
        "steps": 6,
        "optimizer": AdamW(learning_rate=3e-3),
        "schedule": Constant(),
        "progress": False,
    }
    return Trainer(**{**settings, **given})


def test_a_run_learns_fits_and_is_predicted(tmp_path: Path) -> None:
    run = trainer(run_dir=tmp_path / "run", evaluate_every=2)
    result = run.train()
    losses = [row["loss"] for row in result.metrics if "loss" in row]
    assert losses[-1] < losses[0] - 0.3
    assert [step for step, _ in result.evaluations] == [0, 2, 4, 6]
    assert result.evaluations[-1][1] < result.evaluations[0][1] - 0.3
    comparison = result.comparison
    assert comparison.measured.peak_allocated_bytes <= run.budget.device_bytes
    assert abs(comparison.peak_error) < 0.001
    assert set(comparison.predicted.by_kind) == set(comparison.measured.by_kind)


def test_the_run_folder_holds_the_plan_the_metrics_and_a_model_that_reloads(tmp_path: Path) -> None:
    run = trainer(data=str(text_file(tmp_path)), eval_data=rows(3, 64), tokenizer=BYTES, run_dir=tmp_path / "run")
    result = run.train()
    folder = tmp_path / "run"
    assert from_dict(yaml.safe_load((folder / "plan.yaml").read_text())) == run.choice.plan
    assert json.loads((folder / "prediction.json").read_text())["peak_allocated_bytes"] == (
        run.choice.footprint.peak_allocated_bytes
    )
    written = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert written == list(result.metrics)
    assert written[0].keys() == {"step", "epoch", "eval_loss", "eval_perplexity"}
    assert {"step", "loss", "tokens_per_second", "learning_rate"} <= written[-2].keys()
    assert written[-1].keys() == {"step", "epoch", "eval_loss", "eval_perplexity"}
    assert json.loads((folder / "comparison.json").read_text())["measured"]["peak_allocated_bytes"] > 0
    assert (folder / "memory.png").read_bytes().startswith(b"\x89PNG")

    from transformers import AutoModelForCausalLM, AutoTokenizer

    reloaded = AutoModelForCausalLM.from_pretrained(folder / "model")
    again = trainer(model=reloaded, data=rows(8, 64), eval_data=rows(3, 64))
    assert again.evaluate()["eval_loss"] == pytest.approx(result.evaluations[-1][1], abs=1e-6)
    assert AutoTokenizer.from_pretrained(folder / "model").encode("fox") == BYTES.encode("fox")


def test_a_smaller_budget_picks_another_plan_that_fits_and_trains_the_same_losses() -> None:
    first = trainer()
    roomy = first.train()
    peak = roomy.comparison.measured.peak_allocated_bytes
    second = trainer(budget=f"{2 * peak // 3}B")
    tight = second.train()
    assert second.choice.plan != first.choice.plan
    assert tight.comparison.measured.peak_allocated_bytes <= 2 * peak // 3
    losses = [[row["loss"] for row in result.metrics if "loss" in row] for result in (tight, roomy)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert [loss for _, loss in tight.evaluations] == pytest.approx([loss for _, loss in roomy.evaluations], rel=1e-5)


def test_a_module_of_the_users_is_untouched_by_planning_and_trained_in_place() -> None:
    torch.manual_seed(0)
    module = Mlp()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    names = [set(part.__dict__) for part in module.modules()]
    data = [CASES["plain_module"].row(number) for number in range(12)]
    run = trainer(model=module, data=data, eval_data=None, global_batch_size=4, max_grad_norm=None, budget="8MiB")
    assert run.choice.plan.micro_batch_size == 4
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    result = run.train()
    assert run.model is module
    assert not torch.equal(module.state_dict()["norm.weight"], before["norm.weight"])
    assert [set(part.__dict__) for part in module.modules()] == names
    assert result.evaluations == ()


def test_the_same_settings_train_the_same_numbers_twice_in_one_process() -> None:
    first, second = trainer().train(), trainer().train()
    assert [row.get("loss") for row in first.metrics] == [row.get("loss") for row in second.metrics]


def test_constraints_are_kept() -> None:
    run = trainer(
        constraints={"micro_batch_size": 8, "loss": ChunkedLogits(64), "update": "during_backward"}, max_grad_norm=None
    )
    assert (run.choice.plan.micro_batch_size, run.choice.plan.loss) == (8, ChunkedLogits(64))
    assert run.choice.plan.update == DuringBackward()
    assert run.train().metrics[-2]["loss"] < 6.3


def test_epochs_become_steps_and_one_epoch_is_the_default() -> None:
    assert trainer(steps=None, epochs=2).job.steps == 6
    assert trainer(steps=None).job.steps == 3


def test_nothing_is_written_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = trainer(steps=1)
    run.train()
    assert list(tmp_path.iterdir()) == []
    run.save_model("saved")
    assert (tmp_path / "saved" / "model.safetensors").exists()


def test_another_module_is_saved_as_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import load_model

    module = Mlp()
    run = trainer(model=module, data=[CASES["plain_module"].row(0)], eval_data=None, global_batch_size=1, steps=1)
    run.save_model(tmp_path / "saved")
    other = Mlp()
    load_model(other, str(tmp_path / "saved" / "model.safetensors"))
    assert all(torch.equal(tensor, module.state_dict()[name]) for name, tensor in other.state_dict().items())


def text_file(folder: Path) -> Path:
    path = folder / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


# ---------------------------------------------------------------------- refusals


class NoLoss(nn.Module):
    """Returns what no optimizer can minimise."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


class Normalised(NoLoss):
    """A model whose numbers depend on the micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.layer(x)).square().sum()
        return out


POINTS = [{"x": torch.randn(4)} for _ in range(8)]


def test_a_budget_that_nothing_fits_names_the_smallest_plan_and_the_missing_bytes(tmp_path: Path) -> None:
    run = trainer(budget="100KiB", run_dir=tmp_path / "run")
    with pytest.raises(
        NoPlanFits, match=r"no plan fits the budget of 100 KiB \(102,400 bytes\): the smallest found \(micro-batch 1,"
    ):
        run.train()
    assert not (tmp_path / "run").exists()


def test_a_model_without_a_loss_is_refused() -> None:
    run = trainer(model=NoLoss(), data=POINTS, eval_data=None)
    with pytest.raises(
        ValueError, match=r"NoLoss returned a tensor of shape \(1, 2\) where its loss was expected: return a scalar"
    ):
        run.train()


def test_rows_that_the_model_cannot_take_are_refused() -> None:
    with pytest.raises(ValueError, match=r"data has 'y' in its rows, and Mlp.forward takes x, target: name the rows' tensors"):
        trainer(model=Mlp(), data=[{"x": torch.randn(10, 24), "y": torch.randn(10, 24)}], eval_data=None).train()
    with pytest.raises(ValueError, match="data has no 'target' in its rows, and Mlp needs it for its loss"):
        trainer(model=Mlp(), data=[{"x": torch.randn(10, 24)}], eval_data=None).train()


def test_evaluation_rows_unlike_the_training_rows_are_refused() -> None:
    labelled = [{**row, "attention_mask": row["input_ids"]} for row in rows(2, 16)]
    with pytest.raises(
        ValueError,
        match=r"eval_data has torch.int64 of 1 dimensions for 'attention_mask' in its rows and data has nothing, and both must be alike",
    ):
        trainer(eval_data=labelled).train()


def test_evaluation_rows_may_be_longer_than_the_training_rows_and_their_memory_is_predicted() -> None:
    short, long = (trainer(eval_data=rows(2, length)).train().comparison for length in (16, 64))
    assert long.predicted.by_phase["evaluate"] == long.measured.by_phase["evaluate"] > short.measured.by_phase["evaluate"]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"steps": None, "epochs": 0}, "epochs is 0"),
        ({"evaluate_every": 0}, "evaluate_every is 0, and it must be 1 or more steps, or None."),
        ({"evaluate_every": 2, "eval_data": None}, "evaluate_every is 2, and there is nothing to evaluate on: give eval_data."),
        ({"budget": 4}, "budget: 4 is not an amount of memory: give a positive number of bytes with its unit"),
        (
            {"device": "cuda"},
            "device is 'cuda', and it must be a Device: take memtrain.machine.named\\(NAME\\), or leave it out",
        ),
        ({"optimizer": "adamw"}, "optimizer is 'adamw', and it must be an AdamW of memtrain"),
        ({"schedule": "cosine"}, "schedule is 'cosine', and it must be a Constant, a Cosine or a Linear of memtrain"),
        ({"constraints": "keep"}, "constraints are 'keep', and they must map plan fields to values"),
        ({"data": "/nowhere"}, "/nowhere does not exist"),
        ({"seed": -1}, "seed is -1, and it must be a whole number from 0 to 4294967295."),
        ({"optimizer": None, "schedule": Constant(warmup_steps=1.5)}, "warmup_steps is 1.5, and it must be a whole number"),
    ],
)
def test_a_wrong_argument_is_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        trainer(**given)


class Counting(Mlp):
    """Looks at a value of its input, as a data-less tensor has none."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x.detach().numpy()
        return super().forward(x, target)


def test_a_model_that_does_not_run_without_data_is_refused_with_the_reason() -> None:
    data = [CASES["plain_module"].row(number) for number in range(4)]
    with pytest.raises(ValueError, match=r"Counting does not run without data \(\w+: .*\): take what looks at values"):
        trainer(model=Counting(), data=data, eval_data=None).train()


class Naming(Mlp):
    """Looks a layer up by a value of its input."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return super().forward(x * {"1.0": 1.0}[str(x.max())], target)


def test_a_model_that_looks_a_value_up_is_refused_with_the_reason() -> None:
    data = [CASES["plain_module"].row(number) for number in range(4)]
    with pytest.raises(ValueError, match=r"Naming does not run without data \(KeyError: .*\): take what looks at values"):
        trainer(model=Naming(), data=data, eval_data=None).train()


def test_gradients_and_modes_of_the_users_module_are_not_mixed_into_the_run() -> None:
    data = [CASES["plain_module"].row(number) for number in range(4)]

    def first_step(module: Mlp) -> dict[str, float]:
        settings = {"eval_data": data, "global_batch_size": 4, "steps": 1}
        return dict(trainer(model=module, data=data, **settings).train().metrics[1])

    def made() -> Mlp:
        torch.manual_seed(0)
        return Mlp()

    module = made()
    module.eval()
    module.blocks.train()
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 1000.0)
    assert first_step(module)["grad_norm"] == first_step(made())["grad_norm"]
    assert (module.training, module.blocks.training, module.norm.training) == (False, True, False)
    assert all(parameter.grad is None for parameter in module.parameters())


def test_the_run_uses_the_threads_it_was_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    trainer(device=dataclasses.replace(machine.cpu(), threads=3), steps=1).train()
    assert asked == [3]


def test_batch_norm_fixes_the_micro_batch_to_the_whole_batch() -> None:
    run = trainer(model=Normalised(), data=POINTS, eval_data=None, budget="1MiB", max_grad_norm=None)
    assert run.choice.plan.micro_batch_size == 8
    with pytest.raises(
        ValueError, match="norm normalises over the micro-batch, so micro_batch_size 2 would train something else"
    ):
        trainer(model=Normalised(), data=POINTS, eval_data=None, constraints={"micro_batch_size": 2}).train()


def test_recurrent_layers_are_refused() -> None:
    model = NoLoss()
    model.memory = nn.LSTM(4, 4)
    with pytest.raises(
        ValueError, match="memory is a recurrent layer, whose kernels keep memory that no trace shows: take attention"
    ):
        trainer(model=model, data=POINTS, eval_data=None).train()


def test_a_run_explains_itself_unless_told_to_be_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    trainer(steps=1).train()
    assert capsys.readouterr().out == ""
    trainer(steps=1, progress=True).train()
    printed = capsys.readouterr().out
    assert printed.index("rejected" if "rejected" in printed else "planned in") < printed.index("step 1/1")
    assert printed.index("step 1/1") < printed.index("The peak was predicted")


def test_sparse_gradients_are_refused() -> None:
    model = NoLoss()
    model.table = nn.Embedding(4, 4, sparse=True)
    with pytest.raises(
        ValueError, match="table has sparse gradients, whose memory depends on the data: make it with sparse=False"
    ):
        trainer(model=model, data=POINTS, eval_data=None).train()


def test_a_loss_that_is_not_a_number_stops_the_run_with_its_rows() -> None:
    bad = [{"x": torch.full((10, 24), float("nan")), "target": torch.zeros(10, 24)} for _ in range(4)]
    run = trainer(model=Mlp(), data=bad, eval_data=None, global_batch_size=4, steps=1)
    with pytest.raises(
        ValueError,
        match=r"the loss of step 1 is nan; no weight was changed; the loss of rows \d, \d, \d, \d alone is not finite",
    ):
        run.train()


def test_a_used_folder_is_refused_before_anything_is_planned(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("")
    with pytest.raises(ValueError, match="already holds a run"):
        trainer(run_dir=tmp_path)


def test_steps_and_epochs_together_are_refused() -> None:
    with pytest.raises(ValueError, match="steps is 3 and epochs is 1, and only one can hold: leave the other out"):
        trainer(steps=3, epochs=1)


def test_training_twice_is_refused_and_going_on_from_the_weights_is_not() -> None:
    first = trainer(steps=1)
    first.train()
    with pytest.raises(ValueError, match=r"this Trainer has trained already: make another, with model=trainer\.model"):
        first.train()
    again = trainer(steps=1, model=first.model)
    assert again.evaluate() == first.evaluate()


def test_rows_without_tokens_are_counted_as_rows() -> None:
    data = [CASES["plain_module"].row(number) for number in range(4)]
    row = trainer(model=Mlp(), data=data, eval_data=None, global_batch_size=4, steps=1).train().metrics[0]
    assert row["rows_per_second"] == pytest.approx(4 / row["step_seconds"])


def test_evaluating_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="there is nothing to evaluate on: give eval_data to the Trainer"):
        trainer(eval_data=None).evaluate()


def test_the_budget_is_the_smallest_of_asked_installed_and_free() -> None:
    run = trainer(budget="900TiB")
    assert [limit.source for limit in run.budget.limits] == ["asked for", "installed", "free now"]
    assert run.budget.device_bytes < 900 * 2**40, format_bytes(run.budget.device_bytes)
