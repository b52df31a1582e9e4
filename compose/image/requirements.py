"""Prints the requirements in pyproject.toml, not Koinon itself: ``requirements.py EXTRA...``."""

import re
import sys
import tomllib
from pathlib import Path


def requirements(project: dict, extras: list[str]) -> list[str]:
    """Return the requirements of the package with these extras, and with those that they name."""
    optional = project["optional-dependencies"]
    found = list(project["dependencies"])
    left, seen = list(extras), set()
    while left:
        extra = left.pop()
        if extra in seen:
            continue
        seen.add(extra)
        for requirement in optional[extra]:
            own = re.match(rf"{project['name']}\[([\w, -]+)\]", requirement)
            if own:
                left += [name.strip() for name in own[1].split(",")]
            else:
                found.append(requirement)
    return found


if __name__ == "__main__":
    path, *extras = sys.argv[1:]
    project = tomllib.loads(Path(path).read_text())["project"]
    print("\n".join(requirements(project, extras)))
