"""Task `instruct`: prompts of a user's file. Only a judge can say how good an answer is."""

from __future__ import annotations

from stretto.eval.tasks import Item, Loaded, Source, Task, from_files


def _load(source: Source) -> Loaded:
    return from_files("instruct", source, lambda prompt, reference, _: Item(prompt, reference))


INSTRUCT = Task("instruct", 1, _load)
