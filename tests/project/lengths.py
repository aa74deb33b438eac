"""A report, not a test: `python -m tests.project.lengths` lists the longest files and functions for review.

Files over 400 lines and functions over 40 lines may contain two subjects.
"""

import ast
from pathlib import Path

from tests.support.places import ROOT

FOLDERS = ("models", "service", "training", "benchmarks", "deploy")
FILE_LINES, FUNCTION_LINES = 400, 40


def main() -> None:
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    files = {path: len(path.read_text("utf-8").splitlines()) for path in paths}
    for path, lines in sorted(files.items(), key=lambda item: -item[1]):
        if lines > FILE_LINES:
            print(f"{lines:5}  {path.relative_to(ROOT)}")
    for lines, place in sorted((pair for path in paths for pair in long_functions(path)), reverse=True):
        print(f"{lines:5}  {place}")


def long_functions(path: Path) -> list[tuple[int, str]]:
    """Lines and place of each function of the file that has more than FUNCTION_LINES."""
    found = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES:
                found.append((lines, f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"))
    return found


if __name__ == "__main__":
    main()
