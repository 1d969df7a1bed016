"""Which tensor lies in which file of a model folder: which files count, shards, indexes, and all that is wrong there.

A folder may hold an index, one file, or several; what is read is never guessed. Everything wrong with the files is
collected, so that one look names it all. Used by `quant.checkpoint` and `quant.survey`. Standard library only, except
for pickles.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from quant.errors import CheckpointError, shown
from quant.safetensors_index import FileScan, TensorInfo, read_json, scan_safetensors

INDEX_NAME = "model.safetensors.index.json"
INDEX_SUFFIX = ".index.json"
PICKLES = (".bin", ".pt", ".pth")
_NOT_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state", "scaler")
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.(?:safetensors|bin)")


@dataclass(frozen=True)
class FolderIndex:
    """`tensors` are sound and readable. `problems` are full lines with the file; the engine loads nothing while there
    are any. `lost` are tensors that a broken or missing file should hold; `unlisted` lie in a file that is read but are
    not named by the index."""

    tensors: dict[str, TensorInfo]
    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    lost: frozenset[str] = frozenset()
    unlisted: dict[str, Path] = field(default_factory=dict)


def index_folder(folder: Path, weights: str | None = None, stated: str | None = None) -> FolderIndex:
    """Every tensor of the checkpoint in `folder`.

    `weights` names one file or index of the folder; `stated` is the base name that the quantization settings give: it
    decides between several files. CheckpointError where it is not clear what to read.
    """
    chosen = _asked_for(folder, weights) if weights is not None else _find(folder, stated)
    if isinstance(chosen, list):
        return _complete_set(chosen)
    if chosen.name.endswith(INDEX_SUFFIX):
        return _through_index(folder, chosen)
    scan = scan_file(chosen)
    return FolderIndex(scan.tensors, (chosen,), problems=scan.problems, lost=scan.lost)


def scan_file(path: Path) -> FileScan:
    """The tensors of one file of any supported kind."""
    if path.suffix in PICKLES:
        from quant.pickle_file import scan_pickle  # imports torch

        return scan_pickle(path)
    return scan_safetensors(path)


def is_file_name(name: object) -> bool:
    """Whether a name out of a file is that of a file in the folder itself: no path, nothing odd, not too long."""
    return (
        isinstance(name, str)
        and 0 < len(name) <= 200
        and name.isprintable()
        and not set(name) & set('/\\:*?"<>|')
        and name not in (".", "..")
    )


def _asked_for(folder: Path, weights: str) -> Path:
    if not is_file_name(weights):
        raise CheckpointError(f"{folder}: '{shown(weights)}' is not the name of a file in the model's folder")
    path = folder / weights
    if not path.is_file():
        present = ", ".join(candidate.name for candidate in _weight_files(folder)[:6]) or "none"
        raise CheckpointError(f"{path}: no such weight file; there: {present}")
    if not weights.endswith((INDEX_SUFFIX, ".safetensors", *PICKLES)):
        raise CheckpointError(f"{path}: not a weight file (.safetensors, .bin, .pt) or an index ({INDEX_SUFFIX})")
    return path


def _files(folder: Path, *suffixes: str) -> list[Path]:
    """Files of the folder itself, sorted; hidden ones and those that hold a trainer's state are none of ours."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.name.endswith(suffixes) and not path.name.startswith((".", *_NOT_WEIGHTS)) and path.is_file()
    )


def _weight_files(folder: Path) -> list[Path]:
    return _files(folder, ".safetensors", ".safetensors" + INDEX_SUFFIX, *PICKLES)


def _find(folder: Path, stated: str | None) -> Path | list[Path]:
    """The index, the only file, or a complete set of shards; safetensors before pickles."""
    for suffixes in ((".safetensors",), PICKLES):
        indexes = _files(folder, *(suffix + INDEX_SUFFIX for suffix in suffixes))
        usual = [path for path in indexes if path.name in (INDEX_NAME, "pytorch_model.bin.index.json")]
        if usual or len(indexes) == 1:
            return (usual or indexes)[0]
        candidates = indexes or _files(folder, *suffixes)
        named = [path for path in candidates if stated is not None and path.name.startswith(f"{stated}.")]
        if len(named) == 1:
            return named[0]
        if candidates and _is_complete(candidates):
            return candidates
        if len(candidates) == 1:
            return candidates[0]
        if candidates:
            names = ", ".join(path.name for path in candidates[:4]) + (", ..." if len(candidates) > 4 else "")
            raise CheckpointError(
                f"{folder}: {len(candidates)} weight files and no {INDEX_NAME} ({names}); "
                "say which with --weights FILE, or keep one"
            )
    gguf = _files(folder, ".gguf")
    hint = f"; {gguf[0].name} is for llama.cpp, take the model's GPTQ or safetensors folder" if gguf else ""
    raise CheckpointError(f"{folder}: no weights (.safetensors, .bin or .pt){hint or _no_weights_but(folder)}")


