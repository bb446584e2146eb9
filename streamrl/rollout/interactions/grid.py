"""A walk over a grid by words: the model is A, the goal is G, # is a wall; one move per answer until the goal or the last step.

    config: {height: 3, width: 3, max_steps: 8}
    interaction_kwargs: {start: [0, 0], goal: [2, 2], walls: [[1, 1]]}      # or {seed: 7}: start and goal are drawn

An interaction speaks after the model, so the first picture belongs into the row's prompt: :func:`opening` writes it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from streamrl.config.base import Positive, Section
from streamrl.errors import ConfigError
from streamrl.rollout.interactions.answers import arguments, last_answer, settings
from streamrl.rollout.interactions.base import BaseInteraction
from streamrl.rollout.interactions.registry import register_interaction

MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
RULES = "You are A and walk to G; # is a wall. Answer with one move: up, down, left or right."

_MOVE = re.compile(r"\b(up|down|left|right)\b", re.IGNORECASE)

Cell = tuple[int, int]  # (row, column) from the upper left corner, 0-based


class GridConfig(Section, frozen=True):
    height: Positive = 3
    width: Positive = 3
    max_steps: Positive = 8  # an answer without a move is a step too

    def __post_init__(self) -> None:
        if self.height * self.width < 2:
            raise ConfigError("config.height and config.width make room for start and goal, got one cell; enlarge the grid")


class GridTask(Section, frozen=True):
    start: Cell | None = None  # None: drawn by seed
    goal: Cell | None = None
    walls: list[Cell] = []
    seed: int = 0


class Grid(msgspec.Struct):
    """One game. A move against a wall or the border stays in place."""

    height: int
    width: int
    here: Cell
    goal: Cell
    walls: frozenset[Cell]
    num_steps: int = 0

    @property
    def solved(self) -> bool:
        return self.here == self.goal

    def move(self, name: str) -> bool:
        """False when something is in the way."""
        row, column = self.here[0] + MOVES[name][0], self.here[1] + MOVES[name][1]
        if not (0 <= row < self.height and 0 <= column < self.width) or (row, column) in self.walls:
            return False
        self.here = (row, column)
        return True

    def picture(self) -> str:
        """``A..`` / ``.#.`` / ``..G``, one line per row."""
        signs = dict.fromkeys(self.walls, "#") | {self.goal: "G", self.here: "A"}
        return "\n".join("".join(signs.get((row, column), ".") for column in range(self.width)) for row in range(self.height))


def new_grid(config: GridConfig, task: GridTask) -> Grid:
    """ValueError for a task that does not fit the grid or that nobody can solve within ``max_steps``."""
    cells = [(row, column) for row in range(config.height) for column in range(config.width)]
    walls = frozenset(task.walls)
    taken = walls | {cell for cell in (task.start, task.goal) if cell}
    free = random.Random(task.seed).sample([cell for cell in cells if cell not in taken], k=max(0, len(cells) - len(taken & set(cells))))
    start = task.start or (free.pop() if free else None)
    goal = task.goal or (free.pop() if free else None)
    if start is None or goal is None or start == goal or not {start, goal} <= set(cells) - walls:
        raise ValueError(f"start and goal are two free cells of a {config.height} x {config.width} grid, got {start} and {goal}; correct the row")
    grid = Grid(config.height, config.width, start, goal, walls)
    if not _solvable(grid, config.max_steps):
        raise ValueError(f"a grid is solvable in {config.max_steps} steps, got\n{grid.picture()}\ncorrect the row or raise max_steps")
    return grid


def _solvable(grid: Grid, max_steps: int) -> bool:
    reached = {grid.here}
    for _ in range(max_steps):
        for cell in tuple(reached):
            for name in MOVES:
                step = Grid(grid.height, grid.width, cell, grid.goal, grid.walls)
                step.move(name)
                reached.add(step.here)
    return grid.goal in reached


def opening(config: dict[str, Any] | None = None, **interaction_kwargs: Any) -> str:
    """The first user message of a row."""
    return f"{RULES}\n{new_grid(settings(config or {}, GridConfig), arguments(interaction_kwargs, GridTask)).picture()}"


@register_interaction("grid")
class GridInteraction(BaseInteraction):
    """Score 1 at the goal, 0 otherwise."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._config = settings(config, GridConfig)
        self._grids: dict[str, Grid] = {}

    async def start_interaction(self, instance_id: str, **interaction_kwargs: Any) -> str:
        self._grids[instance_id] = new_grid(self._config, arguments(interaction_kwargs, GridTask))
        return instance_id

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **interaction_kwargs: Any) -> tuple[bool, str, float, dict[str, Any]]:
        grid = self._grids[instance_id]
        grid.num_steps += 1
        moves: Sequence[str] = _MOVE.findall(last_answer(messages))
        moved = bool(moves) and grid.move(moves[-1].lower())
        if grid.solved:
            return True, "You are at the goal.", 1.0, {"num_steps": grid.num_steps}
        if grid.num_steps >= self._config.max_steps:
            return True, "No steps are left.", 0.0, {"num_steps": grid.num_steps}
        said = "" if moved else "The way is blocked.\n" if moves else "I see no move: answer with up, down, left or right.\n"
        return False, said + grid.picture(), 0.0, {"num_steps": grid.num_steps}

    async def calculate_score(self, instance_id: str) -> float:
        return float(self._grids[instance_id].solved)

    async def finalize_interaction(self, instance_id: str) -> None:
        self._grids.pop(instance_id, None)
