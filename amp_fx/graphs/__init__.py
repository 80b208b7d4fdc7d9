"""A program as a graph: how Dynamo's and torch.export's graphs become the form that passes work on.

Here: capture to pre-dispatch ATen, exported programs in the same form, autocast state as facts about nodes, questions
that passes ask about nodes, and the fallback for graphs that cannot be captured.
Not here: which precision a node gets (``amp_fx.precision.policy``, ``amp_fx.precision.placement``), and anything that
changes a dtype (``amp_fx.passes``).
Open ``capture.py`` first.
"""
