"""Pictures of where the casts went, and why in words.

Here: one neutral form of a picture (``graph.py``), made from a report (``model.py``), and writers of it: a page for the
browser, dot for Graphviz, and torch.autocast beside amp_fx. What reasons and a whole graph say is in ``words.py``.
Not here: what reports say (``amp_fx.instruments.reports``). A picture knows plans, and a report by what it needs of
one.
Open ``graph.py`` first.
"""
