"""`stretto serve`: OpenAI's API, and a page, over one model."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from stretto.cli import options
from stretto.errors import INTERRUPTED
from stretto.models.shipped import DEFAULT_MODEL

DEFAULT_POOL_SLOTS = 8192


def _option(help_text: str, *names: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel="Server", metavar=metavar)


def serve(
    *,
    host: Annotated[str, _option("Address to listen at.", metavar="HOST")] = "127.0.0.1",
    port: Annotated[int, _option("0 is any free port.", metavar="N")] = 8000,
    name: Annotated[str | None, _option("The model's id for clients.", metavar="NAME")] = None,
    max_tokens: Annotated[int, _option("Of requests that name none.", metavar="N")] = 1024,
    max_requests: Annotated[int, _option("Samples under way at once.", metavar="N")] = 256,
    deadline_s: Annotated[float, _option("Longest that a request takes.", metavar="S")] = 600.0,
    drain_s: Annotated[float, _option("To finish in when told to end.", metavar="S")] = 30.0,
    max_body_bytes: Annotated[int, _option("Largest request.", metavar="N")] = 4 << 20,
    cors_origin: Annotated[
        list[str] | None, _option("Let pages of this origin ask; repeatable.", metavar="ORIGIN")
    ] = None,
    allow_no_key: Annotated[
        bool, _option("Let other machines ask without a key.", "--allow-no-key")
    ] = False,
    model: options.Model = DEFAULT_MODEL,
    dtype: options.Dtype = "auto",
    device: options.Device = "cpu",
    engine: options.Engine = "auto",
    threads: options.Threads = None,
    page_size: options.PageSize = 1,
    pool_slots: options.PoolSlots = DEFAULT_POOL_SLOTS,
    no_prefix_cache: options.NoPrefixCache = False,
    offline: options.Offline = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object when ready.")
    ] = False,
) -> None:
    """Serve a model to OpenAI's clients. Bearer keys come from STRETTO_API_KEYS.

    SIGTERM lets requests under way finish; Ctrl-C does too, and a second one does not.
    """
    from stretto.cli.answer import load
    from stretto.cli.output import say, write_json
    from stretto.engines.choose import check_engine
    from stretto.server import Settings, check_installed, create_app
    from stretto.server.settings import LOOPBACK_HOSTS, check_address, is_loopback, keys_from

    check_installed()
    check_engine(engine)
    keys = keys_from(os.environ)
    check_address(host, keys, allow_no_key)
    settings = Settings(
        name=name,
        max_tokens=max_tokens,
        max_requests=max_requests,
        deadline_s=deadline_s,
        drain_s=drain_s,
        max_body_bytes=max_body_bytes,
        keys=keys,
        hosts=(*LOOPBACK_HOSTS, host) if is_loopback(host) and not keys else (),
        cors_origins=tuple(cors_origin or ()),
    )
    from stretto.server.run import open_socket, run, url_of

    with open_socket(host, port) as opened:
        lm = load(
            model,
            dtype=dtype,
            device=device,
            engine=engine,
            threads=threads,
            pool_slots=pool_slots,
            page_size=page_size,
            offline=offline,
            prefix_cache=not no_prefix_cache,
        )
        served, url = lm.name if name is None else name, url_of(opened)

        def on_ready() -> None:
            say(f"serving {served} at {url} (API: {url}/v1); Ctrl-C ends it")
            if as_json:
                write_json({"url": url, "model": served, "pid": os.getpid()})

        if run(create_app(lm, settings), opened, on_ready):
            raise typer.Exit(INTERRUPTED)