def _no_weights_but(folder: Path) -> str:
    """What there is instead: something of the right name that is no file, other letters, or files one folder down."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.name.lower().endswith((".safetensors", *PICKLES)) and not path.is_dir():
            if not path.is_file():
                what = "is a link to nothing" if path.is_symlink() and not path.exists() else "is not a regular file"
                return f"; {shown(path.name)} {what}"
            if path.name != path.name.lower():
                return f"; rename {shown(path.name)} to {shown(path.name.lower())}"
        if path.is_dir() and not path.is_symlink() and any(path.glob("*.safetensors")):
            return f"; there are some in {shown(path)}, copy them here with config.json"
    return ""


def _is_complete(files: list[Path]) -> bool:
    """Whether these are shards 1 to N of N of one model, whose index alone is missing; CheckpointError where it is one
    model, but shards are missing too."""
    found = [_SHARD.fullmatch(path.name) for path in files]
    names = {(match[1], int(match[3])) for match in found if match}
    if len(names) != 1 or not all(found):
        return False
    _, count = names.pop()
    present = {int(match[2]) for match in found if match}
    missing = [number for number in range(1, count + 1) if number not in present]
    if missing:
        name = re.sub(r"-\d{5}-of-", f"-{missing[0]:05d}-of-", files[0].name)
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{files[0].parent}: {name} is missing{more}, and so is the index; finish the download")
    return True


def _complete_set(files: list[Path]) -> FolderIndex:
    tensors: dict[str, TensorInfo] = {}
    problems: list[str] = []
    lost: set[str] = set()
    for path in files:
        scan = scan_file(path)
        lost |= scan.lost
        problems += scan.problems
        problems += [
            f"{path}: tensor '{shown(name)}' is also in {tensors[name].file.name}; say which file with --weights FILE"
            for name in scan.tensors
            if name in tensors
        ]
        tensors |= scan.tensors
    note = f"no {INDEX_NAME}: read all {len(files)} shards"
    return FolderIndex(tensors, tuple(files), notes=(note,), problems=tuple(problems), lost=frozenset(lost))


def _through_index(folder: Path, index_path: Path) -> FolderIndex:
    """Every tensor where the index places it; all that is missing or elsewhere becomes a problem by name."""
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_path}: no weight_map; fetch the file again")
    named: dict[str, list[str]] = {}
    for name, file_name in weight_map.items():
        if not is_file_name(file_name) or not file_name.endswith((".safetensors", *PICKLES)):
            raise CheckpointError(
                f"{index_path}: '{shown(file_name)}' is not the name of a weight file inside the folder"
            )
        named.setdefault(file_name, []).append(name)
    scans: dict[str, FileScan] = {}
    problems: list[str] = []
    for file_name in sorted(named):
        path = folder / file_name
        if path.exists():
            scans[file_name] = scan_file(path)
            problems += scans[file_name].problems
        else:
            problems.append(_missing_file(folder, index_path, path, len(named[file_name])))
    tensors: dict[str, TensorInfo] = {}
    lost: set[str] = set()
    where = {name: file_name for file_name, scan in scans.items() for name in scan.tensors}
    for file_name, names in named.items():
        scan = scans.get(file_name, FileScan({}, complete=False))
        for name in names:
            if name in scan.tensors:
                tensors[name] = scan.tensors[name]
            elif name in scan.lost or not scan.complete:
                lost.add(name)
            else:
                hint = f", but {where[name]} has it; the index is stale" if name in where else ""
                problems.append(
                    f"{folder / file_name}: lacks tensor '{shown(name)}' that {index_path.name} places there{hint}"
                )
                lost.add(name)
    extra = {
        name: info.file for scan in scans.values() for name, info in scan.tensors.items() if name not in weight_map
    }
    copies = [
        name
        for file_name, scan in scans.items()
        for name in scan.tensors
        if weight_map.get(name, file_name) != file_name
    ]
    return FolderIndex(
        tensors, tuple(folder / file_name for file_name in sorted(scans)), _index_notes(index_path, extra, copies),
        tuple(problems), frozenset(lost), extra,
    )  # fmt: skip


def _missing_file(folder: Path, index_path: Path, path: Path, tensors: int) -> str:
    others = [other.name for other in _files(folder, ".safetensors", *PICKLES)]
    whole = [name for name in others if not _SHARD.fullmatch(name)]
    hint = f", or read another file with --weights {whole[0]}" if whole else ""
    return (
        f"{path}: named by {index_path.name} for {tensors} tensors but missing ({len(others)} weight files are there); "
        f"finish the download, or remove a stale index{hint}"
    )


def _index_notes(index_path: Path, extra: dict[str, Path], copies: list[str]) -> tuple[str, ...]:
    notes = []
    if extra:
        first = next(iter(extra))
        notes.append(
            f"{len(extra)} tensors are in the files but not in {index_path.name}, such as '{shown(first)}': ignored"
        )
    if copies:
        notes.append(
            f"{len(copies)} tensors lie in two files, such as '{shown(copies[0])}'; {index_path.name} says which counts"
        )
    return tuple(notes)
