"""For the tests of `stretto data`: a small tokenizer with words, a checker, and an OpenAI-wire
server that misbehaves on demand."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from stretto.data.check import Checker
from stretto.data.structure import Structure
from stretto.data.teacher_demos import DEMONSTRATIONS
from stretto.data.teacher_prompt import LANGUAGE
from stretto.dialects.tags import TAG_FORMS
from stretto.tokens import HFVocabulary, find_control_tokens

LIST = (
    "Three things help:\n\n"
    "1. **Sleep:** Go to bed at the same time every night, also on the weekend, and keep it up.\n"
    "2. **Water:** Drink a glass of water with every meal and one more whenever you feel tired.\n"
    "3. **Walks:** Take a walk of half an hour every day, best before the sun goes down.\n\n"
    "In conclusion, start with the one that is easiest for you."
)
"""Structure promises its three items, then syncs."""


@cache
def tokenizer() -> Tokenizer:
    """Byte-level, with whole words of the examples; digits one by one."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2400,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [LANGUAGE, LIST, *(demo.annotated for demo in DEMONSTRATIONS)]
    made.train_from_iterator([text for text in texts for _ in range(2)], trainer)
    return made


@cache
def checker() -> Checker:
    backend = tokenizer()
    control = find_control_tokens(backend, TAG_FORMS)
    end = frozenset({backend.token_to_id("<|im_end|>")})
    size = max(control.values()) + 1
    return Checker(HFVocabulary(backend, control=control, forms=TAG_FORMS, size=size, end_ids=end))


@cache
def structure() -> Structure:
    return Structure(checker().count)


def save_tokenizer(folder: Path) -> Path:
    """A folder with the tokenizer, for --tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer().save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


# -- an endpoint -----------------------------------------------------------------------------------

Answered = tuple[int, Any, dict[str, str]]
"""Status, body (text is sent as it is), headers."""
Respond = Callable[[dict[str, Any], int], Answered]
"""(request, its number from 0) -> answer."""


class Server:
    """An OpenAI-wire endpoint. `requests` are those it was sent, `answers` the texts asked about
    with how often, `keys` the credentials it saw."""

    def __init__(self, respond: Respond) -> None:
        self.requests: list[dict[str, Any]] = []
        self.answers: Counter[str] = Counter()
        self.keys: set[str] = set()
        lock, outer = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                request = json.loads(data)
                with lock:
                    number = len(outer.requests)
                    outer.requests.append(request)
                    outer.answers[answer_in(request)] += 1
                    outer.keys.add(self.headers["Authorization"])
                status, body, headers = respond(request, number)
                raw = body.encode() if isinstance(body, str) else json.dumps(body).encode()
                try:
                    self.send_response(status)
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(raw)))
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(raw)
                except OSError:  # who asked has gone
                    pass

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}
        )
        self._thread.start()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def answer_in(request: dict[str, Any]) -> str:
    """The response that a request is about: its last question's."""
    texts = [m["content"] for m in request["messages"] if "<answer>" in m["content"]]
    return texts[-1].partition("<answer>")[2].rpartition("</answer>")[0] if texts else ""


def completion(text: str | None, reason: str = "stop", **changes: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {
        "id": "x",
        "object": "chat.completion",
        "created": 0,
        "model": "teacher-1",
        "choices": [{"index": 0, "finish_reason": reason, "message": message}],
        "usage": {"prompt_tokens": 1000, "completion_tokens": 100, "total_tokens": 1100},
    } | changes


def said(text: str, reason: str = "stop") -> Answered:
    return 200, completion(text, reason), {}


def good(request: dict[str, Any], _: int = 0) -> Answered:
    """A teacher that does it right: the structure annotator's marks, lengths guessed."""
    response = answer_in(request)
    text = structure().annotate("", response).text
    return said("<annotated>" + text.replace('tokens="30"', 'tokens="70"') + "</annotated>")


def sleepy(seconds: float) -> Respond:
    def respond(request: dict[str, Any], number: int) -> Answered:
        time.sleep(seconds)
        return good(request, number)

    return respond
