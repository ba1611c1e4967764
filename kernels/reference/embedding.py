"""y[t] = table[ids[t]]."""

from torch import Tensor


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """`ids` (T,) of any integer type, `table` (N, H); gives (T, H)."""
    return table.index_select(0, ids)
