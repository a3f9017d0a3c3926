"""What a teacher is told: the annotation language, the rules, and worked examples."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.data.teacher_demos import DEMONSTRATIONS
from stretto.data.wire import sendable

OPEN, CLOSE = "<annotated>", "</annotated>"
"""Around the annotated text in a reply."""

LANGUAGE = """\
You mark up answers so that a language model can learn to write parts of them at the same time.

One writer, called main, writes the answer from left to right. Where a part of it could be written \
by somebody else, main leaves a promise, and a side writer starts on that part at once while main \
goes on. There are three marks:

<promise topic="..." tokens="..."/>   main promises a part. topic: what the part is about, in 2 to \
6 words without quotes. tokens: about how many tokens it has, in multiples of 10.
<async>...</async>   the part, exactly as it stands in the answer. It follows its promise directly.
<sync/>   main waits here for all parts promised so far. Only after it may main read them.

Who can read what:
- A side writer reads the question, all that main wrote before the promise, and the promise \
itself. It does not read other parts that were promised since the last <sync/>, nor what main \
writes later.
- Main does not read a part until the next <sync/>. Until then it knows the topic alone.

So a part may be promised only if it can be written well from what its side writer can read. And \
text of main needs a <sync/> before it if it uses what is in a part: a sum of results, a \
comparison, a conclusion, "as shown above".

Rules:
1. Copy the answer exactly, character by character: every word, space, line break, number and \
sign, mistakes included. Add nothing but the marks. Change nothing else.
2. Promise a part only if it has at least about 20 tokens (15 words). Group short neighbours, such \
as short list items, into one part with one topic.
3. Promise only where at least two parts can be written at the same time, or one part and a good \
deal of main. Otherwise return the answer without any marks. That is a good and common outcome.
4. Never put a mark inside a part: no promise and no <sync/> between <async> and </async>.
5. Never split a code block, a table, a formula or a sentence.
6. A part begins with the line break or the spaces before it, and ends with its last visible \
character.
7. A part that builds on an earlier part (a later step of a calculation, the next event of a \
story) cannot be written at the same time as that one: keep it on main, put a <sync/> before it, \
or make both one part.
8. Use <sync/> where something after it needs the parts before it. Do not use it at the very end.

Write the marked answer between <annotated> and </annotated> and nothing else."""


def first_messages(prompt: str, response: str) -> list[dict[str, str]]:
    """The conversation that asks for an annotation: the language, worked examples as earlier
    turns, then the answer at hand."""
    messages = [{"role": "system", "content": LANGUAGE}]
    for demo in DEMONSTRATIONS:
        messages.append({"role": "user", "content": question(demo.prompt, demo.response)})
        messages.append({"role": "assistant", "content": f"{OPEN}{demo.annotated}{CLOSE}"})
    messages.append({"role": "user", "content": question(prompt, response)})
    return messages


def question(prompt: str, response: str) -> str:
    return f"<question>{prompt}</question>\n<answer>{response}</answer>"


def repair_messages(
    messages: Sequence[dict[str, str]], reply: str, reasons: Sequence[str]
) -> list[dict[str, str]]:
    """The conversation that asks once more, with what was wrong the first time."""
    faults = "\n".join(f"- {reason}" for reason in reasons)
    again = (
        f"That cannot be used:\n{faults}\n"
        f"Write the whole marked answer again between {OPEN} and {CLOSE}. Copy the answer exactly "
        "and keep to the rules; leave out marks that you are not sure of."
    )
    return [
        *messages,
        {"role": "assistant", "content": sendable(reply)},
        {"role": "user", "content": sendable(again)},
    ]


def marked_texts(reply: str) -> list[str]:
    """What may be meant as the marked answer: what stands between the last marks of a reply, behind
    any thoughts, and between the outermost, if the answer has such marks in it. Empty without."""
    end = reply.rfind(CLOSE)
    starts = (reply.rfind(OPEN, 0, max(end, 0)), reply.find(OPEN, 0, max(end, 0)))
    return [reply[start + len(OPEN) : end] for start in dict.fromkeys(starts) if start >= 0]
