"""Prompts that begin alike: what one request has fed, later ones take over instead of feeding it.

What can be shared are whole pages of *plain* tokens: those of main from the first one on, each at
the position of its index and seeing all tokens before it and nothing else. Their keys and values
follow from the tokens alone, so a request whose prompt begins with the same tokens holds the same
pages, and begins to feed behind them. Nobody writes to a page that is shared, and a request that
hides a segment only gives up its own hold on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from stretto.recorder import MAIN, Recorder
from stretto.runtime.memory import RequestMemory
from stretto.runtime.pool import Pool, PoolError

if TYPE_CHECKING:
    from stretto.runtime.request import Request

WORTH_WAITING_TOKENS = 16
"""A prompt waits for another one that is being fed only if it is spared so many tokens by it, or
half of its own; and half of what the other one feeds in the pass that it waits for."""


@dataclass(slots=True, eq=False)
class Node:
    """A page and the tokens on it; `parent` has those before them. The root has no page."""

    page: int
    parent: Node | None
    tokens: tuple[int, ...]
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)


class Prefixes:
    """The pages of a pool that are kept, as a tree by their tokens for each owner: a page a node.

    Owners know nothing of one another's. Which pages go when room is needed, the pool says; those
    behind them go as well.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        pool.on_reuse = self.drop
        self.reset()

    def reset(self) -> None:
        """Nothing is known; the pool has been reset."""
        self._roots: dict[str, Node] = {}
        self._by_page: dict[int, Node] = {}

    def clear(self) -> None:
        """Nothing is kept any more. Requests under way hold what they hold."""
        for page in list(self._by_page):
            self._pool.forget(page)
        self.reset()

    def find(self, tokens: Sequence[int], owner: str = "") -> list[int]:
        """The pages of the longest known beginning of an owner's `tokens`, all of them full."""
        return [node.page for node in self.walk(tokens, owner)]

    def walk(
        self, tokens: Sequence[int], owner: str = "", known: Sequence[Node] = ()
    ) -> list[Node]:
        """What `find` finds, as nodes. `known`: what was found before, and is not looked up again
        if all of it is known still."""
        if known and self._by_page.get(known[-1].page) is not known[-1]:
            known = ()
        found = list(known)
        node = found[-1] if found else self._root_of(owner)
        for key in self._keys(tokens, len(found), len(tokens) // self._pool.page_size):
            child = node.children.get(key)
            if child is None:
                break
            found.append(child)
            node = child
        return found

    def put(self, tokens: Sequence[int], pages: Sequence[int], owner: str = "") -> None:
        """`pages`, which are held, have the first of an owner's plain tokens on them, and are full.
        Where the same tokens are known on other pages, those stay the known ones."""
        node = self._root_of(owner)
        for key, page in zip(self._keys(tokens, 0, len(pages)), pages, strict=True):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = self._by_page[page] = Node(page, node, key)
                self._pool.keep(page)
            node = child

    def drop(self, page: int) -> None:
        """A page, and all that stand behind it, are not to be found any more."""
        top = self._by_page[page]
        if top.parent is not None:
            del top.parent.children[top.tokens]
        gone = [top]
        while gone:
            node = gone.pop()
            gone += node.children.values()
            del self._by_page[node.page]
            self._pool.forget(node.page)

    def check_integrity(self) -> None:
        """Raises `PoolError` unless the pages known are those that the pool keeps, each where its
        parent says."""
        if self._pool.kept != set(self._by_page):
            raise PoolError(f"pages {sorted(self._pool.kept)} kept, {sorted(self._by_page)} known")
        roots = set(self._roots.values())
        for page, node in self._by_page.items():
            parent = node.parent
            known = parent in roots or (parent and self._by_page.get(parent.page) is parent)
            if not parent or not known or parent.children.get(node.tokens) is not node:
                raise PoolError(f"page {page} is known, and what stands before it is not")

    def _root_of(self, owner: str) -> Node:
        return self._roots.setdefault(owner, Node(-1, None, ()))

    def _keys(self, tokens: Sequence[int], start: int, stop: int) -> Iterable[tuple[int, ...]]:
        """The tokens of some of the pages."""
        size = self._pool.page_size
        return (tuple(tokens[i * size : (i + 1) * size]) for i in range(start, stop))


class Search:
    """What has been found out of the prompt of a request, so that it is not found out again in
    every pass that the request waits."""

    def __init__(self, request: Request) -> None:
        self.prompt = _prompt(request)
        self.begin = self.prompt[:-1]
        """All that it may take over: of its last token somebody must say what comes after it."""
        self.known: list[Node] = []
        self._common: WeakKeyDictionary[Request, int] = WeakKeyDictionary()

    def num_common(self, request: Request, prompt: list[int]) -> int:
        """How many tokens it could take over from another request's prompt."""
        if (count := self._common.get(request)) is None:
            count = self._common[request] = num_common(self.begin, prompt)
        return count


class Sharing:
    """What a scheduler does with prefixes: finds and adopts them, keeps them, and says who waits.

    A request with a policy takes no part: it may hide any of its prompt, and hear of its rows.
    """

    def __init__(self, pool: Pool) -> None:
        self.prefixes = Prefixes(pool)
        self._pool = pool
        self._feeding: list[Request] = []  # whose prompts are not known as a whole
        self._searches: WeakKeyDictionary[Request, Search] = WeakKeyDictionary()

    def reset(self) -> None:
        self.prefixes.reset()
        self._feeding = []

    def pages_for(self, request: Request) -> list[int]:
        """The pages that a request which has fed nothing yet may begin with."""
        if not _is_fresh(request):
            return []
        search = self._search(request)
        search.known = self.prefixes.walk(search.begin, request.memory.owner, search.known)
        return [node.page for node in search.known]

    def is_worth_waiting(self, request: Request, pages: Sequence[int], max_rows: int) -> bool:
        """Whether a prompt that is being fed, `max_rows` tokens in a pass, will soon spare the
        request much more than `pages` do."""
        if not (self._feeding and _is_fresh(request)):
            return False
        search, size = self._search(request), self._pool.page_size
        least = min(WORTH_WAITING_TOKENS, (len(search.prompt) + 1) // 2)

        def is_worth(other: Request) -> bool:
            count = search.num_common(other, self._search(other).prompt) // size * size
            cost = min(other.recorder.num_unfed, max_rows)
            return count - len(pages) * size >= max(least, (cost + 1) // 2)

        owner = request.memory.owner
        return any(is_worth(other) for other in self._feeding if other.memory.owner == owner)

    def begin(self, request: Request, pages: Sequence[int]) -> None:
        """The request is running now, and begins with `pages`."""
        memory = request.memory
        if not _is_fresh(request):
            if memory.on_leaving is not None:  # it has come back: what it has fed is known again
                self._feeding.append(request)
            return
        if pages:
            request.feed.skip(memory.adopt(self._pool, pages))
        self._feeding.append(request)
        memory.on_leaving = lambda: self._leave(request)

    def update(self, running: Sequence[Request]) -> None:
        """What has been fed of prompts by now is known."""
        if not self._feeding:
            return
        ids = {id(request) for request in running}
        here = [request for request in self._feeding if id(request) in ids]
        for request in here:
            self._keep(request)
        self._feeding = [request for request in here if _feeds_prompt(request)]
        for request in set(here).difference(self._feeding):
            self._searches.pop(request, None)

    def forget(self, requests: Iterable[Request]) -> None:
        """Nothing is known any more, and of these requests nothing ever will be."""
        for request in requests:
            request.memory.on_leaving = None
        self._feeding = []
        self.prefixes.clear()

    def _leave(self, request: Request) -> None:
        self._feeding = [other for other in self._feeding if other is not request]
        self._keep(request)

    def _keep(self, request: Request) -> None:
        tokens, pages = plain_pages(request.recorder, request.memory, self._pool.page_size)
        self.prefixes.put(tokens, pages, request.memory.owner)

    def _search(self, request: Request) -> Search:
        if (search := self._searches.get(request)) is None:
            search = self._searches[request] = Search(request)
        return search


def plain_pages(
    recorder: Recorder, memory: RequestMemory, page_size: int
) -> tuple[list[int], list[int]]:
    """The plain tokens of a request that have been fed, and the full pages that they lie on."""
    main = recorder.threads[MAIN]
    first_unfed = {u.segment: u.index for u in reversed(main.unfed)}
    tokens: list[int] = []
    pages: list[int] = []
    bits = 0
    for segment in map(recorder.segments.__getitem__, main.segments):
        if not segment.tokens:
            continue
        start, held = len(tokens), memory.slots.get(segment.handle)
        is_plain = segment.kind == "causal" and segment.sees == bits and not start % page_size
        if held is None or not is_plain:
            break
        num_fed = min(first_unfed.get(segment.handle, len(segment.tokens)), len(held.slots))
        expected = range(start, start + num_fed)
        if segment.positions[:num_fed] != list(expected):
            break
        tokens += segment.tokens[:num_fed]
        pages += held.pages[: num_fed // page_size]
        if num_fed < len(segment.tokens):
            break
        bits |= 1 << segment.handle
    return tokens, pages


def num_common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with that are the same."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    return next(i for i in range(length) if a[i] != b[i])


def _prompt(request: Request) -> list[int]:
    """The prompt of a request without a policy, which is one segment."""
    return request.recorder.segments[0].tokens[: request.num_prompt_tokens]


def _is_fresh(request: Request) -> bool:
    """Whether it may adopt pages: it has fed nothing, and nothing of its prompt can be hidden
    apart from the rest of it."""
    return (
        request.policy is None
        and not request.memory.slots
        and request.recorder.num_unfed == request.num_prompt_tokens
    )


def _feeds_prompt(request: Request) -> bool:
    unfed = request.recorder.threads[MAIN].unfed
    return bool(unfed) and unfed[0].segment == 0
