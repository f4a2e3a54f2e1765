"""`create_fusion_documents_chain`: LangChain's stuff-documents chain, which tells the model the documents as well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document
from langchain_core.language_models import LanguageModelLike
from langchain_core.messages import SystemMessage
from langchain_core.output_parsers import BaseOutputParser, StrOutputParser
from langchain_core.prompts import BasePromptTemplate, ChatPromptTemplate, PromptTemplate, format_document
from langchain_core.prompts.chat import HumanMessagePromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnableSequence
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.configurable import DynamicRunnable, RunnableConfigurableAlternatives
from langchain_core.runnables.fallbacks import RunnableWithFallbacks

from fusionrag_engine import ConfigError

from .settings import EngineSettings

if TYPE_CHECKING:
    from fusionrag_engine import Engine


def create_fusion_documents_chain(
    llm: LanguageModelLike,
    prompt: BasePromptTemplate[Any],
    *,
    output_parser: BaseOutputParser[Any] | None = None,
    document_prompt: BasePromptTemplate[str] | None = None,
    document_separator: str = "\n\n",
    document_variable_name: str = "context",
) -> Runnable[dict[str, Any], Any]:
    """A chain that answers from documents; takes and gives what `create_stuff_documents_chain` does.

    The rendered prompt holds the documents' whole text, so any model can stand in for `llm` or beside it, as a
    fallback or an alternative. FusionRAG models get the documents too, and take their text from the caches.

    Args:
        llm: a `ChatFusionRAG` or `FusionRAGLLM`, also bound, with retries, fallbacks or configurable; or another model.
        prompt: takes `document_variable_name` and whatever else the input has; `default_prompt(engine)` makes the first
            document an exact prefix.
        output_parser: None gives the answer's text.
        document_prompt: renders one document from "page_content" and its metadata; what it adds is computed fresh.
        document_separator: between two documents.
        document_variable_name: key of the input that holds the documents, and the prompt's variable for them.

    Raises:
        ConfigError: the prompt does not take `document_variable_name`.
    """
    if document_variable_name not in prompt.input_variables:
        raise ConfigError(
            f"the prompt takes {prompt.input_variables}, but not {document_variable_name!r}, which stands for the "
            f"documents; add {{{document_variable_name}}} to it, or give document_variable_name"
        )
    form = document_prompt or PromptTemplate.from_template("{page_content}")
    parser = output_parser or StrOutputParser()

    def format_inputs(inputs: dict[str, Any]) -> dict[str, Any]:
        texts = (format_document(document, form) for document in inputs[document_variable_name])
        return {**inputs, document_variable_name: document_separator.join(texts)}

    rendered = RunnableLambda(format_inputs, name="format_inputs") | prompt

    def answer(inputs: dict[str, Any]) -> Runnable[dict[str, Any], Any]:
        return rendered | with_documents(llm, inputs[document_variable_name]) | parser

    return RunnableLambda(answer, name="fusion_documents_chain")


def with_documents(llm: Runnable[Any, Any], documents: Sequence[Document]) -> Runnable[Any, Any]:
    """The model with documents bound wherever a FusionRAG model is in it; other models are not told."""
    if isinstance(llm, EngineSettings):
        return llm.bind(documents=list(documents), documents_in_prompt=True)
    if isinstance(llm, RunnableBindingBase):
        return llm.model_copy(update={"bound": with_documents(llm.bound, documents)})
    if isinstance(llm, RunnableWithFallbacks):
        others = [with_documents(other, documents) for other in llm.fallbacks]
        return llm.model_copy(update={"runnable": with_documents(llm.runnable, documents), "fallbacks": others})
    if isinstance(llm, RunnableConfigurableAlternatives):
        alternatives = {name: _alternative(other, documents) for name, other in llm.alternatives.items()}
        return llm.model_copy(update={"default": with_documents(llm.default, documents), "alternatives": alternatives})
    if isinstance(llm, DynamicRunnable):  # configurable fields: the model is made anew at each call
        is_ours = isinstance(llm.default, EngineSettings)
        return llm.bind(documents=list(documents), documents_in_prompt=True) if is_ours else llm
    if isinstance(llm, RunnableSequence):
        return RunnableSequence(*(with_documents(step, documents) for step in llm.steps))
    return llm


def _alternative(other: Any, documents: Sequence[Document]) -> Any:
    """An alternative is a runnable, or a function that makes one when it is chosen."""
    if isinstance(other, Runnable):
        return with_documents(other, documents)
    return lambda: with_documents(other(), documents)


def default_prompt(engine: Engine, question_variable: str = "input") -> ChatPromptTemplate:
    """The prompt that renders to the engine's own layout, so that the first document is an exact prefix. Takes
    "context" and the question ("input", as in `create_retrieval_chain`)."""
    *system, user = engine.default_messages("\0context", "\0question")
    template = user["content"].replace("{", "{{").replace("}", "}}")
    template = template.replace("\0context", "{context}").replace("\0question", f"{{{question_variable}}}")
    first = [SystemMessage(turn["content"]) for turn in system]
    return ChatPromptTemplate.from_messages([*first, HumanMessagePromptTemplate.from_template(template)])
