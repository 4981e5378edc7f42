"""``python -m tierkv.cli``: the same as the console script ``tierkv``."""

import sys

from tierkv.cli import main

sys.exit(main())
