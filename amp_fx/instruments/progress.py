"""The work at hand of what may take longer than two seconds, said on a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(name: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """A line on a terminal where tqdm is installed, and nothing elsewhere; gone at the end.

    Yields a function of the work that begins, in words, and how many of ``total`` parts are done since the last call.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda what, done=0: None
        return
    form = None if total else "{desc} [{elapsed}]"
    with tqdm(desc=name, total=total, disable=None, leave=False, bar_format=form, unit="batch") as bar:

        def say(what: str, done: int = 0) -> None:
            bar.update(done)
            bar.set_description(f"{name}: {what}")

        yield say
