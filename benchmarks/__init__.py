"""Measurements against torch.compile with torch.autocast; run them with ``python -m benchmarks.<name>``."""
