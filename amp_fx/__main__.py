"""``python -m amp_fx``: see :mod:`amp_fx.cli`."""

from __future__ import annotations

import sys

from amp_fx.cli import main

sys.exit(main())
