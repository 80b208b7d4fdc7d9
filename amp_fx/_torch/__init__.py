"""Every private PyTorch API that amp_fx touches, in one place.

Tried on torch 2.11.0, 2.12.1, 2.13.0, 2.14.1 and 2.15.0. A torch upgrade is this folder's work: nothing else in the
package imports from ``torch._*``, but what stands for an absent GPU (``amp_fx/targets/_torch.py``). Where a
name is private only by its underscore but documented or used by other projects (``compile_fx``, ``CustomGraphPass``),
the comment says so.

Here: one file for each of torch's layers: Dynamo, tracing, autocast, AOTAutograd, Inductor; and in ``hooks.py`` the
list of what torch calls of amp_fx, from when to when.
Not here: decisions. What is asked is asked in torch's words, and what is answered is plain data or a torch type.
Open ``inductor.py`` first.
"""

# what is imported here is private on purpose
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    make_fx,
    track_tensor_tree,
)

from amp_fx._torch.autocast import (
    autocast_disabled,
    autocast_shield,
    enable_autocast,
    has_autocast_rule,
    has_low_lstm,
    saved_tensors_shield,
)
from amp_fx._torch.breaks import DynamoWatch, LeftOut, breaks_without_graph, graph_break, rest_left_out
from amp_fx._torch.dynamo import (
    compile_id,
    in_compiled_autograd,
    in_inference_mode,
    is_left_out_in_place,
    is_looked_up,
    let_go,
    log_artifact,
    note_inference_mode,
    note_mode,
    raised_by_backend,
    speaks_to_dynamo,
    unwrapped_errors,
)
from amp_fx._torch.freezing import Lifting, observe_freezing, packed_layout, packed_memory
from amp_fx._torch.hooks import (
    AFTER_STEP,
    BEFORE_STEP,
    EXIT,
    HOOKS,
    SCALER_STEPS,
    UNTRACED,
    remove_all,
)
from amp_fx._torch.inductor import (
    compile_package,
    compile_with_inductor,
    graph_pass,
    inductor_mode_options,
    inductor_option_names,
    lays_out_convolutions,
    replace_inner_compile,
    source_hash,
    stock_inductor,
    traced_anew,
    tunes_kernels,
    write_as_it_is,
)
from amp_fx._torch.joint import JointRoles, joint_roles, program_outputs
from amp_fx._torch.lowering import Lowered, lower_with_inductor
from amp_fx._torch.multi_tensor import find_nonfinite_, largest_magnitudes, update_scale
from amp_fx._torch.ops import quantised_ops, registered_ops
from amp_fx._torch.storages import StorageRef, borrowed, storage_ref
from amp_fx._torch.tracing import (
    defining_module,
    ignore_fresh_symbols,
    is_functorch_wrapped,
    is_hooks_switch,
    is_wrapper,
    known_sizes,
    nesting_change,
    op_name,
    size_hint,
    size_with,
    symbolic_kernels,
    wrapped_tensors,
)

__all__ = [
    "AFTER_STEP",
    "BEFORE_STEP",
    "EXIT",
    "HOOKS",
    "SCALER_STEPS",
    "UNTRACED",
    "DynamoWatch",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "JointRoles",
    "LeftOut",
    "Lifting",
    "Lowered",
    "OpOverload",
    "StorageRef",
    "autocast_disabled",
    "autocast_shield",
    "borrowed",
    "breaks_without_graph",
    "compile_id",
    "compile_package",
    "compile_with_inductor",
    "defining_module",
    "disable_proxy_modes_tracing",
    "enable_autocast",
    "find_nonfinite_",
    "get_proxy_mode",
    "graph_break",
    "graph_pass",
    "has_autocast_rule",
    "has_low_lstm",
    "ignore_fresh_symbols",
    "in_compiled_autograd",
    "in_inference_mode",
    "inductor_mode_options",
    "inductor_option_names",
    "is_functorch_wrapped",
    "is_hooks_switch",
    "is_left_out_in_place",
    "is_looked_up",
    "is_wrapper",
    "joint_roles",
    "known_sizes",
    "largest_magnitudes",
    "lays_out_convolutions",
    "let_go",
    "log_artifact",
    "lower_with_inductor",
    "make_fx",
    "nesting_change",
    "note_inference_mode",
    "note_mode",
    "observe_freezing",
    "op_name",
    "packed_layout",
    "packed_memory",
    "program_outputs",
    "quantised_ops",
    "raised_by_backend",
    "registered_ops",
    "remove_all",
    "replace_inner_compile",
    "rest_left_out",
    "saved_tensors_shield",
    "size_hint",
    "size_with",
    "source_hash",
    "speaks_to_dynamo",
    "stock_inductor",
    "storage_ref",
    "symbolic_kernels",
    "traced_anew",
    "track_tensor_tree",
    "tunes_kernels",
    "unwrapped_errors",
    "update_scale",
    "wrapped_tensors",
    "write_as_it_is",
]
