"""Fakes that ship, for tests of user code too: clocks that need no sleeping, builders of rows. The scripted engine is ``streamrl.engines.scripted``."""

from streamrl.testing.clocks import JumpingClock, StepClock
from streamrl.testing.rows import make_trajectory

__all__ = ["JumpingClock", "StepClock", "make_trajectory"]
