"""Passes on Inductor's graphs: the joint one, forward and backward together, and its parts after partitioning."""
