"""Where a pass reads and writes: every address of every layer, worked out once.

All state of a sequence is addressed by absolute position in its slot, so nothing is ever rolled
back: a pass at positions P .. P + l - 1 overwrites whatever rejected tokens had left there, and a
row reads only what lies at or before its own position. Three kinds of tables:

* *Keys*, one table a layer. A slot owns `ring` rows, where position p lies in row p mod ring, and
  behind them one row for each compressed entry, by entry index. The last row of the table is zero
  for ever: the key of the attention sink.
* *Inputs* of the compressors, a ring by position: what an entry is pooled from. An entry is pooled
  when the last token of its window is processed, and again if that token had been rejected.
* *Index keys*, by entry index.

A ring holds what a row may look back on and `max_block` positions more, because rejected tokens
have overwritten rows that lie a ring length before them. So at most `max_block` tokens of a
sequence can be taken back, and longer runs of tokens go through the layers in several passes
(`split`).

Sequences of a few tokens are stacked, padded to the longest of them, into one group; a longer one
is a group of its own. Attention runs group by group.

Shape suffixes: N tokens of the pass, S sequences of a group, L tokens of the longest of them,
K keys, T compressed entries, C entries that this pass closes, R / 2 rotating pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dspark.models.deepseek_v4.config import CSA_RATIO, V4Config, span
from dspark.models.deepseek_v4.kernels import Rows
from dspark.models.rope import inverse_frequencies
from dspark.models.target import Batch

Ints = npt.NDArray[np.int64]
STACKED = 16
"""Sequences of at most this many tokens share a padded group."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the tables."""

    window: int
    num_slots: int
    max_context: int
    max_block: int

    @property
    def ring(self) -> int:
        return min(self.window + self.max_block, self.max_context)

    def entries(self, ratio: int) -> int:
        """Compressed entries a slot can hold."""
        return self.max_context // ratio if ratio else 0

    def stride(self, ratio: int) -> int:
        """Rows of a slot in a key table."""
        return self.ring + self.entries(ratio)

    def input_ring(self, ratio: int) -> int:
        """Positions of a slot in a table of compressor inputs."""
        return min(span(ratio) + self.max_block, self.max_context)


class Rotations:
    """The two rotary tables [T, R / 2], complex: of layers with ratio 0, and of all others."""

    def __init__(self, config: V4Config, max_context: int, device: torch.device) -> None:
        self._tables = []
        for rope in (config.rope, config.compress_rope):
            freq, factor = inverse_frequencies(rope, config.rope_dim)
            angles = torch.outer(torch.arange(max_context, dtype=torch.float32), freq)
            self._tables.append(torch.polar(torch.full_like(angles, factor), angles).to(device))

    def at(self, ratio: int, positions: Tensor) -> Tensor:
        return self._tables[int(ratio > 0)][positions]


@dataclass(frozen=True)
class Closing:
    """The compressed entries that a pass closes in all layers of one ratio."""

    inputs: Tensor
    """[C * span]: rows of the input table, seen as (position, series)."""
    turns: Tensor
    """[C, R / 2]: rotation to the first position of the window."""
    key_rows: Tensor
    """[C]: where the entries go in the key table."""
    index_rows: Tensor
    """[C]: where they go in the table of index keys."""


@dataclass(frozen=True)
class Keys:
    """What the rows of a group may read in all layers of one ratio."""

    rows: Tensor
    """[S * K]: window, entries, sink."""
    width: int
    """K."""
    first_entry: int
    """Columns before the entries."""
    entries: int
    """T."""
    mask: Tensor | None
    """[S, L, 1, K] fp32: 0 or minus infinity; None if all is visible."""
    index_rows: Tensor | None
    """[S * T] rows of the table of index keys, where entries must be chosen from."""
    hidden: Tensor | None
    """[S, L, T]: entries that a row must not see, where entries must be chosen from."""


