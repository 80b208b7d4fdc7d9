"""Passes on Inductor's graphs after partitioning: forward, backward and inference graphs, each by itself."""
