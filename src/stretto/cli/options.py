"""The options of `stretto run`: their types, and what `--help` says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def _option(panel: str | None, help_text: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel=panel, **settings)


Prompt = Annotated[
    str | None, typer.Argument(metavar="PROMPT", help="The prompt; - or nothing reads stdin.")
]
File = Annotated[Path | None, _option(None, "Read the prompt from a UTF-8 file.", metavar="PATH")]
System = Annotated[str | None, _option(None, "A system message before the prompt.", metavar="TEXT")]
Raw = Annotated[bool, _option(None, "The prompt as it is, without the chat template.", "--raw")]
Method = Annotated[
    str,
    _option(
        None,
        "auto (the model's own dialect), sequential, sot, dense, streaming_llm, paged_h2o, "
        "random_evict, window, or a dialect.",
    ),
]

_POLICY = "Visible tokens"
Budget = Annotated[
    str | None, _option(_POLICY, "Tokens a row may see, or a share, as 50%.", metavar="N")
]
PinPrompt = Annotated[bool, _option(_POLICY, "Never hide the prompt.", "--pin-prompt")]
PolicyPage = Annotated[int | None, _option(_POLICY, "Tokens hidden together.", metavar="N", min=1)]
Sinks = Annotated[
    int | None, _option(_POLICY, "First tokens that streaming_llm keeps.", metavar="N", min=0)
]
Reindexed = Annotated[
    bool, _option(_POLICY, "Positions by place among what is visible.", "--reindexed")
]

Model = Annotated[str, _option("Model", "A name, folder, .gguf file or hub org/model.")]
Dtype = Annotated[str, _option("Model", "auto, float32, bfloat16 or int8 (weights).")]
Engine = Annotated[str, _option("Model", "auto, hf, packed, fused or flex.")]
Device = Annotated[str, _option("Model", "cpu, cuda or cuda:N.")]
MAX_THREADS = 1024
"""With many times this, OpenMP takes the process down."""
Threads = Annotated[
    int | None, _option("Model", "CPU threads to compute with.", metavar="N", max=MAX_THREADS)
]
PageSize = Annotated[int, _option("Model", "KV slots a page.", metavar="N")]
PoolSlots = Annotated[int, _option("Model", "KV slots in all.", metavar="N")]
NoPrefixCache = Annotated[
    bool,
    _option("Model", "Compute each prompt anew, whatever it begins with.", "--no-prefix-cache"),
]
Offline = Annotated[bool, _option("Model", "Fetch nothing.", "--offline")]

MaxTokens = Annotated[int, _option("Sampling", "Tokens of all threads together.", metavar="N")]
Temperature = Annotated[float, _option("Sampling", "0 is greedy.", metavar="X")]
TopK = Annotated[int, _option("Sampling", "0 keeps all tokens.", metavar="N")]
TopP = Annotated[float, _option("Sampling", "1 keeps all tokens.", metavar="X")]
RepetitionPenalty = Annotated[float, _option("Sampling", "1 is none.", metavar="X")]
Stop = Annotated[
    list[str] | None, _option("Sampling", "End before this text; repeatable.", metavar="TEXT")
]
StopId = Annotated[
    list[int] | None,
    _option("Sampling", "End the thread that draws this token; repeatable.", metavar="ID"),
]
Seed = Annotated[int, _option("Sampling", "Of all randomness.", metavar="N")]
MaxThreadTokens = Annotated[
    int | None, _option("Sampling", "Cap of each forked thread.", metavar="N")
]
MaxForks = Annotated[int, _option("Sampling", "Most threads to fork.", metavar="N")]

_BLOCKS = "Blocks, of dialect planned"
Order = Annotated[
    str, _option(_BLOCKS, "What is written first: entropy, confidence, margin or random.")
]
StepsRatio = Annotated[float, _option(_BLOCKS, "Passes per token of a span.", metavar="X")]
Threshold = Annotated[
    float | None, _option(_BLOCKS, "Write all that is so likely in a pass.", metavar="X")
]
LengthScale = Annotated[float, _option(_BLOCKS, "Multiplies promised lengths.", metavar="X")]
EarlyFinish = Annotated[bool, _option(_BLOCKS, "End a span at its first [PAD].", "--early-finish")]
MaxRounds = Annotated[int, _option(_BLOCKS, "Most plans.", metavar="N")]
Variant = Annotated[str | None, _option(_BLOCKS, "Refuse a model of another one.")]
Convention = Annotated[str | None, _option(_BLOCKS, "Refuse a model of another one.")]

AsJson = Annotated[bool, _option("Output", "Print one JSON object.", "--json")]
Compare = Annotated[
    bool, _option("Output", "Also decode sequentially, and report the speed-up.", "--compare")
]
Pairs = Annotated[int, _option("Output", "Pairs of --compare.", metavar="N")]
Trace = Annotated[
    Path | None, _option("Output", "Write segments and events as JSON.", metavar="FILE")
]
Quiet = Annotated[bool, _option("Output", "No live view, no summary.", "--quiet", "-q")]


def spelled(
    method: str, *, budget: str | None, pin_prompt: bool, policy_page: int | None,
    sinks: int | None, reindexed: bool,
) -> str:  # fmt: skip
    """A method with the settings that the options of "Visible tokens" give it, as text."""
    from stretto.methods.spelling import spell

    settings = {
        "budget": budget, "pin_prompt": pin_prompt, "page_tokens": policy_page, "sinks": sinks,
        "reindexed": reindexed,
    }  # fmt: skip
    return spell(method, settings)
