"""Attention ops of FusionRAG: each with a float32 reference and fast paths, chosen in one dispatch."""

from fusionrag_kernels.assemble import assemble
from fusionrag_kernels.critical_scores import critical_scores
from fusionrag_kernels.errors import ArgumentError, ImplementationError, KernelError
from fusionrag_kernels.paged_q_sparse_attention import PageTable, mark_stale, paged_q_sparse_attention
from fusionrag_kernels.q_sparse_attention import q_sparse_attention

__all__ = [
    "ArgumentError",
    "ImplementationError",
    "KernelError",
    "PageTable",
    "assemble",
    "critical_scores",
    "mark_stale",
    "paged_q_sparse_attention",
    "q_sparse_attention",
]
