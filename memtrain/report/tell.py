"""What a run has to say while it runs: above the progress bar or to the log, and into the run folder."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime

from memtrain.metrics import RunFolder
from memtrain.report.terminal import TrainingProgress

Tell = Callable[[str], None]
_LOGGER = logging.getLogger("memtrain")


def teller(folder: RunFolder | None, bar: TrainingProgress | None, *, silent: bool = False) -> Tell:
    """What takes a sentence for the person who reads.

    Args:
        folder: gets it as a line of ``events.jsonl``, with the time.
        bar: above which it is printed; None for a warning of the logger ``memtrain``.
        silent: whether nothing is said, as in all processes but the first.
    """

    def tell(sentence: str) -> None:
        if silent:
            return
        if bar is None:
            _LOGGER.warning(sentence)
        else:
            bar.note(sentence)
        if folder is not None:
            # What cannot be written here has been said all the same.
            with suppress(ValueError):
                folder.log(
                    {"time": datetime.now().astimezone().isoformat(timespec="seconds"), "said": sentence}, "events.jsonl"
                )

    return tell
