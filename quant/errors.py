"""Errors of the quantization package that a user can cause.

Messages are one line: what is wrong, the number or the file, and what helps. The terminal programs print them without
a traceback. Standard library only, so that anyone may import it before torch.
"""


class CheckpointError(Exception):
    """A quantized checkpoint (folder, settings or tensor file) is missing, damaged, or of a kind we do not read."""
