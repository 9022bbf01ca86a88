"""The project's walls, and how many lines stand behind each: python -m tests.lines.

core ◀── integrations; watch; recipe ◀── command line    core imports none of the others, nor do they each other
everything ◀── studies                                   which nothing imports

`tests/test_house_rules.py` checks both. Of a folder that moves, change the line in `WALLS`.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
CORE: Final = "core"
#: What stands behind each wall: folders, and modules without `.py`. The rest of hytrain/, workers/ and protocol/ is the
#: core.
WALLS: Final = {
    "integrations": ("hytrain/integrations",),
    "watch": ("workers/watch", "hytrain/monitoring"),
    "recipe": ("hytrain/recipe", "workers/train"),
    "command line": ("workers/launch/launcher",),
    "studies": ("examples/studies",),
}
#: Whose modules those of a wall may import, besides their own and the core's.
MAY_IMPORT: Final = {
    CORE: (),
    "integrations": (),
    "watch": (),
    "recipe": (),
    "command line": ("recipe",),
    "studies": ("watch", "recipe", "command line"),
}
PRODUCT: Final = ("hytrain", "workers", "protocol")
#: How many lines there may be: of the product, and of what a developer of the core has to know.
MOST: Final = {"hytrain/, workers/ and protocol/": 34_000, CORE: 25_000}
SOURCES: Final = (".py", ".cpp", ".js", ".css", ".html")
#: A folder of other people's code.
FOREIGN: Final = "uplot"
#: Where the planner's constants are, and how many there may be.
PLANNER: Final = ("hytrain/planner", "workers/planning")
MOST_CONSTANTS: Final = 45


def wall(place: str) -> str:
    """Behind which wall a file is, by its path from the root, or a module or a name in it, with slashes for dots."""
    parts = place.removesuffix(".py").split("/")
    above = {"/".join(parts[:count]) for count in range(1, len(parts) + 1)}
    return next((name for name, places in WALLS.items() if not above.isdisjoint(places)), CORE)


def sources() -> list[str]:
    """The files that are counted, by their paths from the root."""
    folders = (*PRODUCT, *WALLS["studies"])
    found = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in SOURCES)
    return sorted(str(path.relative_to(ROOT)) for path in found if FOREIGN not in path.parts)


def lines() -> Counter[str]:
    """How many lines are behind each wall."""
    found = Counter[str]()
    for path in sources():
        found[wall(path)] += (ROOT / path).read_text().count("\n")
    return found


def constants() -> Iterator[str]:
    """The planner's constants, `file:NAME`: upper-case names that its modules assign, one by one or several at once."""
    for path in (path for path in sources() if path.startswith(PLANNER)):
        for node in ast.parse((ROOT / path).read_text()).body:
            assigned = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            names = [
                each.id for target in assigned if target for each in ast.walk(target) if isinstance(each, ast.Name)
            ]
            yield from (f"{path}:{name}" for name in names if name.isupper() and name != "_T")  # a type


def main() -> None:
    """Print lines by wall, what is behind each, and the planner's constants."""
    counted = lines()
    for name, number in counted.items():
        places = ", ".join(WALLS.get(name, (f"the rest of {', '.join(PRODUCT)}",)))
        print(f"{number:7,}  {name:13} {places}")
    product = counted.total() - counted["studies"]
    for (what, most), number in zip(MOST.items(), (product, counted[CORE]), strict=True):
        print(f"{number:7,}  of {most:,} lines: {what}")
    print(f"{len([*constants()]):7}  of {MOST_CONSTANTS} constants: {', '.join(PLANNER)}")


if __name__ == "__main__":
    main()
