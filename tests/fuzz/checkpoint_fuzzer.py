"""Damaged model folders by the thousand: whatever is in the files, the pre-flight check ends in one of our errors.

Run as a program of its own (`python -m tests.fuzz.checkpoint_fuzzer EXAMPLES [SEED]`), since it limits its own address
space and watches which files are opened. Sound folders (safetensors, shards with an index, a pickle, pickled shards,
bitsandbytes) are mutated at the level of bytes, JSON values and files; then the folder is opened, checked, surveyed,
and, where it passed, every layer is read and packed. Prints one JSON object. Started by `test_fuzz_checkpoint.py`.
"""

from __future__ import annotations

import collections
import io
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from eesd_lite.config import ModelConfig
from eesd_lite.errors import USER_ERRORS
from eesd_lite.ops import TorchOps
from eesd_lite.packing import KernelSet, layer_tensors
from eesd_lite.preflight import check_tensors
from quant.blocks import TABLES
from quant.checkpoint import Checkpoint
from quant.kernels import DenseKernel
from quant.survey import survey
from tests.tiny import PROJECTIONS, TinySpec, build

EXTRA_MEMORY = 1 << 30  # bytes of address space beyond what the imports took
CPU_SECONDS = 20  # of one example: real ones take some milliseconds
SPEC = TinySpec(
    layers=2, hidden=32, inner=40, heads=2, kv_heads=1, group=16,
    modules={"0.mlp.up_proj": {"bits": 8}, "1.mlp.down_proj": None, "1.self_attn.k_proj": {"bits": 3}},
)  # fmt: skip
SETTINGS = ("config.json", "quantize_config.json", "generation_config.json")

# Values that files should not have and do.
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 1, 2, 3, 4, 8, 31, 64, 2**31, 2**32 + 1, 2**48, 2**63, 2**64, 10**30, 10**400, -(10**18)]),
    st.sampled_from([0.5, 1e308, 5e-324, float("nan"), float("inf"), float("-inf"), 4.0]),
    st.sampled_from(
        ["", ".", "..", "../model.safetensors", "/etc/passwd", "a\0b", "\ud800", "\x1b[31m", "x" * 5000, "I32", "F16",
         "F4", "llama", "gptq", "gptq_v2", "marlin", "(((.+)+)+)+!", "config.json", "aux:", "model.safetensors"]
    ),
    st.lists(st.integers(-2, 2**40), max_size=4),
    st.sampled_from([[], {}, [[]], {"": {}}, [2**40] * 6, [0] * 2000, {"bits": 8}, {"-:.*": {}, "(": 7}]),
    st.integers(),
    st.text(max_size=12),
)  # fmt: skip
WHERE = st.integers(0, 2**32)
BYTES = st.one_of(
    st.binary(min_size=1, max_size=9),
    st.sampled_from([b"\xff" * 8, b"\0" * 8, b"[" * 3000, b'"', b"}"]),
    st.sampled_from(  # of a pickle: large and negative numbers, foreign functions, calls, references
        [b"K\xff", b"J\xff\xff\xff\x7f", b"J\xff\xff\xff\xff", b"\x8a\x06\0\0\0\0\0\x01", b"cos\nsystem\n",
         b"c__builtin__\nbytearray\n", b"R", b"b", b"h\x01"]
    ),
)  # fmt: skip
MUTATION = st.tuples(
    st.sampled_from(["value", "value", "value", "drop", "add", "twice", "bytes", "bytes", "cut", "swap", "file"]),
    WHERE, WHERE, VALUES, BYTES,
)  # fmt: skip

Files = dict[str, bytes]


def sound_folders(root: Path) -> dict[str, Files]:
    """A tiny model in five layouts, as bytes by file name."""
    made = build(root / "made", SPEC).folder
    tensors = load_file(made / "model.safetensors")
    config = json.loads((made / "config.json").read_text())
    outer = config["quantization_config"] | {"dynamic": {r"+:.*up_proj": {"bits": 8}}}
    common = {
        "config.json": json.dumps(config).encode(),
        "quantize_config.json": json.dumps(outer).encode(),
        "generation_config.json": json.dumps({"eos_token_id": [1, 2], "bos_token_id": 1}).encode(),
    }  # fmt: skip
    found: dict[str, Files] = {}
    for kind, suffix in (("safetensors", "safetensors"), ("pickle", "bin")):
        for parts in (1, 3):
            folder = root / f"{kind}-{parts}"
            folder.mkdir()
            weight_map = {}
            for number in range(parts):
                names = sorted(tensors)[number::parts]
                file = f"model.{suffix}" if parts == 1 else f"model-{number + 1:05d}-of-{parts:05d}.{suffix}"
                held = {name: tensors[name] for name in names}
                (save_file if kind == "safetensors" else torch.save)(held, folder / file)  # type: ignore[operator]
                weight_map |= dict.fromkeys(names, file)
            if parts > 1:
                (folder / f"model.{suffix}.index.json").write_text(json.dumps({"weight_map": weight_map}))
            found[folder.name] = common | {path.name: path.read_bytes() for path in folder.iterdir()}
    folder = root / "blocks"
    folder.mkdir()
    plain = {name: tensor for name, tensor in tensors.items() if "_proj." not in name}
    save_file({**plain, **in_blocks(tensors)}, folder / "model.safetensors")
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    found["blocks"] = {
        "config.json": json.dumps(config).encode(),
        "generation_config.json": common["generation_config.json"],
        "model.safetensors": (folder / "model.safetensors").read_bytes(),
    }
    return found


