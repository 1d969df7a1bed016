"""Models from the Hugging Face Hub: one folder with config, tokenizer and safetensors weights.

huggingface_hub does the work and keeps its own cache (resumable, shared with other programs). Here its errors become
one line, and its bars our progress. Called by `prepare.resolve_model` for names that are neither recipe nor folder.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from eesd_lite.errors import ModelError, PrepareError
from eesd_lite.home import disk_errors
from eesd_lite.progress import Progress, no_progress

# What we read. Pickled weights are never fetched, and neither are the copies in other formats that many models carry.
_WANTED = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
_UNWANTED = ("*/*",)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def looks_like_hub_id(name: str) -> bool:
    """Whether a name could be `owner/model` (or an old plain name) rather than a path."""
    return _HUB_ID.fullmatch(name) is not None and not name.endswith((".", ".gguf", ".safetensors"))


def snapshot(model_id: str, progress: Progress = no_progress) -> Path:
    """Download a model (or find it in the Hub's cache) and return its folder."""
    from huggingface_hub import errors, snapshot_download

    progress(f"looking for {model_id} on the Hugging Face Hub", 0, 0)
    try:
        with disk_errors(Path.home()):
            folder = snapshot_download(
                model_id,
                allow_patterns=list(_WANTED),
                ignore_patterns=list(_UNWANTED),
                tqdm_class=_bar(model_id, progress),
            )
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{model_id} asks for an agreement first: accept it on its Hub page, then log in with `hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"no model {model_id!r} on the Hugging Face Hub, or no access to it; check the name"
        ) from error
    except errors.HFValidationError as error:
        raise ModelError(f"{model_id!r} is neither a folder nor a valid Hub name") from error
    except PrepareError:
        raise
    except Exception as error:
        # Offline shows as one of a dozen classes (HTTP client, resolver, cache look-up), so it is the general case.
        reason = str(error).splitlines()[0][:160] if str(error) else type(error).__name__
        raise PrepareError(
            f"cannot get {model_id} from the Hugging Face Hub and it is not in the local Hub cache; "
            f"check the network, or give a local folder ({reason})"
        ) from error
    return Path(folder)


def cached_snapshot(model_id: str) -> Path:
    """The folder of a model in the Hub's cache on this machine; never asks the network."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model_id, local_files_only=True))
    except Exception as error:  # not cached shows as one of several classes
        raise ModelError(f"{model_id} is neither a folder nor in the Hub's cache on this machine") from error


def _bar(model_id: str, progress: Progress) -> type:
    """A tqdm class that draws nothing and reports to `progress`."""
    from huggingface_hub.utils import tqdm

    class Reporting(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            self.stage = f"downloading {model_id}"
            super().__init__(*args, **{**kwargs, "disable": True})
            self.done, self.end = 0, int(kwargs.get("total") or 0)

        def update(self, n: float | None = 1) -> None:
            self.done += int(n or 0)
            progress(self.stage, self.done, max(self.end, int(self.total or 0)))

    return Reporting
