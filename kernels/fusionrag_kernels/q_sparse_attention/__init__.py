"""Attention of some rows of a prompt, at their own positions, over all its keys and values."""

from collections.abc import Callable

from torch import Tensor

from fusionrag_kernels.checks import check_queries_and_keys, check_values, check_visibility
from fusionrag_kernels.dispatch import Implementation, resolve
from fusionrag_kernels.q_sparse_attention import cpu, reference


def q_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_positions: Tensor,
    kv_positions: Tensor | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    kv_valid: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Causal grouped-query attention of the rows at `q_positions` (Q-Sparse-Attn: FusionRAG, arXiv 2601.12904 section
    4.3).

    Row i attends to key j iff kv_positions[j] <= q_positions[i], and q_positions[i] - kv_positions[j] < window, and
    kv_valid[j]. The softmax is taken in float32. Inference only: no gradient flows through it.

    Args:
        q: [Nq, Hq, D], float32, float16 or bfloat16; query head h reads key head h // (Hq // Hkv).
        k: [Nk, Hkv, D], v: [Nk, Hkv, Dv], same dtype and device as q, any strides. A [Hkv, Nk, D] canvas passed as
            `canvas.transpose(0, 1)` is the fast layout and is not copied in float32.
        q_positions: int64 [Nq] token positions, any order, repeats allowed; ascending is fast.
        kv_positions: int64 [Nk] likewise; None (fast) says that a key's row is its position.
        scale: factor on q.k, before the soft cap.
        window: None, or how many tokens a row sees counting itself.
        softcap: None, or c in c * tanh(scale * q.k / c) (Gemma 2).
        kv_valid: bool [Nk]; None says that every key is valid.
        impl: "auto", "triton" (CUDA tensors, heads up to 256), "cpu" (blocked plain torch, any device) or "reference".

    Returns:
        [Nq, Hq, Dv] in q's dtype, contiguous, rows in q's order; zeros for a row that sees no key.
        Keys that no row sees are never read into a result: they may be unwritten memory, NaN or infinite.

    Raises:
        ArgumentError: a shape, dtype, device, window or softcap does not fit the above.
        ImplementationError: `impl` is unknown or not available.
    """
    check_queries_and_keys(q, k)
    check_values(k, v)
    check_visibility(q, k, q_positions, kv_positions, kv_valid, window, softcap)
    op = _implementation(resolve(impl, q.device, max(q.shape[2], v.shape[2])))
    return op(q, k, v, q_positions, kv_positions, scale=scale, window=window, softcap=softcap, kv_valid=kv_valid)


def _implementation(name: Implementation) -> Callable[..., Tensor]:
    if name == "triton":
        from fusionrag_kernels.q_sparse_attention import kernel

        return kernel.q_sparse_attention
    return cpu.q_sparse_attention if name == "cpu" else reference.q_sparse_attention
