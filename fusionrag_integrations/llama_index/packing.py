"""Packing whole nodes into prompts, with the model's own tokenizer.

LlamaIndex's `PromptHelper` counts with another tokenizer, strips texts and cuts them in the middle; a node that was cut
is a miss.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from llama_index.core.schema import NodeWithScore

from fusionrag_engine import ContextOverflowError, Engine

from .pieces import split_text
from .trace import Trace

logger = logging.getLogger("fusionrag")


def pack(
    engine: Engine,
    nodes: Sequence[NodeWithScore],
    room: Callable[[bool], int],
    trace: Trace,
    *,
    is_one_each: bool = False,
) -> list[list[NodeWithScore]]:
    """Groups of whole nodes, in order, each small enough for one prompt. A node that fits into none is left out.

    Args:
        room: whether the answer takes several prompts -> tokens that nodes may take in each of them.
        trace: told about every group and every node left out.
        is_one_each: a prompt a node, even where more would fit.

    Raises:
        ContextOverflowError: not a single node fits.
    """
    separator, sizes = _sizes(engine, nodes)
    limit = room(False)
    if (is_one_each and len(nodes) > 1) or sum(sizes) + separator * (len(sizes) - 1) > limit:
        limit = min(limit, room(True))
    groups: list[list[NodeWithScore]] = []
    left = 0
    for node, size in zip(nodes, sizes, strict=True):
        if size > limit:
            _drop(node, f"the node has {size} tokens, but only {max(limit, 0)} {_FIT}", trace)
        elif groups and not is_one_each and size + separator <= left:
            groups[-1].append(node)
            left -= size + separator
        else:
            groups.append([node])
            left = limit - size
    return _told(engine, groups, sizes, limit, trace)


def pack_best(
    engine: Engine, nodes: Sequence[NodeWithScore], room: Callable[[bool], int], trace: Trace
) -> list[NodeWithScore]:
    """The nodes that fit into one prompt, in order: the lowest scores are left out first, then the last ones.

    Raises:
        ContextOverflowError: not a single node fits.
    """
    separator, sizes = _sizes(engine, nodes)
    limit = room(False)
    worst_first = sorted(range(len(nodes)), key=lambda index: (nodes[index].score or 0.0, -index))
    kept = dict(enumerate(nodes))
    needed = sum(sizes) + separator * (len(sizes) - 1)
    for index in worst_first:
        if needed <= limit or not kept:
            break
        needed -= sizes[index] + separator
        _drop(kept.pop(index), f"the nodes have {sum(sizes)} tokens, but only {max(limit, 0)} {_FIT}", trace)
    groups = [list(kept.values())] if kept else []
    return _told(engine, groups, sizes, limit, trace)[0]


def pack_texts(engine: Engine, texts: Sequence[str], limit: int) -> list[str]:
    """Texts joined into as few as possible, of at most `limit` tokens each.

    Raises:
        ContextOverflowError: no two of them fit together.
    """
    separator = engine.config.chunk_separator
    joined: list[str] = []
    for text in texts:
        longer = f"{joined[-1]}{separator}{text}" if joined else ""
        if joined and engine.count_tokens(longer) <= limit:
            joined[-1] = longer
        else:
            joined.append(text)
    if len(joined) == len(texts) > 1:
        raise ContextOverflowError(
            f"no two of {len(texts)} partial answers fit into one prompt, beside the question and the answer "
            f"{max(limit, 0)} tokens are left; lower max_new_tokens"
        )
    return joined


_FIT = "fit beside the question and the answer"


def _sizes(engine: Engine, nodes: Sequence[NodeWithScore]) -> tuple[int, list[int]]:
    """Tokens of the separator, and of each node's piece."""
    sizes = [sum(map(engine.count_tokens, split_text(node))) for node in nodes]
    return engine.count_tokens(engine.config.chunk_separator), sizes


def _drop(node: NodeWithScore, reason: str, trace: Trace) -> None:
    logger.warning("node %s is left out: %s", node.node.node_id, reason)
    trace.drop(node.node.node_id, reason)


def _told(
    engine: Engine, groups: list[list[NodeWithScore]], sizes: Sequence[int], limit: int, trace: Trace
) -> list[list[NodeWithScore]]:
    """The groups, once the trace knows them."""
    if not groups:
        raise ContextOverflowError(
            f"none of {len(sizes)} nodes fits into the context of {engine.max_context} tokens: beside the question and "
            f"the answer {max(limit, 0)} are left for nodes, the smallest has {min(sizes)}; split the documents "
            f"smaller, or lower max_new_tokens"
        )
    for group in groups:
        trace.group([node.node.node_id for node in group])
    return groups
