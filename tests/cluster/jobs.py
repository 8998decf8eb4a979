"""Jobs on hosts, one on each, that a test starts, stops in the middle of a save, and kills.

``python -m tests.cluster.jobs`` runs on a host. It reads commands, one JSON object a line, and
prints a reply to each. A job is a fork of this process, so that it starts in milliseconds:

- ``{"do": "start", "root": "/root", "takeover": false}``: starts a job, which restores. Replies
  ``restored`` with the step and the values, or ``refused`` with the error.
- ``{"do": "save", "value": 7}``: saves the next step. Replies ``saved``, or ``error``. With
  ``"die": 17`` or ``"freeze": 17``, the job kills or stops itself at the 17th system call of the
  save, if there are so many, and the reply is ``died`` or ``frozen``.
- ``{"do": "thaw"}``: continues a frozen job. Replies as ``save`` does.
- ``{"do": "end"}``: closes the manager. Replies ``ended``.
- ``{"do": "kill"}``: kills the job. Replies ``died``.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from typing import Any

import torch

from torch_ckpt import CheckpointManager, _core
from torch_ckpt.errors import CheckpointError
from torch_ckpt.steps import lease_file, root_lease

Reply = dict[str, Any]

#: Times of leases: a twentieth of the usual ones.
_TIMES = root_lease.Times(renew=0.5, expiry=3.0, poll=0.05)

_SIZE = 1000


class _Job:
    """A training run that saves two tensors with one value each."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._manager: CheckpointManager | None = None
        self._step = 0

    def serve(self) -> None:
        with self._connection.makefile() as commands:
            for line in commands:
                command = json.loads(line)
                self._reply(getattr(self, command.pop("do"))(**command))

    def _reply(self, reply: Reply) -> None:
        self._connection.sendall(json.dumps(reply).encode() + b"\n")

    def start(self, root: str, takeover: bool) -> Reply:
        try:
            self._manager = CheckpointManager(root, interval=1, keep=3, takeover=takeover)
        except CheckpointError as error:
            return {"refused": str(error)}
        state = {name: torch.full((_SIZE,), -1.0) for name in ("a", "b")}
        self._step = self._manager.restore(state)
        values = sorted({value for tensor in state.values() for value in tensor.tolist()})
        return {"restored": self._step, "values": values}

    def save(self, value: float, die: int = 0, freeze: int = 0) -> Reply:
        assert self._manager is not None
        points = 0

        def reach(_operation: str, _path: str) -> int:
            nonlocal points
            points += 1
            if points == die:
                os.kill(os.getpid(), signal.SIGKILL)
            if points == freeze:
                self._reply({"frozen": self._step + 1})
                os.kill(os.getpid(), signal.SIGSTOP)
            return 0

        try:
            with _core.FaultHook(reach):
                state = {name: torch.full((_SIZE,), value) for name in ("a", "b")}
                self._manager.save(self._step + 1, state)
                self._manager.wait_until_finished()
        except (CheckpointError, OSError) as error:
            return {"error": f"{type(error).__name__}: {error}"}
        self._step += 1
        return {"saved": self._step}

    def end(self) -> Reply:
        if self._manager is not None:
            self._manager.close()
        return {"ended": self._step}


class _Host:
    """Forks one job at a time."""

    def __init__(self) -> None:
        self._pid = 0
        self._connection: socket.socket | None = None

    def perform(self, command: dict[str, Any]) -> Reply:
        if command["do"] == "start":
            self._fork()
        if command["do"] == "kill":
            os.kill(self._pid, signal.SIGKILL)
            return self._bury()
        if command["do"] == "thaw":
            os.kill(self._pid, signal.SIGCONT)
        else:
            self._send(command)
        reply = self._receive()
        if "frozen" in reply:
            os.waitpid(self._pid, os.WUNTRACED)
        if "ended" in reply or "refused" in reply:
            self._bury()
        return reply

    def _fork(self) -> None:
        own, of_job = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            own.close()
            code = 1
            try:
                _Job(of_job).serve()
                code = 0
            finally:
                os._exit(code)
        of_job.close()
        self._connection = own

    def _send(self, command: dict[str, Any]) -> None:
        assert self._connection is not None
        self._connection.sendall(json.dumps(command).encode() + b"\n")

    def _receive(self) -> Reply:
        assert self._connection is not None
        data = b""
        while not data.endswith(b"\n"):
            received = self._connection.recv(4096)
            if not received:
                return self._bury()
            data += received
        reply: Reply = json.loads(data)
        return reply

    def _bury(self) -> Reply:
        """Waits for the end of the job."""
        assert self._connection is not None
        self._connection.close()
        _pid, status = os.waitpid(self._pid, 0)
        return {"died": status}


def main() -> None:
    defaults = root_lease.RootLease.__init__.__kwdefaults__
    assert defaults is not None
    defaults["times"] = _TIMES
    lease_file._LOCK_SECONDS /= 20
    lease_file._ABANDONED_SECONDS /= 20
    host = _Host()
    for line in sys.stdin:
        print(json.dumps(host.perform(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
