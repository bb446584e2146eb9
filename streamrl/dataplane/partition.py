"""One partition of the index: rows, their pieces and tags, the schema of its columns, and tombstones.

``check`` decides whether a put is allowed and changes nothing; ``apply`` can't fail. Memory for tombstones is bounded.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any, NamedTuple

from streamrl.dataplane.columns import describe_spec
from streamrl.dataplane.journal import PartitionState, Piece, RowState
from streamrl.dataplane.pool import SegmentPool
from streamrl.dataplane.rows import Column, Row, uid_of
from streamrl.dataplane.spill import Resident
from streamrl.errors import DtypeClash, MissingField, MissingKey, NotReady, ProtocolError, StaleWrite
from streamrl.protocol.fields import TRAJECTORY_FIELDS
from streamrl.protocol.segments import ABSENT, ColumnPut, Located, LocatedColumn, PutRequest

MAX_TOMBSTONES = 1 << 17
MAX_OFFSET = 1 << 62
SHOWN = 5  # keys named in a message
_LENGTH_TAGS = {"prompts": "prompt_len", "input_ids": "seq_len", "position_ids": "seq_len"}
LENGTH_TAGS = {name: _LENGTH_TAGS.get(name, "response_len") for name, spec in TRAJECTORY_FIELDS.items() if spec.kind == "ragged"}

_NO_PIECE: Piece = (ABSENT, 0, 0)


class Plan(NamedTuple):
    """What a checked put writes to: the row of each key, None where one is made, and the column of each ``ColumnPut``."""

    rows: list[Row | None]
    columns: list[Column]


class Partition:
    """Rows by key."""

    def __init__(self, name: str, pool: SegmentPool) -> None:
        self.name = name
        self.rows: dict[str, Row] = {}
        self.groups: dict[str, dict[str, None]] = {}  # uid -> its keys
        self.live_bytes = 0
        self._pool = pool
        self._columns: dict[str, Column] = {}
        self._tombstones: dict[str, int] = {}  # key -> attempt of the cleared row
        self._ended: dict[str, int] = {}  # uid of a group that has ended -> its last attempt

    # ---- writing

    def check(self, request: PutRequest) -> Plan:
        """Where the writes go. Raises without having changed anything."""
        keys, tags = request.keys, request.tags
        if len(set(keys)) != len(keys):
            twice = sorted({key for key in keys if keys.count(key) > 1})
            raise ProtocolError(f"keys of a put are distinct, got {twice[:SHOWN]} twice; put each row once")
        if tags is not None and len(tags) != len(keys):
            raise ProtocolError(f"a put has one tag per key, got {len(tags)} tags for {len(keys)} keys; pass them together")
        rows = [self._target(key, None if tags is None else tags[place]) for place, key in enumerate(keys)]
        columns, begin, end = [], MAX_OFFSET, 0
        for put in request.columns:
            if len(put.lengths) != len(keys):
                raise ProtocolError(f"a column has one value per key, got {len(put.lengths)} of {put.name!r} for {len(keys)} keys; pass them together")
            column = self._column(put)
            columns.append(column)
            size = column.total_bytes(put.lengths)
            if size:
                begin, end = min(begin, put.base), max(end, put.base + size)
            if put.name in LENGTH_TAGS:
                self._check_lengths(put, request, rows)
        if end:
            self._pool.check_put(request.writer, request.segment_id, begin, end)
        return Plan(rows, columns)

    def apply(self, request: PutRequest, plan: Plan) -> None:
        """Carry out a checked put."""
        tags = request.tags or itertools.repeat({})
        rows = [self._open_row(key, row, tag) for key, row, tag in zip(request.keys, plan.rows, tags, strict=False)]
        for put, column in zip(request.columns, plan.columns, strict=True):
            self._set_pieces(put, self._columns.setdefault(put.name, column), rows, request.segment_id)
        for row, tag in zip(rows, request.tags or (), strict=False):
            row.tag.update(tag)

    def _target(self, key: str, tag: dict[str, Any] | None) -> Row | None:
        """Which row a write to ``key`` goes to; StaleWrite for one of the past."""
        row = self.rows.get(key)
        attempt = (tag or {}).get("attempt")
        grave = self._tombstones.get(key)
        if grave is not None and (attempt is None or attempt <= grave):
            raise StaleWrite(
                f"a cleared row is written again by a later attempt only, got attempt {attempt} for {key!r} cleared at attempt {grave}; discard it"
            )
        if row is None:
            if attempt is not None and attempt <= self._ended.get(uid_of(key) or "", -1):
                raise StaleWrite(f"rows are written while their group lives, got {key!r} of a group that has ended; discard it")
            return None
        if attempt is None or row.attempt is None or attempt == row.attempt:
            return row
        if attempt < row.attempt:
            raise StaleWrite(f"writes carry the current attempt, got attempt {attempt} for {key!r} at attempt {row.attempt}; discard it")
        return None

    def _column(self, put: ColumnPut) -> Column:
        """The column that a put writes to, perhaps one that is not there yet. DtypeClash when it is another kind of column."""
        known = self._columns.get(put.name)
        if known is None:
            return Column(put.spec)
        if known.spec != put.spec:
            got, want = describe_spec(put.spec), describe_spec(known.spec)
            raise DtypeClash(f"column {put.name!r} of partition {self.name!r} is {want} while a row of it lives, got {got}; values are never cast")
        return known

    def _check_lengths(self, put: ColumnPut, request: PutRequest, rows: list[Row | None]) -> None:
        """Per-token columns are as long as the tags of their rows say."""
        name = LENGTH_TAGS[put.name]
        for place, (row, length) in enumerate(zip(rows, put.lengths, strict=True)):
            tag = request.tags[place] if request.tags is not None else {}
            want = tag.get(name, None if row is None else row.tag.get(name))
            if want is not None and want != length:
                raise ProtocolError(f"column {put.name!r} has {name} = {want} entries at {request.keys[place]!r}, got {length}; align it with the row")

    def _open_row(self, key: str, row: Row | None, tag: dict[str, Any]) -> Row:
        attempt = tag.get("attempt")
        if row is not None:
            if row.attempt is None and attempt is not None:
                self._join_group(key, row, attempt)
            return row
        if key in self.rows:  # a later attempt replaces the row with all its columns
            self._free(key)
        row = self.rows[key] = Row(None, None)
        self._tombstones.pop(key, None)
        if attempt is not None:
            self._join_group(key, row, attempt)
        return row

    def _join_group(self, key: str, row: Row, attempt: int) -> None:
        row.attempt, row.uid = attempt, uid_of(key)
        if row.uid is not None:
            self.groups.setdefault(row.uid, {})[key] = None

    def _set_pieces(self, put: ColumnPut, column: Column, rows: list[Row], segment_id: int | None) -> None:
        """Point the rows at their new pieces; old ones become unreachable."""
        name, start, total = put.name, put.base, column.total_bytes(put.lengths)
        if segment_id is not None and total:
            self._pool.add_live(segment_id, total)
            self.live_bytes += total
        for row, length in zip(rows, put.lengths, strict=True):
            size = column.piece_bytes(length)
            old = row.pieces.get(name)
            row.pieces[name] = (ABSENT if not size or segment_id is None else segment_id, start, length)
            start += size
            if old is None:
                column.num_rows += 1
            else:
                self._free_piece(column, old)

    # ---- reading

    def locate(self, keys: list[str], fields: list[str] | None, optional: bool) -> Located:
        """MissingKey, MissingField or NotReady name the rows; nothing is skipped silently."""
        try:
            rows = [self.rows[key].pieces for key in keys]
        except KeyError:
            missing = [key for key in keys if key not in self.rows]
            raise MissingKey(
                f"rows are read from partition {self.name!r} while they live, got {len(missing)} unknown keys {sorted(set(missing))}; check clearing"
            ) from None
        if not optional and not all(rows):
            empty = [key for key, row in zip(keys, rows, strict=True) if not row]
            raise NotReady(f"rows have data before they are read, got {len(empty)} with tags only: {empty[:SHOWN]}; wait for their put")
        found = self._common(keys, rows) if fields is None else self._asked(fields, keys, rows, optional)
        columns = [self._locate_column(name, pieces, [name in row for row in rows] if optional else None) for name, pieces in found.items()]
        used = {run[0] for column in columns for run in column.runs} - {ABSENT}
        return Located(columns, [self._pool.segments[segment_id].ref for segment_id in sorted(used)])

    def tags(self) -> dict[str, dict[str, Any]]:
        return {key: dict(row.tag) for key, row in self.rows.items()}

    def _common(self, keys: list[str], rows: list[dict[str, Piece]]) -> dict[str, list[Piece]]:
        found = {}
        for name in rows[0] if rows else ():
            with contextlib.suppress(KeyError):
                found[name] = [row[name] for row in rows]
        if rows and not found:
            raise MissingField(f"rows of a get share a column, got none common to {keys[:SHOWN]}; select fields")
        return found

    def _asked(self, fields: list[str], keys: list[str], rows: list[dict[str, Piece]], optional: bool) -> dict[str, list[Piece]]:
        if optional:
            return {name: [row.get(name, _NO_PIECE) for row in rows] for name in fields if any(name in row for row in rows)}
        for name in fields:
            lacking = [key for key, row in zip(keys, rows, strict=True) if name not in row]
            if lacking:
                raise MissingField(f"a selected field is on every row, got {len(lacking)} rows without {name!r}: {lacking[:SHOWN]}; write it first")
        return {name: [row[name] for row in rows] for name in fields}

    def _locate_column(self, name: str, pieces: list[Piece], present: list[bool] | None) -> LocatedColumn:
        column = self._columns[name]
        runs: list[tuple[int, int, int]] = []
        lengths = [piece[2] for piece in pieces]
        segment = start = end = -2  # the run that is being extended
        for (number, offset, _), size in zip(pieces, column.sizes(lengths), strict=True):
            if not size:
                continue
            if offset == end and number == segment:
                end += size
                continue
            if segment != -2:
                runs.append((segment, start, end - start))
            segment, start, end = number, offset, offset + size
        if segment != -2:
            runs.append((segment, start, end - start))
        return LocatedColumn(name, column.spec, runs, lengths, present)

    # ---- freeing

    def clear(self, keys: list[str], groups: list[str]) -> int:
        """Free rows, unknown ones ignored. Rows of a group leave a tombstone; ended groups refuse every later write."""
        freed = 0
        for key in keys:
            row = self.rows.get(key)
            if row is not None:
                self._free(key)
                freed += 1
                if row.attempt is not None:
                    self._tombstones[key] = row.attempt
        for uid in groups:
            keys_of_group = [*self.groups.get(uid, ()), *([uid] if uid in self.rows else [])]
            attempts = [self.rows[key].attempt or 0 for key in keys_of_group]
            self._ended[uid] = max([*attempts, self._ended.get(uid, 0)])
            for key in keys_of_group:
                self._free(key)
            freed += len(keys_of_group)
        for graves in (self._tombstones, self._ended):
            while len(graves) > MAX_TOMBSTONES:
                del graves[next(iter(graves))]
        return freed

    # ---- moving to disk

    def residents(self, keys: list[str], groups: list[str]) -> list[Resident]:
        """Pieces of these rows that lie in shared memory, row by row; unknown rows are left out."""
        wanted = dict.fromkeys([*keys, *(key for uid in groups for key in self.groups.get(uid, ()))])
        found = []
        for key in wanted:
            for name, piece in self.rows[key].pieces.items() if key in self.rows else ():
                if piece[0] != ABSENT and not self._pool.segments[piece[0]].ref.folder:
                    found.append(Resident(key, name, piece, self._columns[name].piece_bytes(piece[2])))
        return found

    def aged(self) -> list[tuple[int, str, int]]:
        """(seq_no, key, bytes) of the rows whose move would free memory of sealed segments."""
        found = []
        for key, row in self.rows.items():
            sizes = [self._columns[name].piece_bytes(piece[2]) for name, piece in row.pieces.items() if self._pool.is_sealed(piece[0])]
            if sizes and type(row.tag.get("seq_no")) is int:
                found.append((row.tag["seq_no"], key, sum(sizes)))
        return found

    def still_there(self, resident: Resident) -> bool:
        """Whether the row still has this piece."""
        row = self.rows.get(resident.key)
        return row is not None and row.pieces.get(resident.field) == resident.piece

    def move(self, segment_id: int, moves: list[tuple[str, str, int]]) -> None:
        """Point rows at the copies of their pieces."""
        for key, name, offset in moves:
            pieces, column = self.rows[key].pieces, self._columns[name]
            old = pieces[name]
            pieces[name] = (segment_id, offset, old[2])
            self._hold_piece(column, pieces[name])
            self._free_piece(column, old)

    # ---- recovery

    def state(self) -> PartitionState:
        """All of it, for a journal."""
        rows = [RowState(key, row.attempt, row.tag, row.pieces) for key, row in self.rows.items()]
        return PartitionState(self.name, {name: column.spec for name, column in self._columns.items()}, rows, self._tombstones, self._ended)

    def restore(self, state: PartitionState) -> None:
        """Fill an empty partition; its segments are in the pool."""
        self._tombstones, self._ended = state.tombstones, state.ended
        self._columns = {name: Column(spec) for name, spec in state.columns.items()}
        for saved in state.rows:
            row = self.rows[saved.key] = Row(None, None)
            row.tag, row.pieces = saved.tag, saved.pieces
            if saved.attempt is not None:
                self._join_group(saved.key, row, saved.attempt)
            for name, piece in saved.pieces.items():
                column = self._columns[name]
                column.num_rows += 1
                self._hold_piece(column, piece)

    def lose(self, segments: set[int]) -> list[str]:
        """Forget the rows with a piece in segments that are gone; a part of a row is of no use. Their keys."""
        lost = [key for key, row in self.rows.items() if any(piece[0] in segments for piece in row.pieces.values())]
        for key in lost:
            self._free(key)
        return lost

    def _free(self, key: str) -> None:
        row = self.rows.pop(key)
        for name, piece in row.pieces.items():
            column = self._columns[name]
            column.num_rows -= 1
            self._free_piece(column, piece)
            if not column.num_rows:
                del self._columns[name]
        if row.uid is not None:
            self.groups[row.uid].pop(key)
            if not self.groups[row.uid]:
                del self.groups[row.uid]

    def _hold_piece(self, column: Column, piece: Piece) -> None:
        if piece[0] != ABSENT:
            size = column.piece_bytes(piece[2])
            self.live_bytes += size
            self._pool.add_live(piece[0], size)

    def _free_piece(self, column: Column, piece: Piece) -> None:
        if piece[0] != ABSENT:
            size = column.piece_bytes(piece[2])
            self.live_bytes -= size
            self._pool.drop_live(piece[0], size)
