"""An HTTP server of a compiled model: it batches requests that wait together, and warms up before the first one.

    pip install ".[serve]" && cd examples && python -m uvicorn --factory serve:app --port 8000
    curl localhost:8000/scores -H 'Content-Type: application/json' -d '{"tokens": [3, 1, 4]}'
    curl localhost:8000/latency

The model is a small BERT with random weights. ``python serve.py --make FILE`` writes it as a package, which is called
where ``SERVE_PACKAGE`` names it. ``SERVE_LARGEST`` is the largest batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import quantiles
from typing import Any

import torch
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel
from torch import Tensor, nn

import amp_fx

#: requests are padded to this many tokens, and at most this many are one batch
LENGTH, LARGEST = 64, int(os.environ.get("SERVE_LARGEST", "16"))
#: of the model
LAYERS, VOCABULARY = 2, 1000

#: tokens and which of them are no padding, each (requests, LENGTH) int64 -> scores, (requests, classes) fp32
Model = Callable[[Tensor, Tensor], Tensor]


class Scores(nn.Module):
    """A BERT that takes two tensors and returns one."""

    def __init__(self) -> None:
        super().__init__()
        import hugging_face

        self.bert = hugging_face.bert(
            layers=LAYERS, width=384, heads=12, hidden=1536, vocab=VOCABULARY, length=LENGTH
        )

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return self.bert(input_ids=tokens, attention_mask=mask).logits


def batch_of(requests: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Tokens and mask of requests, padded on the right."""
    tokens = torch.zeros(len(requests), LENGTH, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for row, request in enumerate(requests):
        tokens[row, : len(request)] = torch.tensor(request)
        mask[row, : len(request)] = 1
    return tokens, mask


def load() -> Model:
    """The model, compiled for a batch of one and for any other size, or the package."""
    if path := os.environ.get("SERVE_PACKAGE"):
        model = torch._inductor.aoti_load_package(path)
    else:
        torch.manual_seed(0)
        model = amp_fx.compile(Scores().eval())  # of your own plan: plan="int8.json"
    with torch.inference_mode():
        for size in (LARGEST, 1):
            tokens, mask = batch_of([[1] * LENGTH] * size)
            if size > 1:
                for each in (tokens, mask):
                    torch._dynamo.mark_dynamic(each, 0)
            model(tokens, mask)
    return model


class Batches:
    """Calls the model in one thread, on all that waits when the call before has ended. Of one event loop."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._waiting: list[tuple[list[int], asyncio.Future[list[float]]]] = []
        self._task: asyncio.Task[None] | None = None

    async def load(self) -> None:
        """Loads and warms up the model, in the thread that will call it: torch's threads belong to it."""
        self._model = await asyncio.get_running_loop().run_in_executor(self._thread, load)

    async def scores(self, request: list[int]) -> list[float]:
        answer: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._answer_all())
        return await answer

    async def _answer_all(self) -> None:
        while self._waiting:
            taken, self._waiting = self._waiting[:LARGEST], self._waiting[LARGEST:]
            call = self._call, [request for request, _ in taken]
            try:
                rows = await asyncio.get_running_loop().run_in_executor(self._thread, *call)
            except Exception as error:  # the requests of this batch get it
                rows = [error] * len(taken)
            for (_, answer), row in zip(taken, rows, strict=True):
                if answer.cancelled():  # the client has gone
                    continue
                answer.set_exception(row) if isinstance(row, Exception) else answer.set_result(row)

    @torch.inference_mode()  # it holds for the thread
    def _call(self, requests: list[list[int]]) -> list[list[float]]:
        return self._model(*batch_of(requests)).tolist()

    def close(self) -> None:
        self._thread.shutdown()


class Request(BaseModel):
    tokens: list[int]


def app() -> FastAPI:
    batches = Batches()
    seconds: deque[float] = deque(maxlen=10_000)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await batches.load()  # the server takes no request before
        yield
        batches.close()

    server = FastAPI(lifespan=lifespan)

    @server.post("/scores")
    async def scores(request: Request) -> list[float]:
        begin = time.perf_counter()
        if not 0 < len(request.tokens) <= LENGTH or not set(request.tokens) <= set(range(VOCABULARY)):
            raise HTTPException(422, f"tokens: 1 to {LENGTH} numbers from 0 to {VOCABULARY - 1}")
        result = await batches.scores(request.tokens)
        seconds.append(time.perf_counter() - begin)
        return result

    @server.get("/latency")
    async def latency() -> dict[str, Any]:
        """Milliseconds within which half, nine tenths and 99 of 100 of the last requests were answered."""
        if len(seconds) < 2:
            return {"requests": len(seconds)}
        cuts = quantiles(seconds, n=100, method="inclusive")
        return {
            "requests": len(seconds),
            **{f"p{cut}_ms": round(1e3 * cuts[cut - 1], 2) for cut in (50, 90, 99)},
        }

    return server


def make(path: str) -> None:
    """Writes the package of the same model, which takes any batch up to the largest."""
    torch.manual_seed(0)
    size = torch.export.Dim("size", max=LARGEST)
    shapes = {name: {0: size} for name in ("tokens", "mask")}
    program = amp_fx.export(
        Scores().eval(), batch_of([[1] * LENGTH] * 2), dynamic_shapes=shapes, profile="auto"
    )
    amp_fx.package(program, path)


if __name__ == "__main__":
    if sys.argv[1:2] != ["--make"] or len(sys.argv) != 3:
        raise SystemExit("usage: python serve.py --make FILE.pt2")
    make(sys.argv[2])
