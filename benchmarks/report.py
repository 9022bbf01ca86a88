"""Result sets into docs/benchmarks.md: tables between markers, pictures beside them.

    python -m benchmarks.report [--results DIR...]

    DIR/rows*.jsonl, DIR/kernel*.json ─▶ tables ─▶ <!-- begin: NAME --> … <!-- end: NAME -->
                                      └▶ pictures ─▶ docs/pictures/bench-*.png

Everything between markers is written anew from the rows; all else in the page is left as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks import tables
from benchmarks.rows import Rows
from benchmarks.words import NOTHING

ROOT: Final = Path(__file__).resolve().parent.parent
PAGE: Final = ROOT / "docs" / "benchmarks.md"
PICTURES: Final = ROOT / "docs" / "pictures"
RESULTS: Final = ROOT / "benchmarks" / "results"
TABLES: Final[dict[str, Callable[[Rows], str]]] = {
    "machines": tables.machines,
    "systems": tables.all_systems,
    "hosts": tables.hosts,
    "sweep": tables.sweep,
    "policies": tables.policies,
    "objectives": tables.objectives,
    "batches": tables.batches,
    "threads": tables.threads,
    "prediction": tables.prediction,
    "idle": tables.idle,
    "clipping": tables.clipping,
    "identical": tables.identical,
}
_BLOCK: Final = re.compile(
    r"(?P<begin><!-- begin: (?P<name>[\w-]+) -->\n).*?(?P<end><!-- end: (?P=name) -->)", re.DOTALL
)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 2 if there is nothing to report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, nargs="+", default=[RESULTS], help="folders with rows*.jsonl")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--pictures", type=Path, default=PICTURES, help="folder")
    parser.add_argument("--no-pictures", action="store_true", help="where matplotlib is missing")
    arguments = parser.parse_args(argv)
    rows = Rows.read(*arguments.results)
    if not len(rows):
        parser.error(f"no rows*.jsonl with anything in it in {', '.join(map(str, arguments.results))}")
    texts = blocks(rows, kernel_result(arguments.results))
    if not arguments.no_pictures:
        add_pictures(texts, rows, arguments.pictures, arguments.page)
    arguments.page.write_text(fill(arguments.page.read_text(), texts))
    return 0


def blocks(rows: Rows, kernel: dict[str, Any]) -> dict[str, str]:
    """The text of every block that a page may have."""
    found = {name: table(rows) for name, table in TABLES.items()}
    found["goals"] = tables.goals_met(rows, kernel.get("summary", {}))
    found["kernel"] = kernel_table(kernel)
    return found


def add_pictures(texts: dict[str, str], rows: Rows, folder: Path, page: Path) -> None:
    """Draw what there are rows for, and put each picture above its table."""
    from benchmarks import pictures

    for name in pictures.draw(rows, folder):
        shown = os.path.relpath(folder / f"bench-{name}.png", page.parent)
        texts[name] = f"![{pictures.PICTURES[name][1]}]({shown})\n\n{texts[name]}"


def kernel_result(folders: Sequence[Path]) -> dict[str, Any]:
    """What `benchmarks.kernel --json` wrote last, by the file's name."""
    paths = sorted(path for folder in folders for path in folder.glob("kernel*.json"))
    result: dict[str, Any] = json.loads(paths[-1].read_text()) if paths else {}
    return result


def kernel_table(kernel: dict[str, Any]) -> str:
    if not kernel:
        return NOTHING
    from benchmarks.kernel import table

    return table(kernel)


def fill(page: str, texts: dict[str, str]) -> str:
    """The page with its blocks replaced. Raises `KeyError` for a block that nobody makes."""

    def replaced(block: re.Match[str]) -> str:
        return f"{block['begin']}\n{texts[block['name']]}\n\n{block['end']}"

    return _BLOCK.sub(replaced, page)


if __name__ == "__main__":
    sys.exit(main())
