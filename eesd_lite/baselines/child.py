"""The process that a peer runs in: `python -I child.py NAME SETTINGS`, JSON lines on stdin and stdout.

Standard library only, and nothing of this project: it may be run by the Python of another environment (`-I` also
keeps this folder off the module path, where `accelerate.py` would hide the real one). The first line out says what was
loaded, or `missing`; then each request {"ids", "max_new_tokens", "eos"} is answered with {"ids", "prefill_seconds",
"decode_seconds"}, decoding greedily. With "waits" in the settings, a line {"imported": true} comes first, and the
model is loaded after one from the benchmark, which has set a memory limit meanwhile. Peers' own words go to stderr.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

Step = Callable[[list[int]], int]  # feeds tokens behind the cached ones, returns the greedy next token
Loaded = tuple[dict[str, Any], Callable[[], None], Step]  # for the report, begin a new prompt, one step


class Missing(Exception):
    """The peer is not installed in this Python."""


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # C libraries print too
    name, settings = sys.argv[1], json.loads(sys.argv[2])

    def say(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        load = {"accelerate": import_accelerate, "llama.cpp": import_llama_cpp, "airllm": import_airllm}[name](settings)
        if settings.get("waits"):
            say({"imported": True})
            limit_own_memory(json.loads(sys.stdin.readline())["rlimit"])
        info, restart, step = load()
    except Missing as error:
        say({"missing": str(error)})
        return
    say({"ready": info | {"python": sys.version.split()[0]}})
    for line in sys.stdin:
        request = json.loads(line)
        before = _disk_bytes()
        restart()
        reply = decode(step, request["ids"], request["max_new_tokens"], frozenset(request["eos"]))
        reply["disk_bytes_per_pass"] = (_disk_bytes() - before) // len(reply["ids"])
        reply["peak_rss_bytes"] = _peak_rss_bytes()
        say(reply)


def decode(step: Step, ids: list[int], max_new_tokens: int, eos: frozenset[int]) -> dict[str, Any]:
    """Greedy decoding, timed as the benchmark times ours: the first token ends prefill."""
    started = time.perf_counter()
    out = [step(ids)]
    first = time.perf_counter()
    while len(out) < max_new_tokens and out[-1] not in eos:
        out.append(step(out[-1:]))
    finished = time.perf_counter()
    return {"ids": out, "prefill_seconds": first - started, "decode_seconds": finished - first}


def limit_own_memory(more: int | None) -> None:
    """An rlimit of `more` bytes of anonymous memory beyond what this process has; None: a cgroup does it."""
    if more is not None:
        with open("/proc/self/status") as lines:
            has = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData"))
        resource.setrlimit(resource.RLIMIT_DATA, (has + more, has + more))


def import_accelerate(settings: dict[str, Any]) -> Callable[[], Loaded]:
    """transformers with accelerate's disk offload of the layers that the settings name."""
    try:
        import accelerate
        import torch
        import transformers
    except ImportError as error:
        raise Missing(f"{error.name or error} is not installed in {sys.executable}") from error
    if settings["threads"]:
        torch.set_num_threads(settings["threads"])
    folder = settings["folder"]
    _skeleton(transformers, torch, folder)
    state: dict[str, Any] = {}

    def load() -> Loaded:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, device_map=settings["device_map"], offload_folder=settings["offload_folder"]
        ).eval()

        def step(ids: list[int]) -> int:
            # Before every pass: a model that does not fit finds nothing of itself in the page cache.
            for place in (folder, settings["offload_folder"]):
                _drop_pages(place)
            with torch.inference_mode():
                tokens = torch.tensor([ids])
                output = model(tokens, use_cache=True, logits_to_keep=1, **state)
                # The name changed in transformers 5.2x; whatever it gives back is what it wants next time.
                key = "cache" if "cache" in output else "past_key_values"
                state[key] = output[key]
                return int(output.logits[0, -1].argmax())

        return info, state.clear, step

    info = {
        "versions": {m.__name__: m.__version__ for m in (accelerate, torch, transformers)},
        "layers_on_disk": sum(place == "disk" for place in settings["device_map"].values()),
        "cold": "page cache of the weight files dropped (posix_fadvise) before every forward pass",
    }
    return load


