"""The other process of ``test_processes.py``: ``python second_process.py STORE``."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

if __name__ == "__main__":
    from shared_work import work

    import conftest  # noqa: F401  (the sources beside the tests)

    work(sys.argv[1])
