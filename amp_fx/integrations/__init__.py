"""The ways into amp_fx from other libraries: one file per library, which imports it.

Here: a plugin for Accelerate, callbacks for the Trainer of transformers, precision plugins for Lightning and Fabric,
and a scaler's numbers as metrics.
Not here: recipes that need no class of ours (``examples/``: timm, diffusers, torchtitan). No file outside this folder
imports one of these libraries, and ``import amp_fx`` imports none of these files.
Open ``accelerate.py`` first.
"""
