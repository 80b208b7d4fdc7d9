"""State that lives from one call of a compiled graph to the next.

Here: what was made of weights and when it is made again (``weights``), loss scaling (``scaling``), parameters that a
module holds low (``widened.py``), and the list of all that ``amp_fx.reset()`` forgets (``state.py``).
Not here: how graphs are compiled (``amp_fx.compiler``).
Open ``weights/cache.py`` first.
"""
