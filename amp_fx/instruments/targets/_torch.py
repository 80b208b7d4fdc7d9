"""Every private API that stands between a machine without a GPU and code for one, in one place.

Tried on torch 2.13.0 (CPU build) and 2.14.1 (CUDA build, no driver). Nothing here is run on data: what is patched are
questions that AOTAutograd, Inductor and Triton ask about a device while they compile.
"""

# what is imported here is private on purpose
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
import ctypes
import pickle
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.fx as fx
from torch._dynamo import device_interface
from torch._functorch._aot_autograd import runtime_wrappers
from torch._guards import CompileContext, CompileId, TracingContext, compile_context, tracing
from torch._inductor import config as inductor_config
from torch._inductor import constant_folding
from torch._inductor.fx_passes import joint_graph
from torch._inductor.runtime import triton_helpers
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._graph_pickler import GraphPickler
from torch.fx._graph_pickler import Options as PickleOptions
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree
from torch.utils import _triton as triton_facts
from torch.utils._python_dispatch import TorchDispatchMode

from amp_fx.errors import MissingLibraryError, TargetError, install_hint
from amp_fx.instruments.targets.process import Target, find_target, library

#: torch 2.11's pickler does not look for nodes in slices, ``x[: x.shape[0]]``; later ones do
_SLICE = pytree.NodeDef(slice, lambda s: ([s.start, s.stop, s.step], None), lambda p, _: slice(*p), None)
_with_slices = mock.patch.dict(pytree.SUPPORTED_NODES, {slice: _SLICE})

#: of this process
_target: Target | None = None


def enter(name: str) -> None:
    """Makes this process one that compiles for a target, ``"cuda:h100"``. There is no way back, and no second target.

    Call it first: autograd counts devices when it first runs backward, and torch keeps what it was told in many
    caches. TargetError for a second target, MissingLibraryError without Triton.
    """
    global _target
    target = find_target(name)
    if _target not in (None, target):
        raise TargetError(f"this process compiles for {_target.name}; {target.name} takes another process.")
    if not triton_facts.has_triton_package():
        raise MissingLibraryError(f"compiling for CUDA takes Triton: {install_hint('targets')}.")
    ctypes.CDLL(str(library())).amp_fx_enter()
    _target = target


@contextlib.contextmanager
def pretended() -> Iterator[None]:
    """Inside, AOTAutograd, Inductor and Triton compile for the target of this process; outside, Python has none.

    TargetError in a process without a target.
    """
    if _target is None:
        raise TargetError("this process has no target: enter(target) comes first.")
    from triton.runtime.driver import driver

    with contextlib.ExitStack() as stack:
        for patch in (*_cuda_patches(_target), *_compiler_patches()):
            stack.enter_context(patch)
        stack.enter_context(mock.patch.object(driver, "_active", _driver(_target)))
        # before and after: torch asks once whether there is Triton for a device
        stack.callback(_forget)
        _forget()
        yield


@contextlib.contextmanager
def compile_contexts(mode: FakeTensorMode, name: str) -> Iterator[None]:
    """The context that Dynamo has around a backend, for fake values of ``mode`` and a graph's id such as ``"0/0"``."""
    # newer versions ask the mode, older ones its attribute
    if not mode.avoid_device_init:
        mode.avoid_device_init = True  # pyright: ignore[reportAttributeAccessIssue]
    with tracing(TracingContext(mode)), compile_context(CompileContext(CompileId.from_string(name))):
        yield


@_with_slices
def graph_to_bytes(gm: fx.GraphModule) -> bytes:
    """A graph with fake values, to be read in another process. TargetError for a graph that cannot be pickled."""
    try:
        return GraphPickler.dumps(gm, PickleOptions(ops_filter=None, node_metadata_key_filter=None))
    except (pickle.PicklingError, AttributeError, TypeError, NotImplementedError, AssertionError) as error:
        raise TargetError(f"a graph cannot be handed to the process that compiles it: {error}") from error


@_with_slices
def graph_from_bytes(data: bytes) -> fx.GraphModule:
    """The graph that :func:`graph_to_bytes` wrote, with a fake mode of its own.

    TargetError for a graph that cannot be read here.
    """
    try:
        return GraphPickler.loads(data, FakeTensorMode(shape_env=ShapeEnv()))  # type: ignore[return-value]  # typed as object
    except (pickle.UnpicklingError, AttributeError, ImportError) as error:
        # as for a NumPy function, for which Dynamo makes something while it traces
        raise TargetError(f"a graph cannot be read in the process that compiles it: {error}") from error


def _properties(target: Target) -> SimpleNamespace:
    """The result of ``torch.cuda.get_device_properties``."""
    gpu, limits = target.gpu, target.limits
    major, minor = gpu.capability
    return SimpleNamespace(
        name=f"NVIDIA {gpu.name}",
        major=major,
        minor=minor,
        multi_processor_count=gpu.sms,
        total_memory=gpu.memory * 10**9,
        L2_cache_size=int(gpu.l2 * 2**20),
        warp_size=32,
        regs_per_multiprocessor=65536,
        max_threads_per_block=1024,
        max_threads_per_multi_processor=limits.threads,
        shared_memory_per_block=48 * 2**10,
        shared_memory_per_block_optin=limits.block_shared * 2**10,
        shared_memory_per_multiprocessor=limits.shared * 2**10,
        gcnArchName="",
        is_integrated=0,
        is_multi_gpu_board=0,
    )


