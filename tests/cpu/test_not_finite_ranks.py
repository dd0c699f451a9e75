"""Several processes leave a step out together. By itself, so that the processes import no more than they train with."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from toys import CASES, Mlp, batch

from memtrain.job import Job
from memtrain.plan import DataParallel, Plan
from memtrain.run import prepare

JOB = Job(model="toy", global_batch_size=4, steps=2)


def in_each_process(rank: int, folder: Path) -> None:
    """A step in which the rows of the second process alone are spoilt, and a sound one."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = Mlp()
    run = prepare(JOB, Plan(micro_batch_size=2, sharding=DataParallel(2)), model)
    told = []
    for factor in (math.nan, 1.0):
        rows = batch(CASES["plain_module"], 2, 2 * rank)
        rows["x"] *= factor if rank else 1.0
        before = [weight.detach().clone() for weight in model.parameters()]
        result = run.step([rows])
        same = all(map(torch.equal, before, model.parameters()))
        assert result.grad_norm is not None
        told.append((result.loss.item(), result.grad_norm.item(), result.updated, same))
    torch.save(told, folder / f"{rank}.pt")
    run.release()
    dist.destroy_process_group()


def test_processes_leave_a_step_out_together_whichever_of_them_has_the_row(tmp_path: Path) -> None:
    mp.spawn(in_each_process, args=(tmp_path,), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    # As text, in which NaN is equal to itself.
    assert str(first) == str(second)
    (loss, norm, updated, same), (_, sound_norm, then_updated, still_same) = first
    assert (str(loss), str(norm), updated, same) == ("nan", "nan", False, True)
    assert (math.isfinite(sound_norm), then_updated, still_same) == (True, True, False)
