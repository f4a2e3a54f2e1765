"""`ChatFusionRAG`: the engine as a LangChain chat model, aware of the documents a prompt was made from."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, closing
from typing import Any, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from pydantic import model_validator

from fusionrag_engine import FusionRAGError, TokenDelta

from .calls import Call, usage
from .messages import make_turns
from .prompting import chat_prompt
from .settings import EngineSettings


class ToolsNotSupportedError(FusionRAGError, NotImplementedError):
    """Tool calls or structured output were asked of a model that cannot give them."""


class ChatFusionRAG(EngineSettings, BaseChatModel):
    """A local causal LM behind the FusionRAG engine.

    Documents come with a call - `invoke(messages, documents=[...])`, `.bind(documents=[...])` - or with a message:
    `additional_kwargs["documents"]`, or the Documents in a `ToolMessage`'s artifact. Where their text stands in the
    prompt, it is taken from their caches. Where the messages hold the text of none of them, they are put in front of
    the question, in the engine's own layout (`documents_in_prompt=True` in a call forbids it: the messages hold them in
    another form). Without documents it is any chat model: ordinary prefill.

    What the cache did is in `message.response_metadata["fusionrag"]`; `explain(message)` makes a table of it.

    Args:
        engine: a ready engine, shared; or
        model: directory or Hub name to make one from, with `engine_config`.

    Settings (see `EngineSettings`) hold for every call and can be given per call, where None is the model's own.

    Raises:
        UnknownSettingError: a setting was given under a name that does not exist.
        AnswerTimeoutError: an answer took longer than `timeout`.
        ContextOverflowError: the prompt is longer than the model's context.
    """

    @model_validator(mode="after")
    def _with_profile(self) -> Self:
        if self.profile is None:
            self.profile = {
                "max_input_tokens": self.engine.max_context,
                "max_output_tokens": self.max_tokens or self.engine.config.max_new_tokens,
                "tool_calling": False,
                "structured_output": False,
                "image_inputs": False,
            }
        return self

    @property
    def _llm_type(self) -> str:
        return "fusionrag-chat"

    def bind_tools(self, tools: Sequence[Any], **_kwargs: Any) -> Any:
        """Not possible; `with_structured_output` would need it too.

        Raises:
            ToolsNotSupportedError: always.
        """
        raise ToolsNotSupportedError(
            "ChatFusionRAG calls no tools and gives no structured output: the engine has no constrained decoding that "
            "would make a model's text a valid call. Let a graph call the retrieval tool, and give the model its "
            "ToolMessage; parse answers with an output parser"
        )

    def _make_call(self, messages: Sequence[BaseMessage], stop: Sequence[str] | None, given: dict[str, Any]) -> Call:
        settings = self._call_settings(stop, given)
        documents, can_place = self._call_documents(given)
        prompt = chat_prompt(
            self.engine, make_turns(messages), documents, scope=settings.pop("scope"), can_place=can_place
        )
        return Call(self.engine, self.model, prompt, prompt.request(**settings), self.timeout)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = self._make_call(messages, stop, kwargs)
        return _result(call, list(call.deltas()))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = self._make_call(messages, stop, kwargs)
        return _result(call, [delta async for delta in call.adeltas()])

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        call = self._make_call(messages, stop, kwargs)
        pieces: Any = call.pieces()
        with closing(pieces):
            yield from (_item(call, delta) for delta in pieces)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        call = self._make_call(messages, stop, kwargs)
        pieces: Any = call.apieces()
        async with aclosing(pieces):
            async for delta in pieces:
                yield _item(call, delta)


def _result(call: Call, deltas: Sequence[TokenDelta]) -> ChatResult:
    message = AIMessage(
        "".join(delta.text for delta in deltas),
        usage_metadata=usage(deltas[-1].stats),
        response_metadata=call.metadata(deltas[-1]),
    )
    return ChatResult(generations=[ChatGeneration(message=message)])


def _item(call: Call, delta: TokenDelta) -> ChatGenerationChunk:
    """Counts are on the last item alone: LangChain adds them up."""
    if delta.stats is None:
        return ChatGenerationChunk(message=AIMessageChunk(content=delta.text))
    message = AIMessageChunk(
        content=delta.text,
        usage_metadata=usage(delta.stats),
        response_metadata=call.metadata(delta),
        chunk_position="last",
    )
    return ChatGenerationChunk(message=message)
