"""Settings of the whole suite: undeclared metrics raise, one torch thread a process, no network look-ups, no time limit
for one example of a property: a busy machine is no fault of the code."""

from __future__ import annotations

import os

os.environ.setdefault("STREAMRL_STRICT_METRICS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from hypothesis import settings

settings.register_profile("suite", deadline=None)
settings.load_profile("suite")
