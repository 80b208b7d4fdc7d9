"""What an op raises in a call without gradients reaches the program with its type and its words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import amp_fx.compiler.compiling


class OwnError(ValueError):
    """What a program catches."""


@torch.library.custom_op("amp_fx_raised::checked", mutates_args=())
def checked(x: Tensor) -> Tensor:
    if bool(x.isfinite().all()):
        raise OwnError("the words of the program")
    return x.clone()


checked.register_fake(torch.empty_like)


def compiled(program: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(program, backend="amp_fx", options={"profile": "off", "strict": True})


@torch.no_grad()
def test_an_error_of_a_custom_op_reaches_the_caller() -> None:
    with pytest.raises(OwnError, match=r"^the words of the program$"):
        compiled(lambda x: checked(x @ x) @ x)(torch.randn(4, 4))


@torch.no_grad()
def test_an_error_of_linear_algebra_reaches_the_caller() -> None:
    with pytest.raises(
        torch.linalg.LinAlgError,  # pyright: ignore[reportPrivateImportUsage]
        match="not positive-definite",
    ):
        compiled(lambda x: torch.linalg.cholesky(x) @ x)(-torch.eye(4))


#: program -> whether its kernels are called from C++
CALLED: dict[str, tuple[Callable[[Tensor], Any], bool]] = {
    "product": (lambda x: x @ x, True),
    "norm": (lambda x: torch.linalg.norm(x @ x), True),
    "softmax": (lambda x: (x @ x).softmax(-1), True),
    "nothing to cast": (lambda x: x.exp() + 1, True),
    "custom op": (lambda x: checked(x @ x), False),
    "custom op alone": (lambda x: checked(x), False),
    "in a branch": (
        lambda x: torch.cond(x.sum() > 0, lambda a: checked(a @ a), lambda a: a @ a, (x,)),
        False,
    ),
    "inverse": (lambda x: torch.linalg.inv(x) @ x, False),
    "inverse by its old name": (lambda x: torch.inverse(x) @ x, False),
    "solve": (lambda x: torch.linalg.solve(x, x) @ x, False),
    "cholesky": (lambda x: torch.cholesky(x) @ x, False),
    "eigenvalues": (lambda x: torch.linalg.eigvalsh(x @ x), False),
    "multinomial": (lambda x: torch.multinomial((x @ x).softmax(-1), 1), False),
}


@pytest.mark.parametrize("name", CALLED)
def test_calls_are_from_cpp_where_nothing_raises_an_error_of_its_own(name: str) -> None:
    program, in_cpp = CALLED[name]
    configs = []

    def keep(gm: Any, _: Sequence[Any], config: dict[str, Any]) -> Any:
        configs.append(config)
        return gm.forward

    compiling = mock.patch.object(amp_fx.compiler.compiling, "compile_with_inductor", keep)
    with compiling, torch.no_grad():
        try:
            compiled(program)(torch.eye(4) * 2)
        except OwnError:
            assert "custom" in name or "branch" in name
    assert [config.get("cpp_wrapper", False) for config in configs] == [in_cpp]
