"""``python -m radixrt.launch_server`` is ``radixrt serve``, for people whose scripts start a server this way."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from radixrt.cli import main as command


def main(arguments: Sequence[str] | None = None) -> int:
    return command(["serve", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    raise SystemExit(main())
