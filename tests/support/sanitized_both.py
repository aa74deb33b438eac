"""Steps and random rows in one process: `python tests/support/sanitized_both.py FOLDER NAME FIRST ROUNDS`.

It runs tests/support/sanitized.py, then so many rounds of tests/support/fuzzing.py from number FIRST on. Imports take
seconds below the allocator of a sanitizer, and are paid for once."""

import sys
from pathlib import Path

from tests.support import fuzzing, sanitized

if __name__ == "__main__":
    sanitized.main(Path(sys.argv[1]), sys.argv[2])
    fuzzing.main(Path(sys.argv[1]), sys.argv[2], 0, *map(int, sys.argv[3:]))
