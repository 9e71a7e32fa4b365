"""Ending a run on SIGTERM or SIGINT without losing it."""

import contextlib
import dataclasses
import os
import signal
import threading
from collections.abc import Iterator


@dataclasses.dataclass
class Stop:
    """Whether, and by which signal, the program was asked to stop."""

    by: str | None = None

    @property
    def requested(self) -> bool:
        """Whether a signal came."""
        return self.by is not None


@contextlib.contextmanager
def stop_on_signal() -> Iterator[Stop]:
    """Turns the first SIGTERM or SIGINT into a request; the second one ends the program at once.

    Yields:
        The request. Outside the main thread, where no handler can be set, it never comes.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number, frame):
        del frame
        if stop.requested:
            signal.signal(number, before[number])
            os.kill(os.getpid(), number)
        stop.by = signal.Signals(number).name

    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
