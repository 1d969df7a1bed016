"""The tiny models that other tests share."""

from tests.eesd_lite.conftest import engine_of, tiny_of

__all__ = ["engine_of", "tiny_of"]
