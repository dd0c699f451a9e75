"""``python -m memtrain [recipe=NAME] [key=value …]``: plan a training step inside a memory budget, then train with it.

Every job of the command line is composed and checked before the first one loads torch, so a mistake in any of them is
reported at once. Exit codes: 0 done, 1 a job failed, 2 the command line or a recipe is wrong; of a run that was told to stop 130
(Ctrl-C) or 143 (SIGTERM), saved unless Ctrl-C came twice, and 75 where run.stop_seconds were not enough to save.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from omegaconf import OmegaConf

from memtrain.command_line import compose_jobs, help_text, parser
from memtrain.config import check_folders, settings
from memtrain.settings import Settings

# How long torch's threads spin while they wait for each other, in turns. By libgomp's default two runs on one machine keep each
# other off the cores: benchmarks/shared_machine.py.
SPIN_COUNT = 1000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (``sys.argv`` by default) and return its exit code."""
    given = parser().parse_intermixed_args(arguments)
    if given.help:
        print(help_text())
        return 0
    try:
        configs = compose_jobs(given.overrides, multirun=given.multirun)
        if given.cfg:
            print("---\n".join(OmegaConf.to_yaml(cfg) for cfg in configs), end="")
            return 0
        jobs = [(settings(cfg), OmegaConf.to_yaml(cfg, resolve=True)) for cfg in configs]
        for job, _ in jobs:
            check_folders(job)
    except ValueError as error:
        print(f"memtrain: {error}", file=sys.stderr)
        return 2
    try:
        return _run(jobs)
    except KeyboardInterrupt as stopped:
        # A run that could save has said so.
        if not stopped.args:
            print("\nmemtrain: interrupted.", file=sys.stderr)
        return 130


def _run(jobs: Sequence[tuple[Settings, str]]) -> int:
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
    # torch's C++ warnings are for its developers; one of them comes with every profile of a model that was loaded from a file.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if hasattr(signal, "SIGUSR1"):
        # Until a run listens it has nothing to save, and is not to end by it.
        signal.signal(signal.SIGUSR1, lambda *_: None)
    from memtrain import machine
    from memtrain.recipe import run_recipe  # loads torch, which reads these variables

    exit_code = 0
    for number, (job, config_yaml) in enumerate(jobs):
        try:
            run_recipe(job, config_yaml)
        except ValueError as error:
            # A budget that is too small for one job of a sweep says nothing about the others.
            which = f"job {number}: " if len(jobs) > 1 else ""
            print(f"memtrain: {which}{error}", file=sys.stderr)
            exit_code = 1
            # The next job would wait for processes that are still in this one.
            if machine.processes().ranks > 1:
                return exit_code
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
