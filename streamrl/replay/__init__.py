"""Which group is generated, kept, trained or dropped, and when. Knows keys and tags, never tensors.

Start at ``buffer.py`` (the state machine); ``journalled.py`` makes it survive its process, ``service.py`` gives it waits with deadlines. Imports
no torch.
"""

from streamrl.replay.buffer import ReplayBuffer
from streamrl.replay.journalled import JournalledBuffer
from streamrl.replay.records import BufferSpec
from streamrl.replay.service import ReplayService

__all__ = ["BufferSpec", "JournalledBuffer", "ReplayBuffer", "ReplayService"]
