"""Instruments that stand beside the compiler: they look at models, and the compiler does not know them.

Here: what plans say to a reader (``reports``), accuracy of each rounding (``calibration``), where a run departs from
fp32 (``comparison``), GPUs that are not in the machine (``targets``), times of a user's model (``benching.py``), what a
machine can do (``environment.py``), and what they share: a measured step of a user's model (``step.py``), and which
call a batch stands for (``batches.py``).
Not here: pictures (``amp_fx.viz``), and programs for inference (``amp_fx.exporting``).
Open ``reports/explaining.py`` first.
"""
