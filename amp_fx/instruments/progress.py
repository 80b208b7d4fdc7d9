"""The work in progress where it may take long, and the seconds that have passed, in a line on a terminal."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

#: seconds until the line appears
PATIENCE = 2.0


@contextlib.contextmanager
def progress(text: str, total: int = 0, unit: str = "batches") -> Iterator[Callable[..., None]]:
    """Shows a text and the seconds that have passed, from the second one on; nothing where stderr is no terminal.

    Yields a function of the part that begins, in words, and how many of ``total`` units are done since the last call.
    Work inside other work of the thread has its words behind those of the other.
    """
    if not sys.stderr.isatty():
        yield lambda what, done=0: None
        return
    line, work = _here.line, _Work(text, total, unit)

    def say(what: str, done: int = 0) -> None:
        is_new, work.part = what != work.part, what
        work.done += done
        # units may be many a second
        if is_new:
            line.show_if_late()

    is_outermost = not line.works
    line.works.append(work)
    try:
        if not is_outermost:
            line.show_if_late()
        with line.shown() if is_outermost else contextlib.nullcontext():
            yield say
    finally:
        line.works.remove(work)


@dataclass(eq=False)
class _Work:
    """A text, the part of the work that is being done, and how many of its units are."""

    text: str
    total: int
    unit: str
    part: str = ""
    done: int = 0

    def __str__(self) -> str:
        words = f"{self.text}: {self.part}" if self.part else self.text
        return f"{words}, {self.done} of {self.total} {self.unit}" if self.total else words


@dataclass
class _Line:
    """The line of a thread's works in progress, each inside the one before it."""

    works: list[_Work] = field(default_factory=list)
    start: float = 0.0

    def show(self) -> None:
        seconds = f", {time.monotonic() - self.start:.0f} s"
        text = ": ".join(map(str, [*self.works]))
        # a line that is wrapped would stay
        room = shutil.get_terminal_size().columns - len(seconds) - 1
        print(f"\r\033[K{text[:room]}{seconds}", end="", file=sys.stderr, flush=True)

    def show_if_late(self) -> None:
        """Shows it once it is there, without waiting for the next second."""
        if time.monotonic() - self.start >= PATIENCE:
            self.show()

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Inside, another thread shows the line each second; at last the line goes."""
        self.start, ended = time.monotonic(), threading.Event()

        def repeat() -> None:
            wait, end = PATIENCE, ""
            while not ended.wait(wait):
                self.show()
                wait, end = 1.0, "\r\033[K"
            print(end, end="", file=sys.stderr, flush=True)

        thread = threading.Thread(target=repeat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


class _Here(threading.local):
    """The line of each thread."""

    def __init__(self) -> None:
        self.line = _Line()


_here = _Here()
