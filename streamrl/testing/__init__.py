"""Fakes that ship, for tests of user code too: clocks that need no sleeping, faults on order, builders of rows, a conversation without a model.

The scripted engine is ``streamrl.engines.scripted``.
"""

from streamrl.testing.clocks import JumpingClock, StepClock
from streamrl.testing.faults import FaultyChannel, PacedClock
from streamrl.testing.rows import make_trajectory
from streamrl.testing.talk import CharTokenizer, FixedAnswers

__all__ = ["CharTokenizer", "FaultyChannel", "FixedAnswers", "JumpingClock", "PacedClock", "StepClock", "make_trajectory"]
