"""Errors that a user can cause, each with a one-line message.

A message says what is wrong, gives the number or the file, and says what helps. The terminal programs print the message
of any class in USER_ERRORS and exit with a code that is not 0; every other exception is a bug and keeps its traceback.
"""

from models import RecipeError
from quant.errors import CheckpointError


class EesdError(Exception):
    """Base class of the engine's own errors."""


class ModelError(EesdError):
    """The model folder, its settings, or what the model computes cannot be used."""


class NotFiniteError(ModelError):
    """A logit is NaN or infinite; the engine adds where that began."""


class BudgetError(EesdError):
    """The memory budget is too small for what was asked; the message names the missing bytes."""


class HeadError(EesdError):
    """The exit head is missing, damaged, of other shapes, or made for another model."""


class PromptError(EesdError):
    """The prompt or the sampling settings cannot be used."""


class PrepareError(EesdError):
    """Fetching, converting or caching a model failed: no network, no disk space, a wrong checksum."""


class TraceError(EesdError):
    """A trace of drafting cannot be read, or does not fit what was asked."""


class StreamError(EesdError):
    """Reading offloaded weights failed while the model was running."""


USER_ERRORS: tuple[type[Exception], ...] = (EesdError, CheckpointError, RecipeError)