class Group:
    """Sequences that attend together."""

    def __init__(self, pass_: Pass, sequences: list[int], rows: Tensor | None) -> None:
        self._pass = pass_
        self.rows = rows
        """[S * L] rows of the pass, the last of a sequence repeated as padding; None: all rows, in
        order."""
        self._slots = pass_.seq_slots[sequences]
        self._starts = pass_.starts[sequences]
        self._lengths = pass_.lengths[sequences]
        self.num_sequences, self.length = len(sequences), int(self._lengths.max())
        self._keys: dict[int, Keys] = {}

    def keys(self, ratio: int) -> Keys:
        if ratio not in self._keys:
            self._keys[ratio] = self._find(ratio)
        return self._keys[ratio]

    def _find(self, ratio: int) -> Keys:
        layout, config, tensor = self._pass.layout, self._pass.config, self._pass.tensor
        s, length = self.num_sequences, self.length
        base_S1 = (self._slots * layout.stride(ratio))[:, None]
        query_SL = self._starts[:, None] + np.arange(length)
        blocks = self._pass.blocks
        recent = min(layout.window - (not blocks), int(self._starts.max())) + length
        key_SK = self._starts[:, None] + np.arange(length - recent, length)
        sink = layout.num_slots * layout.stride(ratio)
        rows = [np.where(key_SK >= 0, base_S1 + key_SK % layout.ring, sink)]
        first_SL, last_SL = query_SL - layout.window + 1, query_SL
        if blocks:
            first_SL = np.broadcast_to(self._starts[:, None] - layout.window, query_SL.shape)
            last_SL = np.broadcast_to((self._starts + self._lengths - 1)[:, None], query_SL.shape)
        key_S1K = key_SK[:, None]
        seen = [(key_S1K >= np.maximum(first_SL, 0)[:, :, None]) & (key_S1K <= last_SL[:, :, None])]
        t = int((self._starts + self._lengths).max()) // ratio if ratio else 0
        if t:
            rows.append(base_S1 + layout.ring + np.arange(t))
            seen.append(np.arange(t) < ((query_SL + 1) // ratio)[:, :, None])
        rows.append(np.full((s, 1), sink))
        seen.append(np.ones((s, length, 1), np.bool_))
        visible = np.concatenate(seen, -1)
        mask = None
        if not visible.all():
            mask = tensor(np.where(visible, np.float32(0), np.float32(-np.inf))[:, :, None])
        choose = ratio == CSA_RATIO and t > config.index_topk
        index = (self._slots * layout.entries(ratio))[:, None] + np.arange(t) if choose else None
        return Keys(
            tensor(np.concatenate(rows, -1).reshape(-1)),
            recent + t + 1,
            recent,
            t,
            mask,
            None if index is None else tensor(index.reshape(-1)),
            tensor(~seen[1]) if choose else None,
        )


class Pass:
    """One batch, each sequence of which has at most `max_block` tokens.

    With `blocks` the tokens of a sequence are no text but a drafter's block: each sees all of them,
    and the `window` positions in front of the first. That is for layers with ratio 0.
    """

    def __init__(
        self,
        config: V4Config,
        layout: Layout,
        rotations: Rotations,
        batch: Batch,
        *,
        blocks: bool = False,
    ) -> None:
        self.config, self.layout, self._rotations = config, layout, rotations
        self._device = batch.tokens.device
        self.tokens = batch.tokens
        self._positions_N, self._slots_N = batch.positions.contiguous(), batch.slots.contiguous()
        self._positions = batch.positions.cpu().numpy()
        self._slots = batch.slots.cpu().numpy()
        offsets = np.array(batch.cu_lens)
        self._first = offsets[:-1][np.diff(offsets) > 0]
        self.lengths: Ints = np.diff(offsets)[np.diff(offsets) > 0]
        self.starts, self.seq_slots = self._positions[self._first], self._slots[self._first]
        if blocks:
            first = np.maximum(self.starts - layout.window, 0).repeat(self.lengths)
            last = (self.starts + self.lengths - 1).repeat(self.lengths)
        else:
            first, last = np.maximum(self._positions - layout.window + 1, 0), self._positions
        self.blocks = blocks
        self._read = (self._slots_N, self._positions_N, self.tensor(first), self.tensor(last))
        self._turns: dict[bool, Tensor] = {}
        self._rows: dict[tuple[str, int], Tensor] = {}
        self._closing: dict[int, Closing | None] = {}
        self._for_kernels: dict[int, Rows] = {}
        self._stacked: tuple[list[Group], Tensor | None] | None = None

    def tensor(self, values: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)

    def entries(self, ratio: int) -> int:
        """Compressed entries that the longest sequence has behind this pass."""
        return int((self.starts + self.lengths).max()) // ratio if ratio else 0

    def rows(self, ratio: int) -> Rows:
        """The addresses for `Kernels.attention`, which needs no lists of keys."""
        if ratio not in self._for_kernels:
            closing = self.closing(ratio) if ratio else None
            own = [self.key_rows(ratio), self.input_rows(ratio) if ratio else None]
            own.append(self.turns(ratio))
            ends: list[Tensor | None] = [None] * 4
            if closing is not None:
                ends = [closing.inputs, closing.key_rows, closing.index_rows, closing.turns]
            self._for_kernels[ratio] = Rows(
                len(self._positions),
                0 if closing is None else len(closing.key_rows),
                self.entries(ratio),
                *(None if x is None else x.data_ptr() for x in (*self._read, *own, *ends)),
            )
        return self._for_kernels[ratio]

    def turns(self, ratio: int) -> Tensor:
        """[N, R / 2]: the rotation of every row."""
        key = ratio > 0
        if key not in self._turns:
            self._turns[key] = self._rotations.at(ratio, self._positions_N)
        return self._turns[key]

    def key_rows(self, ratio: int) -> Tensor:
        """[N]: where the rows' own keys go."""
        stride, ring = self.layout.stride(ratio), self.layout.ring
        return self._addresses("key", ratio, stride, ring)

    def input_rows(self, ratio: int) -> Tensor:
        """[N]: where the rows' compressor inputs go."""
        ring = self.layout.input_ring(ratio)
        return self._addresses("input", ratio, ring, ring)

    def _addresses(self, kind: str, ratio: int, stride: int, ring: int) -> Tensor:
        if (kind, ratio) not in self._rows:
            rows = self._slots * stride + self._positions % ring
            self._rows[kind, ratio] = self.tensor(rows)
        return self._rows[kind, ratio]

    def closing(self, ratio: int) -> Closing | None:
        """The windows that end in this pass; None if none does."""
        if ratio not in self._closing:
            self._closing[ratio] = self._close(ratio)
        return self._closing[ratio]

    def _close(self, ratio: int) -> Closing | None:
        first, end = self.starts // ratio, (self.starts + self.lengths) // ratio
        counts = end - first
        if not counts.any():
            return None
        slot_C = self.seq_slots.repeat(counts)
        entry_C = np.concatenate([np.arange(a, b) for a, b in zip(first, end, strict=True)])
        layout, n = self.layout, span(ratio)
        series = n // ratio
        # The window before goes through the first series, the window itself through the last.
        offset = np.arange(ratio - n, ratio)
        position = (entry_C * ratio)[:, None] + offset
        ring = layout.input_ring(ratio)
        row = (slot_C * ring)[:, None] + position % ring
        row = row * series + (offset >= 0) * (series - 1)
        nothing = layout.num_slots * ring * series
        return Closing(
            self.tensor(np.where(position >= 0, row, nothing).reshape(-1)),
            self._rotations.at(ratio, self.tensor(entry_C * ratio)),
            self.tensor(slot_C * layout.stride(ratio) + layout.ring + entry_C),
            self.tensor(slot_C * layout.entries(ratio) + entry_C),
        )

    @property
    def groups(self) -> list[Group]:
        return self._stack()[0]

    @property
    def order(self) -> Tensor | None:
        """For each row of the pass its place among the groups' rows; None: the same."""
        return self._stack()[1]

    def _stack(self) -> tuple[list[Group], Tensor | None]:
        if self._stacked is None:
            self._stacked = self._find_groups()
        return self._stacked

    def _find_groups(self) -> tuple[list[Group], Tensor | None]:
        """The groups, and for each row of the pass its place among their rows (None: the same)."""
        lengths = self.lengths.tolist()
        short = [i for i, n in enumerate(lengths) if n <= STACKED]
        members = [short] if short else []
        members += [[i] for i, n in enumerate(lengths) if n > STACKED]
        if len(members) == 1 and len(set(lengths)) == 1:
            return [Group(self, members[0], None)], None
        groups, done = [], 0
        order = np.empty(len(self._positions), np.int64)
        for sequences in members:
            length = max(lengths[i] for i in sequences)
            rows = []
            for i in sequences:
                first, n = int(self._first[i]), lengths[i]
                rows.append(first + np.minimum(np.arange(length), n - 1))
                order[first : first + n] = np.arange(done, done + n)
                done += length
            groups.append(Group(self, sequences, self.tensor(np.concatenate(rows))))
        return groups, self.tensor(order)


def split(batch: Batch, limit: int) -> Iterator[tuple[Batch, Ints]]:
    """The batch in passes of at most `limit` tokens of a sequence, with the rows each takes."""
    lo = np.array(batch.cu_lens[:-1])
    hi = np.array(batch.cu_lens[1:])
    while (lo < hi).any():
        end = np.minimum(lo + limit, hi)
        rows = np.concatenate([np.arange(a, b) for a, b in zip(lo, end, strict=True)])
        where = torch.from_numpy(rows).to(batch.tokens.device)
        cu_lens = (0, *np.cumsum(end - lo).tolist())
        yield (
            Batch(
                batch.tokens[where],
                batch.positions[where],
                batch.slots[where],
                cu_lens,
                batch.logit_rows[:0],
            ),
            rows,
        )
        lo = end
