"""From a request on the wire to samples that are ready to be queued."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stretto.errors import InvalidInput
from stretto.methods import EVICTING, METHODS
from stretto.methods.spelling import BUDGET, SETTINGS, spell
from stretto.params import BLOCK_FIELDS, SURROGATE, SamplingParams
from stretto.server.errors import ApiError, of_input
from stretto.server.schema import ChatRequest, Common, CompletionRequest, Extension
from stretto.server.settings import Settings

if TYPE_CHECKING:
    from stretto.lm import LM, Prompt
    from stretto.stream import Stream


@dataclass(frozen=True)
class Ask:
    """What a client asks for: `num_samples` answers to each prompt, in this order of choices.

    `owner`: who asks; what prompts begin with is shared with those of the same one alone.
    """

    prompts: tuple[Prompt, ...]
    num_samples: int
    params: SamplingParams
    method: str
    is_raw: bool
    owner: str = ""

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.num_samples

    def prepare(self, lm: LM) -> list[Stream]:
        """A stream a choice, none of them queued. Takes time: it encodes the prompts. Raises
        `ApiError`."""
        try:
            streams = [
                lm.prepare(prompt, self.params, method=self.method, raw=self.is_raw, sample=sample)
                for prompt in self.prompts
                for sample in range(self.num_samples)
            ]
        except InvalidInput as error:
            refusal = of_input(error)
            if refusal.param == "messages" and self.is_raw:
                refusal.param = "prompt"
            raise refusal from None
        for stream in streams:
            stream.request.memory.owner = self.owner
        return streams


def accepted_methods(lm: LM) -> list[str]:
    """Names of methods by which the model answers a short prompt, its own way first. Those that
    need a budget are among them if they would be accepted with one."""
    own = lm.find_method().name
    return [name for name in dict.fromkeys((own, *METHODS)) if _is_accepted(lm, name)]


def _is_accepted(lm: LM, name: str) -> bool:
    settings = {BUDGET: lm.engine.max_positions} if name in EVICTING else {}
    ask = Ask(("a",), 1, SamplingParams(), spell(name, settings), is_raw=False)
    try:
        ask.prepare(lm)
    except ApiError:
        return False
    return True


def read_ask(body: Common, settings: Settings, owner: str = "") -> Ask:
    """What an owner's request asks for. Raises `ApiError` for what cannot be answered as asked."""
    _check(body)
    prompts = _prompts(body)
    if len(prompts) * body.n > settings.max_samples:
        raise ApiError(
            400,
            f"n {body.n} of {len(prompts)} prompts makes more samples than the "
            f"{settings.max_samples} that one request may have here; ask for fewer",
            param="n",
            code="invalid_value",
        )
    own = Extension() if body.stretto is None else body.stretto
    try:
        return Ask(
            prompts=prompts,
            num_samples=body.n,
            params=_params(body, own, settings),
            method=spell(own.method, {key: getattr(own, key) for key in SETTINGS}),
            is_raw=isinstance(body, CompletionRequest),
            owner=owner,
        )
    except InvalidInput as error:
        raise of_input(error) from None


def _prompts(body: Common) -> tuple[Prompt, ...]:
    if isinstance(body, ChatRequest):
        prompts: tuple[Prompt, ...] = ([message.as_dict() for message in body.messages],)
        texts, param = [message.as_dict()["content"] for message in body.messages], "messages"
    else:
        assert isinstance(body, CompletionRequest)
        several = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        prompts, texts, param = tuple(several), several, "prompt"
    for text in texts:
        if (found := SURROGATE.search(text)) is not None:
            raise ApiError(
                400,
                f"{param} has half a surrogate pair, {found[0]!a}; send UTF-8 text",
                param=param,
                code="invalid_value",
            )
    return prompts


def _check(body: Common) -> None:
    """Raises for fields that do not go together."""
    if body.stream_options is not None and not body.stream:
        raise ApiError(
            400, "stream_options needs stream: true; leave it out", param="stream_options",
            code="invalid_value",
        )  # fmt: skip
    if isinstance(body, CompletionRequest) and body.logprobs:
        raise ApiError(
            400,
            f"logprobs {body.logprobs} is not supported; 0 gives those of the tokens drawn",
            param="logprobs",
            code="unsupported_parameter",
        )
    if isinstance(body, ChatRequest) and None not in (body.max_tokens, body.max_completion_tokens):
        raise ApiError(
            400, "max_tokens and max_completion_tokens are the same; leave one out",
            param="max_completion_tokens", code="invalid_value",
        )  # fmt: skip


def _params(body: Common, own: Extension, settings: Settings) -> SamplingParams:
    """The runtime's settings. Without a seed there is a new one each time, as OpenAI has it."""
    max_tokens = body.max_tokens
    if isinstance(body, ChatRequest) and max_tokens is None:
        max_tokens = body.max_completion_tokens
    return SamplingParams(
        max_tokens=settings.max_tokens if max_tokens is None else max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=own.top_k,
        repetition_penalty=own.repetition_penalty,
        stop=() if body.stop is None else (body.stop,)
        if isinstance(body.stop, str) else tuple(body.stop),
        stop_ids=frozenset(own.stop_ids),
        seed=secrets.randbelow(1 << 31) if body.seed is None else body.seed,
        max_thread_tokens=own.max_thread_tokens,
        max_forks=own.max_forks,
        **{name: getattr(own, name) for name in (*BLOCK_FIELDS, "variant", "convention")},
    )  # fmt: skip
