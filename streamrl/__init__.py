"""streamrl: an asynchronous, streaming RL trainer for language models.

Start reading at ``streamrl/pipeline/loops.py`` (who consumes, produces, waits and unblocks) and ``streamrl/protocol/`` (the nouns).
Nothing in this package imports Ray; the processes live in ``actors/``.
"""

__version__ = "0.1.0"
