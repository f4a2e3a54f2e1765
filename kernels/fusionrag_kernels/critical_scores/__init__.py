"""How much attention some rows, usually the question's, pay to each key."""

from collections.abc import Callable

from torch import Tensor

from fusionrag_kernels.checks import check_queries_and_keys, check_visibility
from fusionrag_kernels.critical_scores import cpu, reference
from fusionrag_kernels.dispatch import Implementation, resolve
from fusionrag_kernels.errors import ArgumentError

NORMS = ("sum", "l2", "unnormalised")


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
    norm: str = "sum",
    impl: str = "auto",
) -> Tensor:
    """How much attention each key gets from all query heads h and rows i.

    With s_hij the scaled, soft-capped score of a key j that row i sees, and w_hij its softmax over those keys:
    - norm="sum": sum over h, i of w_hij (FusionRAG, arXiv 2601.12904 section 3.2);
    - norm="l2": the root of the sum over h, i of w_hij ** 2 (InfoFlow, arXiv 2603.05353);
    - norm="unnormalised": log of the sum over h, i of exp(s_hij): the exponentials without their row's softmax sum, in
      logarithm, which cannot overflow.

    Which keys a row sees, and all arguments, are those of `q_sparse_attention` (section 4.3); no values are needed.
    At most one block of rows is held, never a [Nq, Nk] matrix.

    Args:
        q: [Nq, Hq, D], float32, float16 or bfloat16.
        k: [Nk, Hkv, D], same dtype and device as q, any strides; a [Hkv, Nk, D] canvas transposed is fast.
        q_positions: int64 [Nq]. kv_positions: int64 [Nk], or None where a key's row is its position.
        scale, window, softcap, kv_valid, impl: see `q_sparse_attention`.
        norm: "sum", "l2" or "unnormalised". Only "sum" adds up over calls; "l2" adds in squares, "unnormalised" by
            logaddexp.

    Returns:
        float32 [Nk]. "sum" is in [0, Hq * Nq] and adds up to Hq * (number of rows that see a key). A key that no row
        sees has 0 ("unnormalised": -inf), whatever its memory holds.

    Raises:
        ArgumentError: a shape, dtype, device, window, softcap or norm does not fit the above.
        ImplementationError: `impl` is unknown or not available.
    """
    check_queries_and_keys(q, k)
    check_visibility(q, k, q_positions, kv_positions, kv_valid, window, softcap)
    if norm not in NORMS:
        raise ArgumentError(f"norm is one of {', '.join(NORMS)}, got {norm!r}")
    op = _implementation(resolve(impl, q.device, q.shape[2]))
    return op(
        q, k, q_positions, kv_positions, scale=scale, window=window, softcap=softcap, kv_valid=kv_valid, norm=norm
    )


def _implementation(name: Implementation) -> Callable[..., Tensor]:
    if name == "triton":
        from fusionrag_kernels.critical_scores import kernel

        return kernel.critical_scores
    return cpu.critical_scores if name == "cpu" else reference.critical_scores