def _cuda_patches(target: Target) -> Iterator[contextlib.AbstractContextManager[Any]]:
    """``torch.cuda`` and Dynamo's interface to it."""
    properties = _properties(target)
    capability = target.gpu.capability

    def zero(*_: Any) -> int:
        # to whoever calls for an effect that there is none of, too
        return 0

    both: dict[str, Any] = {
        **dict.fromkeys(("current_device", "memory_allocated", "set_device", "synchronize"), zero),
        "device": contextlib.nullcontext,
        "device_count": lambda: 1,
        "get_device_properties": lambda device=None: properties,
        "is_bf16_supported": lambda including_emulation=True: True,
    }
    only_cuda: dict[str, Any] = {
        **dict.fromkeys(("_exchange_device", "_lazy_init", "_maybe_exchange_device"), zero),
        "default_generators": (torch.Generator(),),
        "get_device_capability": lambda device=None: capability,
        "get_device_name": lambda device=None: properties.name,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "is_initialized": lambda: True,
        "is_tf32_supported": lambda: True,
        "set_rng_state": lambda state, device=None: None,
    }
    zeros = ("exchange_device", "get_raw_stream", "maybe_exchange_device")
    interface = {**both, **dict.fromkeys(zeros, zero)}
    for name, value in {**both, **only_cuda}.items():
        yield mock.patch.object(torch.cuda, name, value, create=not hasattr(torch.cuda, name))
    for name, value in interface.items():
        patched = value if isinstance(value, type) else staticmethod(value)
        yield mock.patch.object(device_interface.CudaInterface, name, patched)
    yield mock.patch.dict(device_interface.caching_worker_device_properties, {"cuda": [properties]})
    yield mock.patch.dict(device_interface.caching_worker_current_devices, {"cuda": 0})
    # what it has, it had before it is added to
    device_interface.get_interface_for_device("cpu")
    interfaces = dict.fromkeys(("cuda", "cuda:0"), device_interface.CudaInterface)
    yield mock.patch.dict(device_interface.device_interfaces, interfaces)
    yield mock.patch.object(torch._C, "_cuda_getCurrentRawStream", zero, create=True)
    if torch.version.cuda is None:
        yield mock.patch.object(torch.version, "cuda", "13.0")
    graphs = getattr(torch.cuda, "graphs", None)
    if hasattr(graphs, "is_current_stream_capturing"):
        yield mock.patch.object(graphs, "is_current_stream_capturing", return_value=False)


def _compiler_patches() -> Iterator[contextlib.AbstractContextManager[Any]]:
    """Stand-ins for all that fake tensors and Inductor run on the device while they compile."""
    # makes a tensor, to start CUDA
    yield mock.patch.object(fake_tensor, "init_gpu_context")
    # torch.tensor(2.0, device="cuda") would make one, too
    yield mock.patch.object(FakeTensorMode, "avoid_device_init", True, create=True)
    yield mock.patch.object(triton_helpers, "set_driver_to_gpu")
    # a gradient whose strides are not the expected ones is copied
    name = "coerce_to_expected_memory_format"
    yield mock.patch.object(runtime_wrappers, name, _under_its_mode(getattr(runtime_wrappers, name)))
    # pad_mm times matmuls
    yield inductor_config.patch(shape_padding=False)
    for owner, name in (
        (constant_folding.ConstantFolder, "run"),
        (joint_graph.UniformValueConstantFolder, "_add_peephole_patterns"),
    ):
        yield mock.patch.object(owner, name, _on_host(getattr(owner, name)))


def _under_its_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a tensor makes fake ones of a fake one."""

    def wrapped(value: torch.Tensor, *args: Any) -> Any:
        with value.fake_mode if isinstance(value, FakeTensor) else contextlib.nullcontext():
            return function(value, *args)

    return wrapped


class _OnHost(TorchDispatchMode):
    """Real values are made on the host."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def host(value: Any) -> Any:
            return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value

        return func(*map(host, args), **{key: host(value) for key, value in (kwargs or {}).items()})


def _on_host(method: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with _OnHost():
            return method(*args, **kwargs)

    return wrapped


def _driver(target: Target) -> Any:
    """Triton's driver of a device on which nothing is loaded or launched."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    facts = {
        "max_shared_mem": target.limits.block_shared * 2**10,
        "multiprocessor_count": target.gpu.sms,
        "warpSize": 32,
    }
    major, minor = target.gpu.capability

    def nothing_is_timed(self: Any) -> Any:
        raise TargetError("nothing can be timed on a device that is not there.")

    def cpp_type(self: Any, ty: str) -> str:
        from triton.backends.nvidia.driver import ty_to_cpp

        return ty_to_cpp(ty)

    answers = {
        "utils": SimpleNamespace(get_device_properties=lambda device: facts),
        "is_active": classmethod(lambda cls: True),
        "get_current_target": lambda self: GPUTarget("cuda", 10 * major + minor, 32),
        "get_active_torch_device": lambda self: torch.device("cuda", 0),
        "get_current_device": lambda self: 0,
        "get_current_stream": lambda self, device=0: 0,
        "get_device_interface": lambda self: torch.cuda,
        "get_benchmarker": nothing_is_timed,
        "map_python_to_cpp_type": cpp_type,
    }
    return type("Driver", (DriverBase,), answers)()


def _forget() -> None:
    """Drops what torch found out about Triton and the device."""
    for value in vars(triton_facts).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()
