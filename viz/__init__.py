"""Pictures of where the casts went.

Here: one neutral model of a drawing, and thin writers of it: a page for the browser, dot for Graphviz, Model Explorer.
Not here: what plans say in words (``amp_fx.reports``). A picture knows plans, and a report by what it needs of one.
Open ``model.py`` first.
"""
