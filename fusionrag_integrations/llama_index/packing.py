"""Packing whole nodes into prompts, with the model's own tokenizer.

LlamaIndex's `PromptHelper` counts with another tokenizer, strips texts and cuts them in the middle; a node that was cut
is a miss.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from llama_index.core.schema import NodeWithScore

from fusionrag_engine import ContextOverflowError, Engine

from .prompting import node_text
from .trace import Trace

logger = logging.getLogger("fusionrag")


def pack(
    engine: Engine, nodes: Sequence[NodeWithScore], room: Callable[[bool], int], trace: Trace
) -> list[list[NodeWithScore]]:
    """Groups of whole nodes, in order, each small enough for one prompt. A node that fits into none is left out.

    Args:
        room: whether the answer is refined over several prompts -> tokens that nodes may take in each of them.
        trace: told about every group and every node left out.

    Raises:
        ContextOverflowError: not a single node fits.
    """
    separator = engine.count_tokens(engine.config.chunk_separator)
    sizes = [engine.count_tokens(node_text(node)) for node in nodes]
    limit = room(False)
    if sum(sizes) + separator * (len(sizes) - 1) > limit:
        limit = min(limit, room(True))
    groups: list[list[NodeWithScore]] = []
    left = 0
    for node, size in zip(nodes, sizes, strict=True):
        if size > limit:
            reason = f"the node has {size} tokens, but only {max(limit, 0)} fit beside the question and the answer"
            logger.warning("node %s is left out: %s", node.node.node_id, reason)
            trace.drop(node.node.node_id, reason)
        elif groups and size + separator <= left:
            groups[-1].append(node)
            left -= size + separator
        else:
            groups.append([node])
            left = limit - size
    if not groups:
        raise ContextOverflowError(
            f"none of {len(nodes)} nodes fits into the context of {engine.max_context} tokens: beside the question and "
            f"the answer {max(limit, 0)} are left for nodes, the smallest has {min(sizes)}; split the documents "
            f"smaller, or lower max_new_tokens"
        )
    for group in groups:
        trace.group([node.node.node_id for node in group])
    return groups
