"""`eesd-chat` on a tiny model behind a slow disk: python -m tests.cli.slow_chat FOLDER SECONDS [arguments].

FOLDER is what `tests.tiny.build` wrote; every read of a layer takes SECONDS longer.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from torch import Tensor

from cli.chat import make_command
from cli.chat_settings import ChatSettings
from eesd_lite.blob_reader import BlobReader
from eesd_lite.engine import Engine
from eesd_lite.progress import Progress


class SlowReader(BlobReader):
    """A disk that takes its time for every layer."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def read(self, path: Path, buffer: Tensor, nbytes: int, offset: int = 0) -> None:
        time.sleep(self.seconds)
        super().read(path, buffer, nbytes, offset)


def main() -> None:
    folder, seconds = Path(sys.argv.pop(1)), float(sys.argv.pop(1))

    def open_engine(settings: ChatSettings, progress: Progress) -> Engine:
        return Engine.from_pretrained(
            folder, head="random", exit_layer=2, resident_layers=2, controller=settings.controller, context=512,
            threads=1, reader=SlowReader(seconds), progress=progress,
        )  # fmt: skip

    make_command(open_engine)(prog_name="eesd-chat")


if __name__ == "__main__":
    main()
