"""Where keys and values live, and which of them a row may see.

`Rows` says for every row of a forward pass its position, the slot it writes and the slots it attends, in order; a
chain is a tree without branches. `KVCache` owns one preallocated key and value buffer per layer. Slots are only
addresses: arithmetic depends on the order of the attended keys, so a moved or tree-written entry changes no bit.
Used by the transformer, the exit head and the acceptance step, which compacts a kept tree path with `move`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rows:
    """The rows of one forward pass: row r attends slots 0..prefix[r]-1 and then paths[r] (-1 ends it)."""

    positions: torch.Tensor  # [rows] int64, for the rotary embedding
    slots: torch.Tensor  # [rows] int64, where the row writes its key and value
    prefix: torch.Tensor  # [rows] int64
    paths: torch.Tensor  # [rows, depth] int64, -1 padded; depth may be 0

    def __post_init__(self) -> None:
        count = self.positions.numel()
        for name in ("positions", "slots", "prefix"):
            tensor = getattr(self, name)
            assert tensor.shape == (count,), f"{name} has shape {tuple(tensor.shape)}, not ({count},)"
        assert self.paths.dim() == 2 and self.paths.shape[0] == count, f"paths {tuple(self.paths.shape)}, rows {count}"
        for name in ("positions", "slots", "prefix", "paths"):
            tensor = getattr(self, name)
            assert tensor.dtype == torch.int64 and tensor.is_contiguous(), (
                f"{name} is {tensor.dtype}, or not contiguous"
            )

    def __len__(self) -> int:
        return self.positions.numel()

    @classmethod
    def chain(cls, start: int, count: int, device: torch.device | str = "cpu") -> Rows:
        """Rows for `count` consecutive tokens from position `start`, each in the slot of its position."""
        positions = torch.arange(start, start + count, device=device)
        paths = torch.empty(count, 0, dtype=torch.int64, device=device)
        return cls(positions=positions, slots=positions, prefix=positions + 1, paths=paths)

    @classmethod
    def tree(cls, start: int, parents: Sequence[int], device: torch.device | str = "cpu") -> Rows:
        """Rows for a token tree hung below position start - 1: node i has slot start + i and parent parents[i].

        A parent is an earlier node, or -1 for a child of the last visible token.
        """
        paths: list[list[int]] = []
        for node, parent in enumerate(parents):
            assert -1 <= parent < node, f"node {node} has parent {parent}"
            above = paths[parent] if parent >= 0 else []
            paths.append([*above, start + node])
        return cls.of_paths(start, paths, device)

    @classmethod
    def of_paths(cls, start: int, paths: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Rows:
        """Rows that see the slots below `start` and then those of their path, whose last slot is the row's own."""
        depth = max((len(path) for path in paths), default=0)
        padded = [[*path, *[-1] * (depth - len(path))] for path in paths]
        return cls(
            positions=torch.tensor([start + len(path) - 1 for path in paths], dtype=torch.int64, device=device),
            slots=torch.tensor([path[-1] for path in paths], dtype=torch.int64, device=device),
            prefix=torch.full((len(paths),), start, dtype=torch.int64, device=device),
            paths=torch.tensor(padded, dtype=torch.int64, device=device).reshape(len(paths), depth),
        )

    def to(self, device: torch.device | str) -> Rows:
        """The same rows on `device`; themselves if they are there."""
        if self.positions.device.type == torch.device(device).type:
            return self
        moved = (tensor.to(device) for tensor in (self.positions, self.slots, self.prefix, self.paths))
        return Rows(*moved)

    def alone(self) -> Rows:
        """The same rows, each seeing only itself: for writing keys and values without paying for attention."""
        return Rows(
            positions=self.positions,
            slots=self.slots,
            prefix=torch.zeros_like(self.prefix),
            paths=self.slots[:, None].contiguous(),
        )

    def slice(self, start: int, stop: int) -> Rows:
        """Rows start..stop-1 of these; used where a long prompt passes a layer in chunks."""
        return Rows(
            positions=self.positions[start:stop].contiguous(),
            slots=self.slots[start:stop].contiguous(),
            prefix=self.prefix[start:stop].contiguous(),
            paths=self.paths[start:stop].contiguous(),
        )


class KVCache:
    """Keys and values of every layer, allocated once: `layer(i)` is a pair [num_key_value_heads, capacity, head_dim].

    One contiguous tensor holds all layers of a device, so that compacting an accepted path is one operation. The cache
    has no length: who writes it knows what is valid, and forgetting is free.
    """

    def __init__(
        self,
        num_layers: int,
        capacity: int,
        *,
        num_key_value_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        on_host: frozenset[int] = frozenset(),  # layers whose keys and values stay in host memory
    ) -> None:
        assert num_layers > 0 and capacity > 0, f"layers {num_layers}, capacity {capacity}"
        self.num_layers = num_layers
        self.capacity = capacity
        pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def allocate(members: list[int], where: torch.device | str) -> torch.Tensor | None:
            if not members:
                return None
            shape = (len(members), 2, num_key_value_heads, capacity, head_dim)
            data = torch.zeros(shape, dtype=dtype, device=where)
            pairs.update({layer: (both[0], both[1]) for layer, both in zip(members, data, strict=True)})
            return data

        self._device_data = allocate([n for n in range(num_layers) if n not in on_host], device)
        self.host_data = allocate(sorted(on_host), "cpu")
        self._pairs = [pairs[layer] for layer in range(num_layers)]

    @property
    def nbytes(self) -> int:
        return sum(data.nbytes for data in self._parts())

    def _parts(self) -> list[torch.Tensor]:
        return [data for data in (self._device_data, self.host_data) if data is not None]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in one layer."""
        return self.nbytes // (self.num_layers * self.capacity)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value buffers of one layer; a layer never shares or borrows another's."""
        assert 0 <= index < self.num_layers, f"layer {index} of {self.num_layers}"
        return self._pairs[index]

    def read(self, index: int, tokens: int) -> torch.Tensor:
        """A copy on the CPU of one layer's first entries: [2, num_key_value_heads, tokens, head_dim]."""
        return torch.stack([part[:, :tokens] for part in self._pairs[index]]).cpu()

    def write(self, index: int, entries: torch.Tensor) -> None:
        """Put back what `read` gave."""
        for part, saved in zip(self._pairs[index], entries, strict=True):
            part[:, : entries.shape[2]].copy_(saved)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slot sources[i] to targets[i] in every layer; all sources are read before any target is written."""
        assert len(sources) == len(targets), f"{len(sources)} sources for {len(targets)} targets"
        moves = [(source, target) for source, target in zip(sources, targets, strict=True) if source != target]
        if not moves:
            return  # an accepted chain already lies where it belongs
        for slot in (slot for pair in moves for slot in pair):
            assert 0 <= slot < self.capacity, f"slot {slot} of {self.capacity}"
        for data in self._parts():
            from_slots, to_slots = (torch.tensor(side, device=data.device) for side in zip(*moves, strict=True))
            data.index_copy_(3, to_slots, data.index_select(3, from_slots))
