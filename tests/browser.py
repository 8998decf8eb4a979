"""Drives a headless Chromium over its debugging pipe. Needs no other packages."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: The executable's names in Debian, and Chrome's.
_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")

_TIMEOUT_S = 60


def find_chromium() -> str | None:
    """Returns the path of the installed browser, or None."""
    return next(filter(None, map(shutil.which, _PROGRAMS)), None)


class Browser:
    """One tab.

    Args:
        commands: file descriptor to which the browser listens.
        answers: file descriptor to which the browser writes.
    """

    def __init__(self, commands: int, answers: int) -> None:
        self._commands = os.fdopen(commands, "wb", buffering=0)
        self._answers = os.fdopen(answers, "rb", buffering=0)
        self._buffer = b""
        self._last_id = 0
        self._session: str | None = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self._call("Page.enable")

    def close(self) -> None:
        """Ends the browser."""
        self._session = None
        self._call("Browser.close")
        self._commands.close()
        self._answers.close()

    def set_width(self, width: int) -> None:
        """Sets the width of the window in CSS pixels, with the viewport of a phone."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 600},
        )

    def set_color_scheme(self, scheme: str) -> None:
        """Sets the preferred color scheme: "light" or "dark"."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self._call("Emulation.setEmulatedMedia", features=[feature])

    def open(self, page: Path) -> None:
        """Opens a file and waits until it has loaded."""
        self._call("Page.navigate", url=page.resolve().as_uri())
        while self._receive().get("method") != "Page.loadEventFired":
            pass

    def evaluate(self, script: str) -> Any:
        """Returns the value of a JavaScript expression, which may be a promise."""
        found = self._call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._last_id:
            pass
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._answers], [], [], _TIMEOUT_S)[0]:
                raise TimeoutError("Chromium does not answer")
            received = self._answers.read(1 << 16)
            if not received:
                raise EOFError("Chromium ended")
            self._buffer += received
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found


@contextmanager
def open_browser(program: str, profile: Path) -> Iterator[Browser]:
    """Starts the browser with a new profile in this directory, and ends it after the block."""
    command_end, commands = os.pipe()
    answers, answer_end = os.pipe()
    options = "--headless --disable-gpu --no-first-run --disable-dev-shm-usage"
    if os.geteuid() == 0:
        options += " --no-sandbox"
    # The browser reads commands from descriptor 3 and answers on descriptor 4.
    shell = (
        f'exec "$0" {options} --user-data-dir="$1" --remote-debugging-pipe '
        f"3<&{command_end} 4>&{answer_end}"
    )
    process = subprocess.Popen(
        ["bash", "-c", shell, program, str(profile)],
        pass_fds=(command_end, answer_end),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(command_end)
    os.close(answer_end)
    try:
        browser = Browser(commands, answers)
        yield browser
        browser.close()
        process.wait(timeout=30)
    finally:
        process.kill()
        process.wait()
