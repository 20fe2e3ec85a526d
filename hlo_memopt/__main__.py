"""``python -m hlo_memopt``."""

from __future__ import annotations

import sys

from hlo_memopt.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
