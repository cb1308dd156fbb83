"""``python -m radixrt`` is the same as the ``radixrt`` command."""

from __future__ import annotations

import sys

from radixrt.cli import main

if __name__ == "__main__":
    sys.exit(main())
