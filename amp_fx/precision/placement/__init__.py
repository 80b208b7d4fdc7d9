"""Where casts are cheapest: the exact minimum cut, what a placement costs, and what devices can do.

Here: the cut and its terms, the cost model, device profiles (the data, the built-in tables, the measuring), and casts
that change the memory layout as well.
Not here: what is allowed (``amp_fx.precision.policy`` and the hazards of ``amp_fx.passes``), and the pass that asks
for a cut (``passes/forward/place.py``).
Open ``cut.py`` first.
"""
