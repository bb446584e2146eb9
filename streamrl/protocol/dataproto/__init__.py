"""DataProto: padded tensors, object columns and metadata of one batch. ``container.py`` is the class, ``padding.py`` the shape changes around it."""

from streamrl.protocol.dataproto.container import DataProto, DataProtoConfig, DataProtoItem
from streamrl.protocol.dataproto.padding import fold_batch_dim, pad_dataproto_to_divisor, unfold_batch_dim, unpad_dataproto

__all__ = [
    "DataProto",
    "DataProtoConfig",
    "DataProtoItem",
    "fold_batch_dim",
    "pad_dataproto_to_divisor",
    "unfold_batch_dim",
    "unpad_dataproto",
]
