"""Write docs/config.md, docs/methods.md and docs/metrics.md from the code, or check that they are up to date.

Run as ``python tools/generate_docs.py`` from the repository; with ``--check`` nothing is written and the exit code is 1
where a file differs from what would be written.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from skirl.cli.help import settings_markdown
from skirl.config.combinations import render as methods_markdown
from skirl.tracking.metrics import render

ROOT = Path(__file__).resolve().parent.parent
PAGES: dict[str, Callable[[], str]] = {
    "docs/config.md": settings_markdown,
    "docs/methods.md": methods_markdown,
    "docs/metrics.md": render,
}


def main() -> int:
    """Writes or checks the pages."""
    parser = argparse.ArgumentParser(
        description="Write docs/config.md, docs/methods.md and docs/metrics.md from the code."
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a page is out of date")
    check: bool = parser.parse_args().check
    stale: list[str] = []
    for name, make in PAGES.items():
        path, text = ROOT / name, make()
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    if stale:
        print(f"{'out of date' if check else 'written'}: {', '.join(stale)}" + ("; run `make docs`" if check else ""))
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
