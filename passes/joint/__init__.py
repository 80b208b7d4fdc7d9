"""Passes on Inductor's joint graph: forward and backward together, before they are partitioned."""
