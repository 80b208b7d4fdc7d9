"""The work at hand of what may take long, and the seconds that have passed, in a line on a terminal."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

#: seconds until the line appears
PATIENCE = 5.0


@contextlib.contextmanager
def progress(text: str, total: int = 0) -> Iterator[Callable[..., None]]:
    """Shows a text and the seconds that have passed, from the fifth on; nothing where stderr is no terminal.

    Yields a function of the work that begins, in words, and how many of ``total`` batches are done since the last call.
    """
    if not sys.stderr.isatty():
        yield lambda what, done=0: None
        return
    start, ended, line, batches = time.monotonic(), threading.Event(), text, 0

    def show() -> None:
        print(f"\r\033[K{line}, {time.monotonic() - start:.0f} s", end="", file=sys.stderr, flush=True)

    def say(what: str, done: int = 0) -> None:
        nonlocal line, batches
        batches += done
        line = f"{text}: {what}" + (f", {batches} of {total} batches" if total else "")
        if time.monotonic() - start >= PATIENCE:
            show()

    def repeat() -> None:
        wait, end = PATIENCE, ""
        while not ended.wait(wait):
            show()
            # at last the line goes
            wait, end = 1.0, "\r\033[K"
        print(end, end="", file=sys.stderr, flush=True)

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield say
    finally:
        ended.set()
        thread.join()
