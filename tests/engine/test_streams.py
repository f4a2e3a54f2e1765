"""Law 9: streamed, async, batched and concurrent answers are token for token those of `generate`."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator

import pytest
import torch

from fusionrag_engine import Engine, Generation, Request, TokenDelta
from tests.engine.support import documents, in_threads, ring, settle, tiny_engine

MakeEngine = Callable[..., Engine]
COUNT = 4
COUNT_REQUESTS = 5


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = tiny_engine()
    engine.precompute(documents(COUNT), neighbours=ring(COUNT))
    yield engine
    engine.close()


def _requests() -> list[Request]:
    chunks = documents(COUNT)
    return [
        Request("Who signs?", chunks, max_new_tokens=9),
        Request("When?", chunks[::-1], method="reuse", max_new_tokens=7),
        Request("Where is it?", chunks[:2], method="full", max_new_tokens=8),
        Request("Why?", [], max_new_tokens=6),
        Request("Which part?", chunks[1:], temperature=1.0, seed=7, max_new_tokens=9),
    ]


@pytest.fixture(scope="module")
def answers(engine: Engine) -> list[Generation]:
    return [engine.generate(request) for request in _requests()]


def _collect(deltas: list[TokenDelta]) -> tuple[str, list[int], str | None]:
    token_ids = [delta.token_id for delta in deltas if delta.token_id is not None]
    return "".join(delta.text for delta in deltas), token_ids, deltas[-1].finish_reason


def _fields(answer: Generation) -> tuple[str, list[int], str]:
    return answer.text, answer.token_ids, answer.finish_reason


def test_the_answers_differ_from_each_other(answers: list[Generation]) -> None:
    """The control: a mixed-up answer would be noticed."""
    assert len({tuple(answer.token_ids) for answer in answers}) == len(answers)


def test_a_stream_joins_to_the_answer(engine: Engine, answers: list[Generation]) -> None:
    for request, answer in zip(_requests(), answers, strict=True):
        assert _collect(list(engine.stream(request))) == _fields(answer)


def test_only_the_last_delta_carries_stats_and_reason(engine: Engine) -> None:
    for request in _requests():
        *others, last = engine.stream(request)
        assert all(delta.stats is None and delta.finish_reason is None for delta in others)
        assert last.stats is not None
        assert last.finish_reason in ("stop", "length")


def test_generate_many_decodes_in_one_forward(
    engine: Engine, answers: list[Generation], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request has its decode row in the first packed step, and finished ones leave the batch."""
    widths, forward = [], engine.runner.forward_logits
    monkeypatch.setattr(engine.runner, "forward_logits", lambda rows: (widths.append(len(rows)), forward(rows))[1])
    assert list(map(_fields, engine.generate_many(_requests()))) == list(map(_fields, answers))
    steps = widths[-max(len(answer.token_ids) for answer in answers) + 1 :]
    assert steps[0] == COUNT_REQUESTS
    assert steps == sorted(steps, reverse=True)


def test_more_requests_than_are_decoded_together(engine: Engine, answers: list[Generation]) -> None:
    many = engine.generate_many(_requests() * 4)
    assert list(map(_fields, many)) == list(map(_fields, answers)) * 4


def test_generate_many_answers_in_order(engine: Engine, answers: list[Generation]) -> None:
    assert [_fields(answer) for answer in engine.generate_many(_requests())] == list(map(_fields, answers))
    assert engine.generate_many([]) == []


def test_interleaved_streams_do_not_disturb_each_other(engine: Engine, answers: list[Generation]) -> None:
    streams = [engine.stream(request) for request in _requests()]
    deltas: list[list[TokenDelta]] = [[] for _ in streams]
    pending = list(range(len(streams)))
    while pending:
        for index in list(pending):
            delta = next(streams[index], None)
            if delta is None:
                pending.remove(index)
            else:
                deltas[index].append(delta)
    assert list(map(_collect, deltas)) == list(map(_fields, answers))


def test_concurrent_threads_get_the_answers_of_a_single_one(engine: Engine, answers: list[Generation]) -> None:
    jobs = [lambda request=request: engine.generate(request) for request in _requests() * 2]
    assert [_fields(answer) for answer in in_threads(jobs)] == [*map(_fields, answers), *map(_fields, answers)]


def test_concurrent_threads_may_meet_the_same_new_chunks(make_engine: MakeEngine) -> None:
    engine = make_engine()
    request = Request("Who?", documents(3), method="reuse", recompute_ratio=1.0)
    expected = tiny_full(request)
    jobs = [lambda: engine.generate(request)] * 4 + [lambda: engine.precompute(documents(3), neighbours=ring(3))]
    answers = in_threads(jobs)[:4]
    assert [answer.token_ids for answer in answers] == [expected] * 4
    settle(engine)
    assert engine.stats()["num_chunks"] == 3


