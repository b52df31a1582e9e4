"""``python -m demo``: checks that its requirements are installed, then runs all acts."""

from __future__ import annotations

import sys

from koinon.local.servers import is_importable, missing_for_servers


def run() -> int:
    """Run the demo, or name the missing packages."""
    missing = missing_for_servers()
    missing += [
        name for name in ("rich", "redis", "pyarrow", "pyspark", "h3") if not is_importable(name)
    ]
    if missing:
        sys.exit(
            f"koinon: the demo needs {', '.join(missing)}: pip install 'koinon[geo,server,spark]'"
        )
    from demo.programme import main

    return main()


if __name__ == "__main__":
    sys.exit(run())
