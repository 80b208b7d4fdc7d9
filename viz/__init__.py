"""Pictures of where the casts went, and why in words.

Here: one neutral model of a drawing, and thin writers of it: a page for the browser, dot for
Graphviz, and torch.autocast beside amp_fx.
The sentence of every reason, and of a whole graph, is in ``words.py``.
Not here: what reports say (``amp_fx.reports``). A picture knows plans, and a report by what it needs of one.
Open ``model.py`` first.
"""
