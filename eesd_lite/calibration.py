"""Token ids that GPTQ looks at: rows of equal length, from the user's file or written by the model itself.

Texts from a file are joined, each followed by the model's end-of-text token, and cut into rows, so that no row is
padded and none is lost because it is short. Called by `eesd quantize`; recipes ship their rows instead.
"""

from __future__ import annotations

from pathlib import Path

from eesd_lite.errors import PrepareError
from eesd_lite.progress import Progress, no_progress

ROW_TOKENS = 512
_BATCH = 32  # conversations written in lock-step: what their keys and values may take


def calibration_ids(
    folder: Path, data: Path | None, *, rows: int = 128, seed: int = 0, progress: Progress = no_progress
) -> list[list[int]]:
    """`rows` rows (fewer if a file holds less) of token ids for the model in `folder`."""
    if data is not None:
        return _from_file(folder, data, rows, progress)
    return _self_written(folder, rows, seed, progress)


def _from_file(folder: Path, data: Path, rows: int, progress: Progress) -> list[list[int]]:
    from eesd_lite.distill.texts import read_samples
    from eesd_lite.text import TextCodec

    codec = TextCodec.from_folder(folder)
    end = sorted(codec.eos_token_ids)[:1]
    ids: list[int] = []
    for sample in read_samples(data):
        progress("reading calibration text, token", min(len(ids), rows * ROW_TOKENS), rows * ROW_TOKENS)
        ids += codec.encode(sample) if isinstance(sample, str) else codec.render_chat(sample, False)
        ids += end
        if len(ids) >= rows * ROW_TOKENS:
            break
    if len(ids) < ROW_TOKENS:
        raise PrepareError(f"{data}: {len(ids)} tokens are too few to calibrate; {ROW_TOKENS} is the least")
    return [ids[i : i + ROW_TOKENS] for i in range(0, min(len(ids), rows * ROW_TOKENS) - ROW_TOKENS + 1, ROW_TOKENS)]


def _self_written(folder: Path, rows: int, seed: int, progress: Progress) -> list[list[int]]:
    from eesd_lite.distill.generate import chat_scaffold, write_conversations
    from eesd_lite.distill.teacher import DenseTarget

    target = DenseTarget(folder, context=ROW_TOKENS)
    scaffold = chat_scaffold(folder, target.config.eos_token_ids)
    written: list[list[int]] = []

    def report(stage: str, done: int, total: int) -> None:
        share = min(_BATCH, rows - len(written)) * done // max(total, 1)
        progress("the model writes its calibration text, row", len(written) + share, rows)

    while len(written) < rows:
        batch = write_conversations(
            target, scaffold, batch=min(_BATCH, rows - len(written)), length=ROW_TOKENS,
            seed=seed * 1_000_003 + len(written), keep_states=False, progress=report,
        )  # fmt: skip
        written += batch.tokens.tolist()
    return written
