"""How much attention some rows, usually the question's, pay to each key."""

from torch import Tensor

from fusionrag_kernels.checks import check_queries_and_keys, check_visibility
from fusionrag_kernels.critical_scores import cpu, reference
from fusionrag_kernels.dispatch import resolve


def critical_scores(
    q: Tensor,
    k: Tensor,
    q_positions: Tensor,
    kv_positions: Tensor | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    kv_valid: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Softmax attention weight of each key, summed over query heads and rows (FusionRAG, arXiv 2601.12904 section 3.2).

    Which keys a row sees, and all arguments, are those of `q_sparse_attention` (section 4.3); no values are needed.
    At most one block of rows is held, never a [Nq, Nk] matrix.

    Args:
        q: [Nq, Hq, D], float32, float16 or bfloat16.
        k: [Nk, Hkv, D], same dtype and device as q, any strides; a [Hkv, Nk, D] canvas transposed is fast.
        q_positions: int64 [Nq]. kv_positions: int64 [Nk], or None where a key's row is its position.
        scale, window, softcap, kv_valid, impl: see `q_sparse_attention`.

    Returns:
        float32 [Nk], in [0, Hq * Nq], with sum Hq * (number of rows that see a key); 0 for a key that no row sees,
        whatever its memory holds.

    Raises:
        ArgumentError: a shape, dtype, device, window or softcap does not fit the above.
        ImplementationError: `impl` is unknown or not available.
    """
    check_queries_and_keys(q, k)
    check_visibility(q, k, q_positions, kv_positions, kv_valid, window, softcap)
    op = cpu.critical_scores if resolve(impl) == "cpu" else reference.critical_scores
    return op(q, k, q_positions, kv_positions, scale=scale, window=window, softcap=softcap, kv_valid=kv_valid)
