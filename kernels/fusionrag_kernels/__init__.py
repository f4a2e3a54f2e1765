"""Attention ops of FusionRAG: each with a float32 reference and a fast path, chosen in one dispatch."""

from fusionrag_kernels.critical_scores import critical_scores
from fusionrag_kernels.errors import ArgumentError, ImplementationError, KernelError
from fusionrag_kernels.q_sparse_attention import q_sparse_attention

__all__ = ["ArgumentError", "ImplementationError", "KernelError", "critical_scores", "q_sparse_attention"]
