"""Every private PyTorch API that amp_fx touches, in one place.

Tried on torch 2.11.0, 2.12.1, 2.13.0, 2.14.1 and 2.15.0. A torch upgrade is this folder's work: nothing else in the
package imports from ``torch._*``, but what stands for an absent GPU (``amp_fx/instruments/targets/_torch.py``). Where a
name is private only by its underscore but documented or used by other projects (``compile_fx``, ``CustomGraphPass``),
the comment says so.

Here: one file for each of torch's layers: Dynamo (with the list of what torch calls of amp_fx), tracing and autocast,
AOTAutograd, Inductor; and ``faults.py``, the table of what torch computes wrongly.
Not here: decisions. What is asked is asked in torch's words, and what is answered is plain data or a torch type.
Open ``inductor.py`` first.
"""

# ruff: noqa: F403  # each file says in __all__ what it is for

from amp_fx._torch.convolutions import *
from amp_fx._torch.derivatives import *
from amp_fx._torch.dynamo import *
from amp_fx._torch.faults import *
from amp_fx._torch.grouped import *
from amp_fx._torch.inductor import *
from amp_fx._torch.layout import *
from amp_fx._torch.lowering import *
from amp_fx._torch.packing import *
from amp_fx._torch.raising import *
from amp_fx._torch.recurrent import *
from amp_fx._torch.tensors import *
from amp_fx._torch.tracing import *
from amp_fx._torch.trials import *
