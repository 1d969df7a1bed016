"""States whose keys and values the exit head has not computed yet: it needs them only when it drafts again.

A round without a draft would pay for a pass over the head's weights in order to keep one row; together many rows cost
little more than one. The buffer is allocated once and planned; positions ascend. Used by `eesd_lite.exit_head`.
"""

from __future__ import annotations

from bisect import bisect_left

import torch
from torch import Tensor

from eesd_lite.cache import Rows
from eesd_lite.sizing import WAITING_ROWS


class WaitingStates:
    """Up to `WAITING_ROWS` states with their positions. What is replaced or forgotten was never computed."""

    def __init__(self, hidden_size: int, device: torch.device | str = "cpu") -> None:
        self._states = torch.empty(WAITING_ROWS, hidden_size, dtype=torch.float32, device=device)
        self._positions: list[int] = []

    def __len__(self) -> int:
        return len(self._positions)

    @property
    def room(self) -> int:
        """How many more states may wait."""
        return WAITING_ROWS - len(self._positions)

    def add(self, states: Tensor, first: int) -> None:
        """states float32 [rows, hidden] of tokens from position `first` on; they replace what waited there."""
        self.forget_from(first)
        count = len(self._positions)
        self._states[count : count + len(states)].copy_(states)
        self._positions.extend(range(first, first + len(states)))  # last: an interruption leaves what was there

    def forget_from(self, position: int) -> None:
        """Drop states of that position and later ones: these tokens are no longer visible."""
        del self._positions[bisect_left(self._positions, position) :]

    def taken(self) -> tuple[Tensor, Rows]:
        """All that wait: states [rows, hidden], and rows that write the slots of their positions."""
        states = self._states[: len(self._positions)]
        positions = torch.tensor(self._positions, dtype=torch.int64, device=states.device)
        paths = torch.empty(len(self._positions), 0, dtype=torch.int64, device=states.device)
        return states, Rows(positions=positions, slots=positions, prefix=positions + 1, paths=paths)
