"""TensorDict functions for rows of tokens: build columns, move rows, compare, and change between the jagged and the padded layout.

Nothing here knows a key, a tag or a store. Read ``jagged.py`` first, then ``columns.py``, ``rows.py``, ``padding.py``.
"""

from streamrl.protocol.tensors.columns import (
    assign_non_tensor,
    get,
    get_keys,
    get_tensordict,
    list_of_dict_to_tensordict,
    object_array,
    object_stack,
    pop,
    pop_keys,
)
from streamrl.protocol.tensors.compare import assert_equal, describe
from streamrl.protocol.tensors.jagged import concat_nested, lengths_of, nested_from_list, rows_of
from streamrl.protocol.tensors.padding import (
    left_right_2_no_padding,
    no_padding_2_padding,
    response_from_nested,
    response_to_nested,
    to_padded_dataproto,
    to_padded_tensor,
)
from streamrl.protocol.tensors.rows import (
    chunk_tensordict,
    concat_tensordict,
    index_select,
    make_iterator,
    pad_to_divisor,
    slice_tensordict,
    union,
    unpad,
)

__all__ = [
    "assert_equal",
    "assign_non_tensor",
    "chunk_tensordict",
    "concat_nested",
    "concat_tensordict",
    "describe",
    "get",
    "get_keys",
    "get_tensordict",
    "index_select",
    "left_right_2_no_padding",
    "lengths_of",
    "list_of_dict_to_tensordict",
    "make_iterator",
    "nested_from_list",
    "no_padding_2_padding",
    "object_array",
    "object_stack",
    "pad_to_divisor",
    "pop",
    "pop_keys",
    "response_from_nested",
    "response_to_nested",
    "rows_of",
    "slice_tensordict",
    "to_padded_dataproto",
    "to_padded_tensor",
    "union",
    "unpad",
]
