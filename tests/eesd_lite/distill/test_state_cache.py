from pathlib import Path

import numpy as np
import pytest
import torch

from eesd_lite.distill.state_cache import StateCache, StateCacheWriter, cache_bytes
from eesd_lite.errors import PrepareError


def writer(folder: Path, exit_layers: tuple[int, ...] = (1, 2), fingerprint: str = "x") -> StateCacheWriter:
    return StateCacheWriter(folder, hidden_size=8, exit_layers=exit_layers, fingerprint=fingerprint, rope={})


def batch(value: float, lengths: tuple[int, ...] = (3, 5)):  # type: ignore[no-untyped-def]
    rows = torch.full((sum(lengths), 8), value)
    return [list(range(n)) for n in lengths], {1: rows, 2: rows + 1}, rows + 2


def test_what_is_written_is_read_back_with_sequence_boundaries(tmp_path: Path) -> None:
    with writer(tmp_path) as out:
        out.append(*batch(0.0))
        out.append(*batch(10.0, (2,)))
    cache = StateCache(tmp_path)
    assert cache.lengths.tolist() == [3, 5, 2] and cache.starts.tolist() == [0, 3, 8, 10]
    assert np.asarray(cache.tokens).tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1]
    assert torch.equal(cache.states(2, 7, 9), torch.tensor([[1.0], [11.0]]).expand(2, 8).bfloat16())
    assert torch.equal(cache.final(9, 10), torch.full((1, 8), 12.0).bfloat16())
    with pytest.raises(PrepareError, match="no states for exit layer 5"):
        cache.states(5, 0, 1)


def test_estimated_and_written_bytes_agree(tiny, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    cache = tiny.write_cache(tmp_path, batches=4, exit_layers=(1, 2, 3))
    written = sum(path.stat().st_size for path in tmp_path.glob("*.bin"))
    tokens, sequences = 4 * sum(tiny.lengths), 4 * len(tiny.lengths)
    assert (cache.meta.tokens, cache.meta.sequences) == (tokens, sequences)
    assert written == cache_bytes(tokens=tokens, sequences=sequences, hidden_size=64, exits=3)


def test_a_kill_loses_only_the_last_batch_and_writing_goes_on(tmp_path: Path) -> None:
    with writer(tmp_path) as out:
        out.append(*batch(1.0))
    for path in tmp_path.glob("*.bin"):  # a batch that was half written when the process died
        with path.open("ab") as file:
            file.write(b"\x7f" * 13)
    assert StateCache(tmp_path).meta.tokens == 8
    with writer(tmp_path) as out:
        out.append(*batch(2.0))
    cache = StateCache(tmp_path)
    assert cache.meta.tokens == 16 and cache.lengths.tolist() == [3, 5, 3, 5]
    assert float(cache.states(1, 8, 9)[0, 0]) == 2.0 and float(cache.final(15, 16)[0, 0]) == 4.0


def test_a_cache_of_another_model_or_other_exits_is_not_continued(tmp_path: Path) -> None:
    writer(tmp_path).close()
    for wrong in ({"fingerprint": "y"}, {"exit_layers": (1,)}):
        with pytest.raises(PrepareError, match="another model or other exit layers"):
            writer(tmp_path, **wrong)  # type: ignore[arg-type]


def test_missing_and_truncated_caches_are_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(PrepareError, match="no state cache here"):
        StateCache(tmp_path)
    with writer(tmp_path) as out:
        out.append(*batch(1.0))
    data = (tmp_path / "final.bin").read_bytes()
    (tmp_path / "final.bin").write_bytes(data[:-1])
    with pytest.raises(PrepareError, match=r"final\.bin: 127 bytes, 128 expected"):
        StateCache(tmp_path)
    (tmp_path / "meta.json").write_text('{"format": ')
    with pytest.raises(PrepareError, match="unreadable"):
        StateCache(tmp_path)
