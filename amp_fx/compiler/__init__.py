"""From a graph of Dynamo to a function that Inductor compiled.

Here: the backend as one page (``backend.py``), capture and passes (``rewriting.py``), the way to Inductor
(``compiling.py``), levels below 16 bits (``level_passes.py``), predicted times for reports (``predicting.py``), options
(``settings.py``), and what a program is told once (``notices.py``).
Not here: the passes themselves (``amp_fx.passes``), and anything that measures (``amp_fx.instruments``).
Open ``backend.py`` first.
"""
