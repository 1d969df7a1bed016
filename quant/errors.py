"""Errors of the quantization package that a user can cause.

Messages are one line: what is wrong, the number or the file, and what helps. The terminal programs print them without
a traceback. Standard library only, so that anyone may import it before torch.
"""

from collections.abc import Sequence


class CheckpointError(Exception):
    """A quantized checkpoint (folder, settings or tensor file) is missing, damaged, or of a kind we do not read."""


def shown(text: object, limit: int = 120) -> str:
    """Text out of somebody's file, fit for a message: printable (no terminal codes) and of bounded length."""
    text = str(text)
    clean = "".join(letter if letter.isprintable() else "?" for letter in text[:limit])
    return clean if len(text) <= limit else f"{clean}..."


def remedy(error: Exception) -> str:
    """What helps against a file that cannot be read: another download does not give permission."""
    return "let this user read it (chmod)" if isinstance(error, PermissionError) else "fetch the file again"


def in_one_line(where: object, problems: Sequence[str], limit: int = 6) -> str:
    """All that is wrong with a folder as one message: the first few problems by name, and how many more there are."""
    if len(problems) == 1:
        return f"{where}: {problems[0]}"
    more = f"; and {len(problems) - limit} more" if len(problems) > limit else ""
    return f"{where}: {len(problems)} problems: {'; '.join(problems[:limit])}{more}"
