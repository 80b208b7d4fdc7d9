"""Rows that stand on the autocast lists of CPU and of CUDA alike.

``cpu.py`` and ``cuda.py`` begin with them, so they are checked against the lists of both.
"""

from __future__ import annotations

from .classes import OpClass, OpGroup, Origin
from .common import LINALG_SINCE_2_14

__all__ = ["LISTED_GROUPS"]

_LISTED = "listed by CPU and CUDA autocast"

LISTED_GROUPS: tuple[OpGroup, ...] = (
    OpGroup(
        op_class=OpClass.LOW,
        reason=f"matrix product with low-precision instructions, {_LISTED}",
        origin=Origin.AUTOCAST,
        ops=("addbmm", "addmm", "baddbmm", "bmm", "linalg_vecdot", "linear", "matmul", "mm"),
    ),
    OpGroup(
        op_class=OpClass.LOW,
        reason=f"convolution with low-precision instructions, {_LISTED}",
        origin=Origin.AUTOCAST,
        ops=(
            "_convolution.deprecated", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d",
            "conv_transpose2d.input", "conv_transpose3d.input",
        ),
    ),
    OpGroup(
        op_class=OpClass.LOW,
        reason=f"attention: its softmax is in fp32 inside the kernel, {_LISTED}",
        origin=Origin.AUTOCAST,
        ops=("scaled_dot_product_attention",),
    ),
    OpGroup(
        op_class=OpClass.LOW,
        reason=f"its weight has to match the activation, {_LISTED}",
        origin=Origin.AUTOCAST,
        ops=("prelu",),
    ),
    OpGroup(
        op_class=OpClass.FP32,
        reason=f"loss: small differences, long sums, {_LISTED}",
        origin=Origin.AUTOCAST,
        ops=(
            "binary_cross_entropy_with_logits", "cosine_embedding_loss", "hinge_embedding_loss", "huber_loss",
            "kl_div", "l1_loss", "margin_ranking_loss", "mse_loss", "multi_margin_loss",
            "multilabel_margin_loss", "nll_loss", "nll_loss2d", "poisson_nll_loss", "smooth_l1_loss",
            "soft_margin_loss", "triplet_margin_loss",
        ),
    ),
    OpGroup(
        op_class=OpClass.FP32,
        reason=f"norm or distance: sums of powers, {_LISTED}",
        origin=Origin.AUTOCAST,
        ops=("cdist",),
    ),
    OpGroup(
        op_class=OpClass.FP32,
        reason=f"product: range, {_LISTED}",
        origin=Origin.AUTOCAST,
        unless_given=("dtype",),
        ops=("prod", "prod.dim_int"),
    ),
    OpGroup(
        op_class=OpClass.FP32,
        reason=f"linear algebra: needs the digits, {_LISTED}",
        origin=Origin.AUTOCAST,
        since="2.14",
        ops=LINALG_SINCE_2_14,
    ),
    OpGroup(
        op_class=OpClass.FP32,
        reason="loss: its inner nll_loss is listed as fp32",
        origin=Origin.COMPOSITE,
        ops=("nll_loss_nd",),
    ),
)  # fmt: skip
