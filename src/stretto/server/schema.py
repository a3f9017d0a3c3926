"""Requests as they come over the wire. An unknown field, or one we cannot honour, is an error."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from stretto.params import SamplingParams

DEFAULTS = SamplingParams()

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_cache_options": (),
    "prompt_cache_retention": ("in_memory",),
    "reasoning_effort": ("none",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
}
"""OpenAI's fields that are not supported, and the values that ask for nothing, which are."""

INSTEAD = {
    "frequency_penalty": "use stretto.repetition_penalty",
    "presence_penalty": "use stretto.repetition_penalty",
    "top_logprobs": "logprobs gives those of the tokens that were drawn",
}


def _hint(name: str) -> str:
    if name in INSTEAD:
        return INSTEAD[name]
    values = NEUTRAL[name]
    return "leave it out" if not values else f"leave it out, or pass {values[0]!r}"


MAX_FIELDS = 100
"""Of one object, at any depth. What is not ours would each make an error of its own."""

ShortText = Annotated[str, Field(max_length=1000)]

UNSUPPORTED = {
    **{name: _hint(name) for name in NEUTRAL},
    **dict.fromkeys(("name", "tool_calls", "tool_call_id", "refusal"), "leave it out"),
}


class Wire(BaseModel):
    """Strict, closed, and null is the same as left out.

    Bad input costs no more than good: the first bad item of a list is the only one looked at.
    """

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if len(data) > MAX_FIELDS:
            raise ValueError(f"{len(data)} fields are more than there are; leave them out")
        neutral = NEUTRAL if issubclass(cls, Common) else {}
        return {k: v for k, v in data.items() if v is not None and v not in neutral.get(k, ())}


class TextPart(Wire):
    """A part of a message; text is the only type there is."""

    type: Literal["text"]
    text: str


class Message(Wire):
    """A chat message; parts are joined as they are."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]

    def as_dict(self) -> dict[str, str]:
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": self.role, "content": text}


class StreamOptions(Wire):
    """`threads`: chunks also have `stretto.events`, what each thread does as it does it."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False
    threads: bool = False


class ResponseFormat(Wire):
    type: Literal["text"]


class Extension(Wire):
    """What other servers do not have: the method, its budget, and limits of threads.

    `budget`, `pin_prompt`, `page_tokens`, `sinks` and `reindexed` are of methods that keep to a
    budget of visible tokens. `max_thread_tokens` caps each forked thread, `max_forks` their number.
    The last ones are of models that write blocks.
    """

    method: ShortText = "auto"
    budget: int | float | Annotated[str, Field(max_length=16)] | None = None
    pin_prompt: bool = False
    page_tokens: int | None = None
    sinks: int | None = None
    reindexed: bool = False
    top_k: int = 0
    repetition_penalty: float = 1.0
    stop_ids: list[int] = Field(default_factory=list, max_length=64, fail_fast=True)
    max_thread_tokens: int | None = None
    max_forks: int = DEFAULTS.max_forks
    max_rounds: int = DEFAULTS.max_rounds
    order: ShortText = DEFAULTS.order
    steps_ratio: float = DEFAULTS.steps_ratio
    threshold: float | None = None
    length_scale: float = DEFAULTS.length_scale
    early_finish: bool = DEFAULTS.early_finish
    variant: ShortText | None = None
    convention: ShortText | None = None


class Common(Wire):
    """What both kinds of request have."""

    model: str
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    n: Annotated[int, Field(ge=1, le=128)] = 1
    stop: ShortText | Annotated[list[ShortText], Field(max_length=16)] | None = None
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    stretto: Extension | None = None

    @property
    def options(self) -> StreamOptions:
        return StreamOptions() if self.stream_options is None else self.stream_options


class ChatRequest(Common):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    response_format: ResponseFormat | None = None


class CompletionRequest(Common):
    """POST /v1/completions: text as it is, without a chat template."""

    prompt: str | Annotated[list[str], Field(min_length=1, max_length=128, fail_fast=True)]
    logprobs: int | None = None


def known_fields() -> list[str]:
    """All field names there are, for "did you mean"."""
    models = (ChatRequest, CompletionRequest, Extension, StreamOptions, Message)
    return sorted({name for model in models for name in model.model_fields})
