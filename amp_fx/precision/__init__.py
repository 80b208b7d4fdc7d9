"""Which dtype a call runs in, and what it costs: data, and arithmetic on data.

Here: op lists and user rules (``policy``), the decisions about one graph (``plans``), and costs, devices and the exact
minimum cut (``placement``). Each imports from those before it alone.
Not here: anything that changes a graph (``amp_fx.passes``).
Open ``policy/common.py`` first, then ``plans/label.py`` and ``placement/cut.py``.
"""
