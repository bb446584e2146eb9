"""The store: rows in shared-memory segments, found by (partition, key, field).

``store.py`` is the client with the kv verbs, ``index.py`` the one owner of segments and pieces, ``columns.py`` how values become bytes,
``segments.py`` the files, ``sweep.py`` what removes those of dead runs. Importing it needs no torch.
"""

from streamrl.dataplane.index import IndexCalls, StoreIndex
from streamrl.dataplane.store import Store
from streamrl.dataplane.sweep import sweep

__all__ = ["IndexCalls", "Store", "StoreIndex", "sweep"]
