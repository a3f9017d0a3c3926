"""`LM`: a model ready to answer prompts, with threads over one pool. The Python API."""

from __future__ import annotations

import secrets
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from stretto.dialects import DialectSettings, get_dialect
from stretto.engines.choose import AUTO as AUTO_ENGINE
from stretto.engines.choose import check_engine, make_engine
from stretto.errors import InvalidInput, PromptTooLong, Unsupported
from stretto.methods import AUTO, Method, get_method
from stretto.params import SamplingParams, check_int
from stretto.stream import Stream

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from stretto.completion import Completion
    from stretto.dialects.base import Session
    from stretto.engines.base import Engine, Extra
    from stretto.methods import HidingMethod
    from stretto.runtime.policy import Policy
    from stretto.runtime.request import Request, Script
    from stretto.tokens import HFVocabulary, ModelCard

Prompt = str | Sequence[dict[str, str]]
"""A question, or chat messages with `role` and `content`."""

DEFAULT_POOL_SLOTS = 8192
FLEX_PAGE_SIZE = 128
"""Of engine `flex` unless another is given: a block of FlexAttention."""


class LM:
    """A model, its vocabulary and dialect, one engine, one pool and one scheduler.

    Make one with `load` or `wrap`; `model` and `tokenizer` are Hugging Face's. Safe to use from
    several Python threads: their requests are decoded in the same batches.
    """

    def __init__(
        self,
        engine: Engine,
        vocabulary: HFVocabulary,
        card: ModelCard,
        *,
        name: str,
        page_size: int = 1,
        model: Any = None,
        tokenizer: Any = None,
        reload: Callable[[], Any] | None = None,
        prefix_cache: bool = False,
    ) -> None:
        from stretto.runtime.pool import Pool
        from stretto.runtime.scheduler import Scheduler

        check_int("page_size", page_size, 1)
        if page_size > engine.num_slots:
            raise InvalidInput(
                f"page_size {page_size} exceeds the pool's {engine.num_slots} slots; lower it"
            )
        self.engine = engine
        self.vocabulary = vocabulary
        self.card = card
        self.name = name
        self._model = model
        self._reload = reload
        self.tokenizer = tokenizer
        self.has_chat_template = bool(getattr(tokenizer, "chat_template", None))
        self._new_session = get_dialect(card.dialect).sessions(
            vocabulary, card, engine.max_positions
        )
        pool = Pool(engine.num_slots // page_size, page_size)
        self.scheduler = Scheduler(engine, pool, shares_prompts=prefix_cache)
        self._lock = threading.Lock()
        self._folder: Path | None = None  # that it was loaded from

    @classmethod
    def load(
        cls,
        name_or_path: str | Path | None = None,
        *,
        dtype: str = "auto",
        device: str = "cpu",
        engine: str = AUTO_ENGINE,
        pool_slots: int = DEFAULT_POOL_SLOTS,
        page_size: int = 1,
        offline: bool | None = None,
        extras: Sequence[Extra] = (),
        prefix_cache: bool = False,
    ) -> Self:
        """Loads a model: the embedded default, a folder, a GGUF file or a hub name.

        `dtype` int8 stands for int8 weights in a bfloat16 model. `engine` is auto, hf, packed,
        fused or flex; auto picks one that can do the `extras` that some methods need. `pool_slots`
        KV slots are allocated at once, for all requests together. With `prefix_cache` what prompts
        begin with is computed once for all that begin so, and kept while there is room.
        Raises `ModelUnavailable`, `UnknownName` or `Unsupported`, each naming a way out.
        """
        from stretto.models import DEFAULT_MODEL, load_hf, resolve

        check_engine(engine)
        resolved = resolve(name_or_path or DEFAULT_MODEL, offline=offline)
        model, tokenizer = load_hf(resolved.path, dtype=dtype, device=device)
        from stretto.tokens import ModelCard

        card = ModelCard.load(resolved.path)
        card.check_tokenizer(tokenizer.backend_tokenizer, resolved.path)
        made = cls._build(
            model,
            tokenizer,
            card,
            name=resolved.name,
            pool_slots=pool_slots,
            page_size=page_size,
            engine=engine,
            weights=dtype if dtype == "int8" else None,
            extras=extras,
            reload=lambda: load_hf(resolved.path, dtype=dtype, device=device)[0],
            prefix_cache=prefix_cache,
        )
        made._folder = resolved.path
        return made

    @classmethod
    def wrap(
        cls,
        model: Any,
        tokenizer: Any,
        *,
        dialect: str = "plain",
        settings: Mapping[str, Any] | None = None,
        card: ModelCard | None = None,
        name: str = "wrapped",
        engine: str = "hf",
        pool_slots: int = DEFAULT_POOL_SLOTS,
        page_size: int = 1,
        prefix_cache: bool = False,
    ) -> Self:
        """Wraps a Hugging Face model and fast tokenizer already in memory.

        `engine` hf runs the model itself; fused or auto may run a packed copy of its weights as
        they are now, which is faster, and does not follow later training. A `prefix_cache`, as in
        `load`, does not follow it either: `forget_prefixes` when the weights have changed.

        A `card` says which ids are control tokens. Without one, a `dialect` other than plain adds
        its control tokens to the tokenizer, and grows the model's embeddings if it must: both are
        changed in place, and such new tokens mean nothing to the model until it is trained.
        `settings` are other fields of the card that is then made, such as `num_registers`.
        """
        from stretto.tokens import ModelCard, add_control_tokens, fit_model

        if card is None:
            given = dict(settings or {})
            forms = get_dialect(dialect).forms(DialectSettings.given(given))
            ids = add_control_tokens(tokenizer, forms) if forms else {}
            card = ModelCard.describe(dialect, ids, tokenizer.backend_tokenizer, **given)
        card.check_tokenizer(tokenizer.backend_tokenizer, "model card")
        fit_model(model, max(card.control.values(), default=-1) + 1)
        return cls._build(
            model.eval(),
            tokenizer,
            card,
            name=name,
            pool_slots=pool_slots,
            page_size=page_size,
            engine=engine,
            prefix_cache=prefix_cache,
        )

    @classmethod
    def _build(
        cls, model: Any, tokenizer: Any, card: ModelCard, *, name: str, pool_slots: int,
        page_size: int, engine: str, weights: str | None = None,
        reload: Callable[[], Any] | None = None, extras: Sequence[Extra] = (),
        prefix_cache: bool = False,
    ) -> Self:  # fmt: skip
        """`reload`: the model is ours alone, may be used up, and can be had again by a call."""
        from stretto.tokens import HFVocabulary

        check_int("pool_slots", pool_slots, 2)
        check_int("page_size", page_size, 1)
        if engine == "flex" and page_size == 1:
            page_size = FLEX_PAGE_SIZE
        end_ids = _end_ids(model, tokenizer)
        made = make_engine(
            engine,
            model,
            pool_slots,
            weights=str(model.dtype).removeprefix("torch.") if weights is None else weights,
            page_size=page_size,
            owned=reload is not None,
            extras=extras,
        )
        is_used_up = reload is not None and made.name in ("fused", "packed")
        vocabulary = HFVocabulary.from_tokenizer(
            tokenizer,
            control=card.control,
            forms=get_dialect(card.dialect).forms(card),
            size=made.vocab_size,
            end_ids=end_ids,
        )
        return cls(
            made,
            vocabulary,
            card,
            name=name,
            page_size=page_size,
            model=None if is_used_up else model,
            tokenizer=tokenizer,
            reload=reload,
            prefix_cache=prefix_cache,
        )

    @property
    def model(self) -> Any:
        """The Hugging Face model. Loaded again where the engine has packed its weights away; None
        if there is none."""
        if self._model is None and self._reload is not None:
            self._model = self._reload()
        return self._model

    def save(self, folder: str | Path) -> Path:
        """Writes weights, tokenizer and model card into a new folder, which `load` takes.

        Whole or not at all; who scored what the model learnt from goes on with it. Raises
        `InvalidInput` if the folder exists and is not empty.
        """
        from stretto.eval.judges.base import keep_judges

        path = Path(folder).expanduser()
        if self.model is None or self.tokenizer is None:
            raise InvalidInput("this LM was made without a model and tokenizer; nothing to save")
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise InvalidInput(f"{path} exists and is not an empty folder; name a new one")
        scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        try:
            scratch.mkdir(parents=True)
            self.model.save_pretrained(scratch)
            self.tokenizer.save_pretrained(scratch)
            self.card.save(scratch)
            if self._folder is not None:
                keep_judges(self._folder, scratch)
            scratch.replace(path)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return path

    # -- prompts -------------------------------------------------------------------------------

    @cached_property
    def banned(self) -> NDArray[np.bool_] | None:
        """Ids that plain decoding must not draw: control tokens and rows without a token."""
        import numpy as np

        ids = sorted({*self.vocabulary.control.values(), *self.vocabulary.spare_ids})
        if not ids:
            return None
        banned = np.zeros(self.vocabulary.size, dtype=np.bool_)
        banned[ids] = True
        return banned

    def chat(self, prompt: Prompt, raw: bool = False) -> str | list[dict[str, str]]:
        """The prompt as chat messages; as text if `raw` or if the model has no chat template.

        Raises `InvalidInput` for an empty prompt, and for what is neither text nor messages.
        """
        from stretto.tokens.chat import check_messages

        messages = [] if isinstance(prompt, str) else check_messages(prompt)
        texts = [prompt] if isinstance(prompt, str) else [m["content"] for m in messages]
        if not any(text.strip() for text in texts):
            raise InvalidInput("the prompt is empty; give some text to answer")
        if isinstance(prompt, str):
            plain = raw or not self.has_chat_template
            return prompt if plain else [{"role": "user", "content": prompt}]
        if raw:
            raise InvalidInput("a raw prompt is one string, not chat messages")
        return messages

    def _check_length(self, chat: Sequence[dict[str, str]] | str) -> None:
        """Refuses what is far too long before minutes are spent on encoding it."""
        texts = [chat] if isinstance(chat, str) else [m["content"] for m in chat]
        least, room = sum(map(self.vocabulary.least_tokens, texts)), self.engine.max_positions
        if least > room:
            raise PromptTooLong(
                f"the prompt has at least {least} tokens but the model has {room} positions; "
                "shorten the prompt"
            )

    def encode(self, prompt: Sequence[dict[str, str]] | str) -> list[int]:
        """Ids of messages by the chat template, or of text as it is."""
        if isinstance(prompt, str):
            return [*self.vocabulary.prefix, *self.vocabulary.encode(prompt)]
        return self.vocabulary.encode_chat(prompt)

    def encode_turn(self, content: str) -> list[int]:
        """Ids that end an assistant's turn, add a user's, and begin the assistant's next one."""
        first = {"role": "user", "content": "a"}
        before = [*self.encode([first]), *self.vocabulary.encode("b")]
        messages = [first, {"role": "assistant", "content": "b"}]
        whole = self.encode([*messages, {"role": "user", "content": content}])
        if whole[: len(before)] != before:
            raise Unsupported(
                "the model's chat template renders earlier turns differently from the last one, "
                "so a turn cannot be added in place; use method 'sequential'"
            )
        return whole[len(before) :]

    def find_method(self, method: str | Method = AUTO) -> Method:
        """The method of a name, for this model; raises `InvalidInput` for one that it cannot be run
        by. The model's own way for `auto`."""
        return get_method(method, self.card.dialect, self.card.own_window)

    def session(self, params: SamplingParams) -> Session:
        """A fresh session of the model's own dialect."""
        return self._new_session(params)

    # -- answering -----------------------------------------------------------------------------

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        method: str | Method = AUTO,
        raw: bool = False,
        sample: int = 0,
        script: Script | None = None,
    ) -> Stream:
        """A prompt as a stream of events that is not queued yet. Touches nothing shared.

        `method` is a name, or an object of `stretto.methods`, as one with a budget is. `sample`
        numbers the samples of one prompt, each with random numbers of its own. `script`
        forces drawn tokens. Raises `InvalidInput` and its kinds for what cannot be answered.
        """
        from stretto.runtime.request import Request
        from stretto.tokens.asked import check_asked

        params = SamplingParams() if params is None else params
        chosen = self.find_method(method)
        check_asked(self.card, chosen, params)
        chat = self.chat(prompt, raw)
        self._check_length(chat)
        if (outside := max(params.stop_ids, default=0)) >= self.vocabulary.size:
            raise InvalidInput(
                f"stop id {outside} is outside the model's {self.vocabulary.size} ids; leave it out"
            )
        ids, session = chosen.start(self, chat, params)
        if not ids:
            raise InvalidInput("the prompt comes to no tokens; give some text to answer")
        if (outside := max(ids)) >= self.vocabulary.size:
            raise InvalidInput(
                f"the prompt has token id {outside}, but the model has {self.vocabulary.size} rows;"
                " its tokenizer is of another model"
            )
        request = Request(
            ids,
            session,
            params,
            decode=self.vocabulary.decode,
            end_ids=self.vocabulary.end_ids,
            max_positions=self.engine.max_positions,
            sample=sample,
            script=script,
            policy=self._policy(chosen, len(ids), params, sample),
        )
        self.scheduler.check(request)
        return Stream(self, request, chosen.name)

    def queue(self, stream: Stream) -> None:
        """Queues what `prepare` returned; nothing is decoded yet."""
        with self._lock:
            self.scheduler.submit(stream.request)

    def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> Stream:
        """Queues a prompt and returns its stream of events, by the options of `prepare`."""
        stream = self.prepare(prompt, params, **options)
        self.queue(stream)
        return stream

    def _policy(
        self, method: Method, num_prompt_tokens: int, params: SamplingParams, sample: int
    ) -> Policy | None:
        if not hasattr(method, "policy"):
            return None
        page = self.scheduler.pool.page_size
        hiding = cast("HidingMethod", method)
        return hiding.policy(num_prompt_tokens, params, pool_page=page, sample=sample)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> Stream:
        """Like `submit`: iterate over the result for events, then read its `completion`."""
        return self.submit(prompt, params, **options)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        n: int = 1,
        **options: Any,
    ) -> list[Completion]:
        """Answers prompts together, `n` samples each, in order: prompt 0's samples first."""
        check_int("n", n, 1)
        several = _several(prompts)
        streams: list[Stream] = []
        try:
            for prompt in several:
                for sample in range(n):
                    streams.append(self.submit(prompt, params, sample=sample, **options))
            return [stream.finish() for stream in streams]
        finally:
            for stream in streams:
                stream.close()

    def step(self, request: Request) -> None:
        """One pass of the scheduler on behalf of a request, unless it is done. Raises what this
        request has failed with, whoever made the pass; others' failures are theirs."""
        with self._lock:
            if not request.is_done:
                self.scheduler.step()
        request.check()

    def cancel(self, request: Request) -> None:
        with self._lock:
            self.scheduler.cancel(request)

    def forget_prefixes(self) -> None:
        """What earlier prompts left in the pool is not used any more."""
        with self._lock:
            self.scheduler.forget()

    @property
    def between_passes(self) -> AbstractContextManager[object]:
        """While it is held no pass runs, so that all that is read is of one instant."""
        return self._lock

    def text_of(self, request: Request) -> str:
        """The settled text of a request, brought up to date."""
        with self._lock:
            request.document.settle()
            return request.text


def _several(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts from one prompt or several."""
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts) if isinstance(prompts, Iterable) else [prompts]
    if items and all(isinstance(item, dict) for item in items):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]


def _end_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Ids that end a sequence: the model's generation settings', and the tokenizer's own."""
    config = getattr(model, "generation_config", None)
    found = getattr(config, "eos_token_id", None)
    ids = set(found if isinstance(found, list | tuple) else [] if found is None else [found])
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    size = model.get_output_embeddings().weight.shape[0]
    return frozenset(i for i in ids if 0 <= i < size)
