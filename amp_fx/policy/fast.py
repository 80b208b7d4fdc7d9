"""What policy ``fast`` adds to ``autocast``: ops that may store their result low where autocast has fp32.

Autocast keeps a value in fp32 as soon as one fp32 tensor is mixed in: every residual stream, every bias added
by hand. ``fast`` lets those be *stored* in the low dtype; the arithmetic inside a fused kernel is fp32 all
the same (Inductor computes pointwise code and sums in fp32). What the program casts to fp32 itself, what
feeds only the loss, and everything on no list here stays as autocast has it.
"""

from __future__ import annotations

__all__ = ["LOW_IO", "MAY_ROUND"]

#: on the fp32 list of some device, but the kernel widens inside: input and result may be low
LOW_IO = frozenset(
    {
        # statistics and sums are fp32 in the kernel; weight and bias keep their own dtype
        "layer_norm",
        "native_layer_norm",
        "rms_norm",
        "group_norm",
        # exponentials and their sum are fp32 in the kernel; the probabilities are rounded for the next matmul
        # anyway
        "softmax.int",
        "_softmax",
    }
)

#: mixing arithmetic and what carries its result on
MAY_ROUND = LOW_IO | frozenset(
    {
        # residual adds, biases, gates, rotary embedding, masks within range
        "add.Tensor",
        "add.Scalar",
        "sub.Tensor",
        "sub.Scalar",
        "mul.Tensor",
        "mul.Scalar",
        "div.Tensor",
        "div.Scalar",
        "neg",
        # activations: monotone or bounded, one rounding of the result
        "relu",
        "gelu",
        "silu",
        "mish",
        "elu",
        "leaky_relu",
        "hardswish",
        "hardsigmoid",
        "sigmoid",
        "tanh",
        "dropout",
        # moves that make a new tensor of fp32 ones
        # (a lookup computes in fp32, where its gradient adds up, and is rounded at once)
        "embedding",
        "index_select",
        "gather",
        "index.Tensor",
        "cat",
        "stack",
        "constant_pad_nd",
        "pad",
        "repeat",
        "roll",
        "flip",
        "clone",
    }
)
