"""Splits rows by their lengths: over ranks so that each has the same work, into micro-batches so that each fits the token budget.

Deterministic: equal inputs give equal parts on every machine. Knows lengths only, no rows, ranks or tensors, and imports no torch.
The work of a row of l tokens is ``linear * l + l^2``: matrix products plus attention, in the ratio of a dense 7B model by default.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from streamrl.errors import ProtocolError

LINEAR = 24576
Parts = list[list[int]]


class Prompt(NamedTuple):
    """What rows with equal prompts have in common: a name of it, and its length."""

    name: int | str
    tokens: int


_PADDING_SHARE = 0.04  # a micro-batch is closed rather than padded beyond this
_MIN_TOKENS = 2048  # below this, starting a pass costs more than the padding it saves


def workload(length: int, linear: int = LINEAR) -> int:
    return linear * length + length * length


def balanced_partitions(lengths: Sequence[int], k: int, equal_size: bool = False, linear: int = LINEAR) -> Parts:
    """``k`` parts of like workload by the largest differencing method (Karmarkar-Karp); indices sorted inside a part.

    >>> balanced_partitions([7, 9, 8, 8, 10, 12], 2)
    [[0, 3, 5], [1, 2, 4]]
    """
    return partition_works([workload(length, linear) for length in lengths], k, equal_size)


def partition_works(works: Sequence[int], k: int, equal_size: bool = False) -> Parts:
    """The same for items of known work."""
    if k < 1 or len(works) < k:
        raise ProtocolError(f"every part gets an item, got {len(works)} items for {k} parts; ask for fewer parts")
    if equal_size and len(works) % k:
        raise ProtocolError(f"equal parts need a multiple of {k} items, got {len(works)}; add padding rows or drop equal_size")
    parts = _difference(_first_states(works, k, equal_size), k)
    if not all(parts):
        raise ProtocolError(f"every part gets an item, got an empty one among {k} parts of {len(works)} items; ask for fewer parts")
    return parts


_Part = tuple[int, list[int]]  # (workload, indices)
_State = tuple[int, int, list[_Part]]  # (minus the spread, order of creation, parts by falling workload)


def _first_states(works: Sequence[int], k: int, equal_size: bool) -> list[_State]:
    """One state per item, or per ``k`` items of like workload when all parts must have equal size."""
    items = sorted((work, i) for i, work in enumerate(works))
    step = k if equal_size else 1
    states = []
    for start in range(0, len(items), step):
        parts = [(work, [i]) for work, i in reversed(items[start : start + step])]
        parts += [(0, [])] * (k - len(parts))
        states.append((parts[-1][0] - parts[0][0], start, parts))
    return states


def _difference(states: list[_State], k: int) -> Parts:
    """Merge the two states of largest spread, heaviest part of one with the lightest of the other, until one is left."""
    heapq.heapify(states)
    order = sum(len(indices) for _, _, parts in states for _, indices in parts)
    while len(states) > 1:
        _, _, left = heapq.heappop(states)
        _, _, right = heapq.heappop(states)
        merged = [(a + b, i + j) for (a, i), (b, j) in zip(left, reversed(right), strict=True)]
        merged.sort(key=lambda part: (-part[0], -len(part[1]), part[1]))
        order += 1
        heapq.heappush(states, (merged[-1][0] - merged[0][0], order, merged))
    return sorted(sorted(indices) for _, indices in states[0][2])


def micro_batches(
    lengths: Sequence[int], *, max_tokens: int | None = None, max_rows: int | None = None, count: int | None = None, linear: int = LINEAR
) -> Parts:
    """Indices of each micro-batch of packed rows: by rows (``max_rows``), or by the sum of their tokens (``max_tokens``), else one.

    ``count`` asks for at least that many (all ranks run the same number); what is missing is empty. No sum ever exceeds ``max_tokens``.
    """
    if max_tokens is None:
        size = max_rows or max(1, len(lengths))
        parts = [list(range(start, min(start + size, len(lengths)))) for start in range(0, len(lengths), size)]
    else:
        parts = _budgeted(lengths, [workload(length, linear) for length in lengths], max_tokens, count)
    return parts + [[] for _ in range((count or 0) - len(parts))]


def grouped_micro_batches(
    lengths: Sequence[int], prompts: Sequence[Prompt], *, max_tokens: int, max_group_tokens: int | None = None, count: int | None = None, linear: int = LINEAR
) -> Parts:
    """By tokens, when rows of a micro-batch with equal prompts compute them once: such rows stay together as far as the budget allows.

    Two rows of a prompt of 6 tokens and one of 3, with responses of 2, take 10 + 5 tokens. ``max_group_tokens`` lets rows of one prompt exceed
    ``max_tokens`` up to it, in a micro-batch of their own.

    >>> grouped_micro_batches([8, 8, 5], [Prompt("a", 6), Prompt("a", 6), Prompt("b", 3)], max_tokens=10)
    [[2], [0, 1]]
    """
    bundles = _bundles(lengths, prompts, max_group_tokens or max_tokens)
    tokens = [min(computed_tokens(lengths, prompts, bundle), max_tokens) for bundle in bundles]
    works = [shared_workload(lengths, prompts, bundle, linear) for bundle in bundles]
    parts = [sorted(i for b in part for i in bundles[b]) for part in _budgeted(tokens, works, max_tokens, count)]
    return parts + [[] for _ in range((count or 0) - len(parts))]


def computed_tokens(lengths: Sequence[int], prompts: Sequence[Prompt], rows: Sequence[int]) -> int:
    """Of these rows in one micro-batch, each prompt once."""
    again = sum(lengths[i] - prompts[i].tokens for i in rows)
    return again + sum(prompt.tokens for prompt in {prompts[i] for i in rows})


def shared_workload(lengths: Sequence[int], prompts: Sequence[Prompt], rows: Sequence[int], linear: int = LINEAR) -> int:
    """Of these rows on one rank, each prompt once: ``workload`` where no two prompts are equal."""
    rows_work = sum(workload(lengths[i], linear) for i in rows)
    return rows_work - sum(workload(prompts[i].tokens, linear) for i in rows) + sum(workload(prompt.tokens, linear) for prompt in {prompts[i] for i in rows})


def _bundles(lengths: Sequence[int], prompts: Sequence[Prompt], max_tokens: int) -> Parts:
    """The rows of each prompt, in several bundles where one exceeds ``max_tokens``; each bundle has the prompt."""
    alike: dict[Prompt, list[int]] = {}
    for i, prompt in enumerate(prompts):
        alike.setdefault(prompt, []).append(i)
    packs = ((rows, first_fit_decreasing([lengths[i] - prompt.tokens for i in rows], max_tokens - prompt.tokens)) for prompt, rows in alike.items())
    return [[rows[j] for j in part] for rows, pack in packs for part in pack]


def _budgeted(tokens: Sequence[int], works: Sequence[int], max_tokens: int, count: int | None) -> Parts:
    """Balanced parts when they keep the budget, else the first-fit-decreasing pack, which always does; the largest in the middle: memory grows and
    shrinks smoothly, and pipelined ranks fill and drain on small ones."""
    parts = first_fit_decreasing(tokens, max_tokens)
    wanted = min(max(len(parts), count or 0), len(tokens))
    if wanted > 1:
        balanced = partition_works(works, wanted)
        if all(sum(tokens[i] for i in part) <= max_tokens for part in balanced):
            parts = balanced
    falling = sorted(parts, key=lambda part: (-sum(works[i] for i in part), part))
    return falling[0::2][::-1] + falling[1::2]


def first_fit_decreasing(lengths: Sequence[int], max_tokens: int) -> Parts:
    """Longest first, each into the first bin that has room.

    >>> first_fit_decreasing([5, 5, 5, 5], 8)
    [[0], [1], [2], [3]]
    """
    check_budget(lengths, max_tokens)
    bins: Parts = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = next((b for b, free in enumerate(room) if free >= lengths[i]), None)
        if place is None:
            bins.append([])
            room.append(max_tokens)
            place = len(bins) - 1
        bins[place].append(i)
        room[place] -= lengths[i]
    return [sorted(part) for part in bins]


def padded_micro_batches(lengths: Sequence[int], *, max_tokens: int | None = None, max_rows: int | None = None, count: int | None = None) -> Parts:
    """Indices of each micro-batch of right-padded rows: neighbours in length, so that little of it is padding.

    The budget counts what is computed, rows times the longest: stricter than the sum of the rows' tokens. Also closed when more than
    4 % of it would be padding (unless it is still small). ``count`` as in ``micro_batches``.
    """
    if max_tokens is not None:
        check_budget(lengths, max_tokens)
    parts: Parts = []
    longest = tokens = 0
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rows = len(parts[-1]) + 1 if parts else 0
        full = not parts or (max_rows is not None and rows > max_rows) or (max_tokens is not None and rows * longest > max_tokens)
        if full or ((rows - 1) * longest >= _MIN_TOKENS and tokens + lengths[i] < (1 - _PADDING_SHARE) * rows * longest):
            parts.append([])
            longest, tokens = lengths[i], 0
        parts[-1].append(i)
        tokens += lengths[i]
    return parts + [[] for _ in range((count or 0) - len(parts))]


def check_budget(lengths: Sequence[int], max_tokens: int, keys: Sequence[str] | None = None) -> None:
    """ProtocolError naming the first row that is longer than the budget."""
    over = next((i for i, length in enumerate(lengths) if length > max_tokens), None)
    if over is not None:
        name = f"row {keys[over]}" if keys is not None else f"row number {over}"
        raise ProtocolError(
            f"a row fits into one micro-batch of {max_tokens} tokens, got {lengths[over]} tokens in {name}; "
            "raise actor.ppo_max_token_len_per_gpu or shorten data.max_response_length"
        )
