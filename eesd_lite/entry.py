"""Where the installed programs `eesd` and `eesd-chat` start.

They cannot start in `cli`: that name may belong to another package, and then no line of ours would run. So the check
comes first, and `cli` is imported by name only after it. `eesd_lite` does not depend on `cli` in any other way, which
is why this is the one place where the direction of imports is crossed.
"""

from __future__ import annotations

import importlib
import sys

from eesd_lite.shadow import find_shadow


def eesd() -> int:
    return _start("cli.main")


def eesd_chat() -> int:
    return _start("cli.chat")


def _start(module: str) -> int:
    complaint = find_shadow()
    if complaint is not None:
        sys.stderr.write(f"error: {complaint}\n")
        return 2
    try:
        result = importlib.import_module(module).main()
    except KeyboardInterrupt:  # while modules are imported; the programs themselves handle it afterwards
        sys.stderr.write("interrupted\n")
        return 130
    except OSError as error:  # whatever is written before a command runs: --help on a full disk
        sys.stderr.write(f"error: {error.strerror or error}\n")
        return 1
    return int(result or 0)
