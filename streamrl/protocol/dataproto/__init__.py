"""DataProto: padded tensors, object columns and metadata of one batch.

``container.py`` is the class; its column operations are in ``columns.py``, its row moves in ``rows.py``; ``padding.py`` has the shape changes around
it, ``merge.py`` the joins, ``disk.py`` the file.
"""

from streamrl.protocol.dataproto.container import DataProto
from streamrl.protocol.dataproto.padding import fold_batch_dim, pad_dataproto_to_divisor, unfold_batch_dim, unpad_dataproto
from streamrl.protocol.dataproto.rows import DataProtoConfig, DataProtoItem

__all__ = [
    "DataProto",
    "DataProtoConfig",
    "DataProtoItem",
    "fold_batch_dim",
    "pad_dataproto_to_divisor",
    "unfold_batch_dim",
    "unpad_dataproto",
]