def import_airllm(settings: dict[str, Any]) -> Callable[[], Loaded]:
    """AirLLM: every layer is read from its own file for every pass, one after another."""
    try:
        import airllm
        import torch
        import transformers
    except ImportError as error:
        raise Missing(f"{error.name or error} is not installed in {sys.executable}") from error
    if settings["threads"]:
        torch.set_num_threads(settings["threads"])
    _skeleton(transformers, torch, settings["folder"])
    state: dict[str, Any] = {}

    def load() -> Loaded:
        model = airllm.AutoModel.from_pretrained(
            settings["folder"], device="cpu", layer_shards_saving_path=settings["offload_folder"], prefetching=False
        )
        shards = [root for root, _, files in os.walk(settings["offload_folder"]) if files]

        def step(ids: list[int]) -> int:
            for place in (settings["folder"], *shards):
                _drop_pages(place)
            with torch.inference_mode():
                # It has no cache across calls that its own `generate` would use on a CPU: the whole prefix each time.
                state["ids"] = [*state.get("ids", []), *ids]
                output = model(torch.tensor([state["ids"]]), use_cache=False, return_dict=True)
                return int(output.logits[0, -1].argmax())

        return info, state.clear, step

    info = {
        "versions": {
            "airllm": _version("airllm"),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "cold": "page cache of the weight files dropped (posix_fadvise) before every forward pass",
    }
    return load


def import_llama_cpp(settings: dict[str, Any]) -> Callable[[], Loaded]:
    """llama.cpp through its C interface: one decode and its own greedy sampler per token, no Python in between."""
    try:
        import llama_cpp as lib
    except ImportError as error:
        raise Missing(f"llama-cpp-python is not installed in {sys.executable}") from error
    threads = settings["threads"] or os.cpu_count()

    def load() -> Loaded:
        _drop_pages(os.path.dirname(settings["gguf"]))  # else pages that others have read do not count for this process
        llama = lib.Llama(
            settings["gguf"],
            n_ctx=settings["context"],
            n_batch=min(512, settings["context"]),
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
        )
        context = llama.ctx
        sampler = lib.llama_sampler_init_greedy()

        def restart() -> None:
            lib.llama_memory_clear(lib.llama_get_memory(context), True)

        def step(ids: list[int]) -> int:
            for start in range(0, len(ids), llama.n_batch):
                part = ids[start : start + llama.n_batch]
                tokens = (lib.llama_token * len(part))(*part)
                code = lib.llama_decode(context, lib.llama_batch_get_one(tokens, len(part)))
                if code:
                    raise RuntimeError(f"llama_decode returned {code}")
            return int(lib.llama_sampler_sample(sampler, context, -1))

        return info, restart, step

    info = {"versions": {"llama-cpp-python": lib.__version__}, "gguf": settings["gguf"], "threads": threads}
    return load


def _skeleton(transformers: Any, torch: Any, folder: str) -> None:
    """The model without weights, once: transformers imports most of itself only when a model is made."""
    with torch.device("meta"):
        transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)


def _drop_pages(folder: str) -> None:
    if not hasattr(os, "posix_fadvise"):
        return
    for entry in os.scandir(folder):
        if entry.is_file():
            handle = os.open(entry.path, os.O_RDONLY)
            try:
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)


def _disk_bytes() -> int:
    """Bytes this process has made the disk deliver; proves that the cache was cold. 0 where the system does not say."""
    try:
        with open("/proc/self/io") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))
    except (OSError, StopIteration):
        return 0


def _peak_rss_bytes() -> int:
    try:
        with open("/proc/self/status") as lines:
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    main()
