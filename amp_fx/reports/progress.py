"""A line on the terminal while something takes long."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

__all__ = ["progress"]

#: seconds until the line appears
_PATIENCE = 5.0


@contextlib.contextmanager
def progress(text: str) -> Iterator[None]:
    """Shows a text and the seconds that have passed, from the fifth on; where stderr is no terminal, nothing.

    Args:
        text: what is going on.
    """
    if not sys.stderr.isatty():
        yield
        return
    start, done = time.monotonic(), threading.Event()

    def show() -> None:
        wait = _PATIENCE
        while not done.wait(wait):
            print(f"\r{text}, {time.monotonic() - start:.0f} s", end="", file=sys.stderr, flush=True)
            wait = 1.0

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        if time.monotonic() - start > _PATIENCE:
            # the line goes
            print("\r\033[K", end="", file=sys.stderr, flush=True)
