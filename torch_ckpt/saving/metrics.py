"""What a save took: as an object, and as a trace for Chrome or Perfetto."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from torch_ckpt._base.log import LOGGER

#: (lane, name, begin, end): a stretch of work, in seconds since the call.
Span = tuple[str, str, float, float]


@dataclass
class SaveMetrics:
    """One rank's part in one save. Times are seconds, sizes bytes.

    Attributes:
        path: directory of the checkpoint.
        rank: this process's.
        blocked_s: the caller was kept waiting: the call itself, and waits for ``staged``.
        planning_s: until this rank knew what to write, other ranks' planning included.
        staging_s: from the first byte copied until no source was needed any more.
        write_s, fsync_s: thread time in calls of the system; threads that work at once add up.
        checksum_s: thread time.
        written_s: from the call until this rank's files were written and fsynced.
        commit_s: from then until the checkpoint was visible and durable, waits for others included.
        total_s: from the call until then.
        python_s: processor time for which the background has held the GIL.
        bytes: written by this rank.
        messages, message_bytes: that this rank has sent to others, signs of life not counted.
        interval_s: since the call of the save before; 0 for the first.
    """

    path: str = ""
    rank: int = 0
    blocked_s: float = 0.0
    planning_s: float = 0.0
    staging_s: float = 0.0
    checksum_s: float = 0.0
    write_s: float = 0.0
    fsync_s: float = 0.0
    written_s: float = 0.0
    commit_s: float = 0.0
    total_s: float = 0.0
    python_s: float = 0.0
    bytes: int = 0
    messages: int = 0
    message_bytes: int = 0
    interval_s: float = 0.0

    def log(self) -> None:
        """One line at level INFO."""
        LOGGER.info(
            "saved %.3f GB to %s on rank %d in %.3f s "
            "(blocked %.3f s, staging %.3f s, commit %.3f s)",
            self.bytes / 1e9,
            self.path,
            self.rank,
            self.total_s,
            self.blocked_s,
            self.staging_s,
            self.commit_s,
            extra={"metrics": asdict(self)},
        )


def write_trace(path: str | os.PathLike[str], rank: int, spans: Iterable[Span]) -> None:
    """Writes spans in the format of Chrome's trace viewer; one process for each rank.

    Raises:
        OSError: the file cannot be written.
    """
    lanes: dict[str, int] = {}
    events: list[dict[str, object]] = []
    for lane, name, begin, end in spans:
        if lane not in lanes:
            lanes[lane] = len(lanes)
            events.append(
                {"ph": "M", "name": "thread_name", "pid": rank, "tid": lanes[lane]}
                | {"args": {"name": lane}}
            )
        events.append(
            {"ph": "X", "name": name, "pid": rank, "tid": lanes[lane]}
            | {"ts": begin * 1e6, "dur": (end - begin) * 1e6}
        )
    events.append(
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    )
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