def tiny_full(request: Request) -> list[int]:
    with tiny_engine() as engine:
        return engine.generate(Request(request.question, request.chunks, method="full")).token_ids


async def test_async_answers_are_the_same(engine: Engine, answers: list[Generation]) -> None:
    for request, answer in zip(_requests(), answers, strict=True):
        assert _fields(await engine.agenerate(request)) == _fields(answer)
        assert _collect([delta async for delta in engine.astream(request)]) == _fields(answer)


async def test_async_tasks_run_side_by_side(engine: Engine, answers: list[Generation]) -> None:
    done = await asyncio.gather(*[engine.agenerate(request) for request in _requests() * 2])
    assert list(map(_fields, done)) == [*map(_fields, answers), *map(_fields, answers)]


async def test_the_event_loop_is_not_blocked(engine: Engine) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(tick())
    await engine.agenerate(Request("Who?", documents(COUNT), max_new_tokens=5))
    task.cancel()
    assert ticks > 20


def test_a_stream_closed_half_way_disturbs_nothing(engine: Engine, answers: list[Generation]) -> None:
    request = _requests()[0]
    for num_read in (0, 1, 3):
        stream = engine.stream(request)
        for _ in range(num_read):
            next(stream)
        stream.close()  # type: ignore[attr-defined]
        assert _fields(engine.generate(request)) == _fields(answers[0])
    abandoned = engine.stream(request)
    next(abandoned)
    del abandoned
    gc.collect()
    assert _fields(engine.generate(request)) == _fields(answers[0])


def test_a_stream_closed_half_way_still_stores_the_chunks_it_met(make_engine: MakeEngine) -> None:
    engine = make_engine()
    stream = engine.stream(Request("Who?", ["Seen for a moment."]))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert engine.prefill(Request("Who?", ["Seen for a moment."])).stats.chunk_status == ["prefix"]


def test_nothing_is_computed_before_a_stream_is_read(engine: Engine) -> None:
    before = engine.stats()["num_requests"]
    engine.stream(_requests()[0])
    assert engine.stats()["num_requests"] == before


async def test_a_cancelled_task_disturbs_nothing(engine: Engine, answers: list[Generation]) -> None:
    for delay in (0.0, 0.005, 0.02):
        task = asyncio.create_task(engine.agenerate(Request("Who?", documents(COUNT), max_new_tokens=200)))
        await asyncio.sleep(delay)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert _fields(await engine.agenerate(_requests()[0])) == _fields(answers[0])


async def test_an_async_stream_left_half_way_stops_generating(engine: Engine, answers: list[Generation]) -> None:
    async for _ in engine.astream(Request("Who?", documents(COUNT), max_new_tokens=2000)):
        break
    # On the one worker the abandoned stream would stand in the way for many seconds.
    answer = await asyncio.wait_for(engine.agenerate(_requests()[0]), 20)
    assert _fields(answer) == _fields(answers[0])


async def test_an_async_stream_survives_the_closing_of_its_engine() -> None:
    engine = tiny_engine()
    stream = engine.astream(Request("Who?", documents(2), max_new_tokens=50))
    await anext(stream)
    engine.close()
    await stream.aclose()  # type: ignore[attr-defined]


async def test_errors_reach_the_awaiting_task(engine: Engine) -> None:
    from fusionrag_engine import ContextOverflowError

    too_long = Request("Who?", ["word " * 5000])
    with pytest.raises(ContextOverflowError):
        await engine.agenerate(too_long)
    with pytest.raises(ContextOverflowError):
        async for _ in engine.astream(too_long):
            pass


def test_a_stream_leaves_the_consumers_grad_mode_alone(engine: Engine) -> None:
    stream = engine.stream(_requests()[0])
    next(stream)
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()
    weight = torch.ones(2, requires_grad=True)
    (weight * 2).sum().backward()
    assert weight.grad is not None
    logits = engine.prefill(_requests()[0]).logits
    assert not logits.is_inference()
    list(stream)


def test_an_engine_may_be_used_from_a_thread_that_did_not_make_it(make_engine: MakeEngine) -> None:
    engine = make_engine()
    request = Request("Who?", documents(3))
    (report,) = in_threads([lambda: engine.precompute(documents(3), neighbours=ring(3))])
    assert report.num_enriched_computed == 3
    (first,) = in_threads([lambda: engine.generate(request)])
    assert first.token_ids == engine.generate(request).token_ids
