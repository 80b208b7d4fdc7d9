"""Passes that bring matmuls into levels below 16 bits: on captured graphs without gradients, and on joint graphs.

``matmuls.py`` is how both are looked at.
"""
