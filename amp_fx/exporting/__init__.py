"""Mixed precision as files: exported programs with explicit casts and low weights.

Here: ``amp_fx.export``, ``amp_fx.convert``, ``amp_fx.extra_files``, ``amp_fx.export_onnx``, ``amp_fx.package``.
Not here: exported programs as graphs (``amp_fx.graphs``), and the passes (``amp_fx.passes``).
Open ``converting.py`` first.
"""

from amp_fx.exporting.converting import convert, export, extra_files
from amp_fx.exporting.onnx_file import export_onnx
from amp_fx.exporting.packaging import package

__all__ = ["convert", "export", "export_onnx", "extra_files", "package"]
