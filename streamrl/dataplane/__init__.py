"""The store: rows in shared-memory segments, found by (partition, key, field).

``store.py`` is the client with the kv verbs, ``calls.py`` what it asks of ``index.py``, the one owner of segments and pieces. ``columns.py``: how
values become bytes; ``segments.py``: the files; ``spill.py``: those on disk; ``journal.py``: what lets the index outlive its process; ``sweep.py``:
what removes the files of dead runs; ``remote.py``: a store as another node uses it; ``nodes.py``: the stores of all nodes as one. Importing it needs no torch.
"""

from streamrl.dataplane.calls import IndexCalls
from streamrl.dataplane.index import StoreIndex
from streamrl.dataplane.journal import has_journal, journalled_folder
from streamrl.dataplane.nodes import NodeStore
from streamrl.dataplane.remote import StoreFace
from streamrl.dataplane.store import Store
from streamrl.dataplane.sweep import sweep

__all__ = ["IndexCalls", "NodeStore", "Store", "StoreFace", "StoreIndex", "has_journal", "journalled_folder", "sweep"]