def in_blocks(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The projections as bitsandbytes stores 4-bit matrices; any bytes are sound codes."""
    found: dict[str, torch.Tensor] = {}
    for index in range(SPEC.layers):
        for name, (rows, columns) in PROJECTIONS.items():
            out, inner, weight = SPEC.size(rows), SPEC.size(columns), f"model.layers.{index}.{name}.weight"
            state = {"quant_type": "nf4", "blocksize": 32, "dtype": "float16", "shape": [out, inner]}
            found[weight] = torch.randint(0, 256, (out * inner // 2, 1), dtype=torch.uint8)
            found[f"{weight}.absmax"] = torch.rand(out * inner // 32)
            found[f"{weight}.quant_map"] = torch.as_tensor(TABLES["nf4"])
            text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
            found[f"{weight}.quant_state.bitsandbytes__nf4"] = text
    return found


# Mutating.


def json_places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every value in a JSON tree."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    return [place for key in keys for place in [(value, key), *json_places(value[key])]]


def change_json(data: bytes, kind: str, where: int, value: Any) -> bytes:
    """JSON with one value replaced, removed, added or written twice; bytes that are no JSON stay."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return data
    places = json_places(tree)
    if not places:
        return data
    container, key = places[where % len(places)]
    if kind == "value":
        container[key] = value
    elif kind == "drop":
        del container[key]
    elif kind == "add" and isinstance(container, dict):
        container[value if isinstance(value, str) else repr(value)[:40]] = container[key]
    text = json.dumps(tree)
    if kind == "twice" and text.startswith('{"'):
        text = text[:-1] + ", " + text[1:]
    return text.encode("utf-8", "surrogatepass")


def split_header(data: bytes) -> tuple[bytes, bytes]:
    length = int.from_bytes(data[:8], "little")
    return data[8 : 8 + length], data[8 + length :]


def change_program(data: bytes, where: int, junk: bytes, *, insert: bool) -> bytes:
    """A pickled state dict whose program is damaged while the archive around it stays sound."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    except (zipfile.BadZipFile, EOFError, ValueError, OSError, NotImplementedError):
        return data
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, part in entries.items():
            if name.endswith("data.pkl"):
                place = where % (len(part) + 1)
                part = part[:place] + junk + part[place if insert else place + len(junk) :]
            archive.writestr(name, part)
    return out.getvalue()


def mutate(files: Files, mutation: tuple[str, int, int, Any, bytes]) -> Files:
    """The files with one mutation."""
    kind, which, where, value, junk = mutation
    name = sorted(files)[which % len(files)]
    data = files[name]
    if kind == "file":
        return change_file(files, name, where)
    if kind == "swap":
        other = sorted(files)[where % len(files)]
        return files | {name: files[other], other: data}
    if kind in ("value", "drop", "add", "twice"):
        if name.endswith(".json"):
            return files | {name: change_json(data, kind, where, value)}
        if name.endswith(".safetensors"):
            header, rest = split_header(data)
            header = change_json(header, kind, where, value)
            return files | {name: len(header).to_bytes(8, "little") + header + rest}
        return files | {name: change_program(data, where, junk, insert=which % 2 == 1)}
    # Bytes: mostly near the beginning and the end, where structure is (headers, a zip's directory).
    end = (4096, len(data))[where % 2]
    place = (which ^ where) % max(1, min(len(data), end))
    if where % 3 == 0 and name.endswith(".bin"):
        place = len(data) - 1 - place % max(1, min(len(data), 2048))
    if kind == "cut":
        return files | {name: data[:place]}
    keep = place + (len(junk) if which % 2 else 0)  # overwrite or insert
    return files | {name: data[:place] + junk + data[keep:]}


def change_file(files: Files, name: str, where: int) -> Files:
    """Whole files: gone, empty, a pointer, copied under another name."""
    choice = where % 5
    if choice == 0:
        return {other: data for other, data in files.items() if other != name}
    if choice == 1:
        return files | {name: b""}
    if choice == 2:
        return files | {name: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"}
    if choice == 3:
        return files | {f"copy-{name}": files[name]}
    return files | {name: files[name] + bytes(64)}


# Watching.


class Watch:
    """Which files are opened while an example runs; a hook cannot be removed, so it can be switched off."""

    def __init__(self) -> None:
        self.folder: str | None = None
        self.strange: list[str] = []
        code = {str(Path(path).resolve()) for path in [*sys.path, sys.prefix, sys.base_prefix] if path}
        self.code = tuple(path for path in code if len(path) > 4)
        sys.addaudithook(self)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        if event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
            path = os.path.normpath(os.fsdecode(arguments[0]))
            if not path.startswith((self.folder, *(f"{place}/" for place in self.code))):
                self.strange.append(path)
        elif event in ("os.system", "subprocess.Popen", "socket.connect", "os.exec", "os.posix_spawn"):
            self.strange.append(f"{event} {arguments}")

    @contextmanager
    def watching(self, folder: Path) -> Iterator[None]:
        self.folder, self.strange = f"{folder}/", []
        try:
            yield
        finally:
            self.folder = None


class Hang(BaseException):
    """An example took far longer than any should."""


def _too_long(*_: object) -> None:
    raise Hang(f"more than {CPU_SECONDS} s of CPU time")


def load(folder: Path) -> None:
    """What `Engine.from_pretrained` does with a folder before anything is computed, for the worst folders there are."""
    config = ModelConfig.from_folder(folder)
    checkpoint = Checkpoint(folder, tolerant=True)
    check_tensors(checkpoint, config)
    for index in range(config.num_hidden_layers):
        layer_tensors(checkpoint, index, DENSE)


DENSE = KernelSet(None, DenseKernel(TorchOps(torch.float32).dense, torch.float32))


def attempt(work: Callable[[], object], outcomes: collections.Counter[str]) -> None:
    """Run it: fine, or an error of ours in one bounded printable line. Everything else is a finding."""
    try:
        work()
        outcomes["accepted"] += 1
    except USER_ERRORS as error:
        text = str(error)
        assert text and "\n" not in text and text.isprintable() and len(text) < 3000, repr(text[:300])
        outcomes[re.sub(r"[^a-z ]+", " ", text.split(": ", 1)[-1].lower())[:36]] += 1


def main(root: Path, examples: int, start: int | None) -> None:
    """The figures as JSON, if nothing but our own errors was met; else what was met, as an exception."""
    layouts = sound_folders(root)
    folder = root / "model"
    outcomes: collections.Counter[str] = collections.Counter()
    figures = {"examples": 0, "slowest_cpu_seconds": 0.0}
    watch = Watch()
    signal.signal(signal.SIGPROF, _too_long)

    def example(layout: str, mutations: list[tuple[str, int, int, Any, bytes]]) -> None:
        files = layouts[layout]
        for mutation in mutations:
            files = mutate(files, mutation)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name, data in files.items():
            (folder / name).write_bytes(data)
        began = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        with watch.watching(folder):
            attempt(lambda: load(folder), outcomes)
            attempt(lambda: survey(folder), collections.Counter())
        signal.setitimer(signal.ITIMER_PROF, 0)
        figures["examples"] += 1
        figures["slowest_cpu_seconds"] = max(figures["slowest_cpu_seconds"], round(time.process_time() - began, 3))
        assert watch.strange == [], f"opened outside the folder: {watch.strange[:3]}"

    for layout in layouts:  # sound folders pass, and lazy imports happen before memory is counted
        example(layout, [])
    assert outcomes == {"accepted": len(layouts)}, outcomes
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    size = int(re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10  # type: ignore[index]
    resource.setrlimit(resource.RLIMIT_AS, (size + EXTRA_MEMORY, size + EXTRA_MEMORY))
    run = settings(
        max_examples=examples, deadline=None, database=None, report_multiple_bugs=False, derandomize=start is None,
        phases=(Phase.generate, Phase.shrink), suppress_health_check=list(HealthCheck),
    )(given(st.sampled_from(sorted(layouts)), st.lists(MUTATION, min_size=1, max_size=3))(example))  # fmt: skip
    (run if start is None else seed(start)(run))()
    figures["peak_mib"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    common = dict(outcomes.most_common(12))
    print(json.dumps({**figures, "accepted": outcomes["accepted"], "kinds": len(outcomes), "most_common": common}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # thousands of small folders
    with tempfile.TemporaryDirectory(prefix="fuzz-checkpoint-", dir=memory) as made:
        main(Path(made), int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
