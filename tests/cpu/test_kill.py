"""A run that is killed and resumed ends as the undisturbed one; ``benchmarks/kill_test.py`` does it two hundred times."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import kill_places
import pytest
from kill_test import killed, left_over
from left_behind import differences, last_taken, logged

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the runs are forked")


def test_a_run_that_is_killed_and_resumed_ends_as_the_undisturbed_one() -> None:
    found = killed("plain", 6, seed=1)
    assert found["troubles"] == []
    assert (sum(found["kills"].values()), found["lost"]) == (6, {})


def test_a_step_that_is_missing_twice_or_another_is_found() -> None:
    undisturbed: dict[str, Any] = {"steps logged": [1, 2, 3], "rows of step 3": [5, 2], "line 3 of the metrics": {"loss": 1.0}}
    assert differences(undisturbed, undisturbed) == []
    assert differences(undisturbed, {**undisturbed, "steps logged": [1, 2, 2, 3]}) == [
        "steps logged: [1, 2, 2, 3] where the undisturbed run has [1, 2, 3]"
    ]
    assert differences(undisturbed, {"steps logged": [1, 2, 3], "rows of step 3": [5, 2]}) == [
        "line 3 of the metrics: nothing where the undisturbed run has {'loss': 1.0}"
    ]


def test_the_rows_of_a_step_are_those_of_its_last_taking() -> None:
    taken = [(1, [1, 2]), (1, [3, 4]), (2, [5]), (1, [3, 4]), (1, [1, 2]), (2, [6])]
    # Of five rows the second step has the one that is left.
    assert last_taken(taken, 5, 4) == {1: [3, 4, 1, 2], 2: [6]}


def test_what_is_logged_is_read_without_times_and_without_a_line_that_is_cut_short(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    lines = [{"step": 1, "loss": 2.0, "step_seconds": 0.1}, {"step": 1, "eval_loss": 3.0}]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 2, "lo')
    assert logged(tmp_path) == [{"step": 1, "loss": 2.0}]
    assert logged(tmp_path, evaluations=True) == [{"step": 1, "loss": 2.0}, {"step": 1, "eval_loss": 3.0}]


def test_a_process_that_an_attempt_leaves_behind_is_found() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True) as left:
        assert left_over([left.pid], seconds=0.1) == [f"the attempt in process {left.pid} left another behind"]
        left.kill()
    assert left_over([left.pid], seconds=5.0) == []


HALF = """
import sys
from kill_places import PLACES, Aim, HalfWritten

with HalfWritten(open(sys.argv[1], "wb"), Aim(PLACES[0], 2), PLACES[0]) as stream:
    stream.write(b"whole ")
    stream.write(b"halfhalf")
"""


def test_a_process_ends_half_way_through_the_write_that_it_is_aimed_at(tmp_path: Path) -> None:
    file, scripts = tmp_path / "file", Path(kill_places.__file__).parent
    done = subprocess.run([sys.executable, "-c", HALF, str(file)], env={**os.environ, "PYTHONPATH": str(scripts)})
    assert done.returncode == -signal.SIGKILL
    assert file.read_bytes() == b"whole half"
