"""``python -m amp_fx``: see :mod:`amp_fx.cli`."""

import sys

from amp_fx.cli import main

sys.exit(main())
