"""The server of ``examples/serve.py`` starts and answers: no code is generated, its model runs op by op."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import amp_fx
from amp_fx.instruments.step import relative_error

pytest.importorskip("fastapi", reason="the server of examples/serve.py needs FastAPI: pip install '.[test]'")

from fastapi.testclient import TestClient

import serve

#: more than one batch of them, of all lengths
REQUESTS = [[1 + row] * (1 + row % serve.LENGTH) for row in range(2 * serve.LARGEST + 3)]


def ask(client: TestClient, request: list[int]) -> list[float]:
    answer = client.post("/scores", json={"tokens": request})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.usefixtures("op_by_op")
def test_the_server_answers_many_requests_at_once_and_compiles_nothing_after_its_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serve, "LAYERS", 1)
    rows, batch_of = list[int](), serve.batch_of

    def counted(requests: Any) -> tuple[Tensor, Tensor]:
        rows.append(len(requests))
        return batch_of(requests)

    # the process has run other tests
    torch._dynamo.reset()
    counters.clear()
    with TestClient(serve.app()) as client:
        graphs = counters["stats"]["unique_graphs"]
        assert graphs == 2, "one for a single request, one for all other sizes"
        with monkeypatch.context() as patch, ThreadPoolExecutor(8) as clients:
            patch.setattr(serve, "batch_of", counted)
            found = list(clients.map(lambda request: ask(client, request), REQUESTS))
        # a bad request and a model that fails are answers, and the server goes on
        for tokens in ([], [serve.VOCABULARY], [1] * (serve.LENGTH + 1)):
            assert client.post("/scores", json={"tokens": tokens}).status_code == 422
        with monkeypatch.context() as patch:
            patch.setattr(serve, "batch_of", lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                client.post("/scores", json={"tokens": [1]})
        assert len(ask(client, [1])) == 4
        latency = client.get("/latency").json()
    assert counters["stats"]["unique_graphs"] == graphs
    assert sum(rows) == len(REQUESTS)
    assert 1 < max(rows) <= serve.LARGEST, "nothing was batched"
    assert latency["requests"] == len(REQUESTS) + 1
    assert 0 < latency["p50_ms"] <= latency["p90_ms"] <= latency["p99_ms"]
    torch.manual_seed(0)
    exact = serve.Scores().eval().double()
    with torch.inference_mode():
        scores = exact(*batch_of(REQUESTS))
    # scores of another request differ by more
    assert scores[:-1].dist(scores[1:]) > 0.1 * scores.norm()
    assert relative_error({"": torch.tensor(found).double()}, {"": scores}) < 0.02


@pytest.mark.slow
def test_the_package_of_the_example_takes_any_number_of_requests(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a real package is that of tests/cpu/exporting
    monkeypatch.setattr(amp_fx, "package", torch.export.save)
    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda path: torch.export.load(path).module())
    serve.make(path := str(tmp_path / "scores.pt2"))
    monkeypatch.setenv("SERVE_PACKAGE", path)
    model = serve.load()
    for size in (2, 3, serve.LARGEST):
        assert model(*serve.batch_of(REQUESTS[:size])).shape == (size, 4)
