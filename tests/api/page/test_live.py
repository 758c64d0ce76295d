"""Fragments of pages are rendered once for all who look, and are dropped with the last of them."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from scorepool.api.page.live import LiveFragments

pytestmark = pytest.mark.anyio


class Counter:
    """A fragment that tells how often it was rendered, and ends after some renderings."""

    def __init__(self, last: int) -> None:
        self.number, self._last = 0, last

    async def render(self) -> tuple[str, bool]:
        await asyncio.sleep(0)
        self.number += 1
        return f"number\n{self.number}", self.number >= self._last


async def always() -> bool:
    return True


async def events(changes: AsyncGenerator[bytes | None]) -> list[bytes]:
    return [event async for event in changes if event is not None]


async def test_a_fragment_is_rendered_once_for_all_who_look(monkeypatch: pytest.MonkeyPatch):
    live, counter, now_s, shown = LiveFragments(lambda: False), Counter(last=3), 1000.0, 0
    monkeypatch.setattr("scorepool.api.page.live.REFRESH_S", 0.01)
    for module in ("page.live", "repositories.shared_read"):
        monkeypatch.setattr(f"scorepool.api.{module}.clock_s", lambda: now_s)

    async def look() -> list[bytes]:
        nonlocal now_s, shown
        seen = []
        async for event in live.changes("batch", "b1", counter.render, always):
            if event is not None:
                seen.append(event)
                shown += not event.startswith(b"event: ended")
                if shown % 200 == 0:  # all have seen it
                    now_s += 1.0
        return seen

    looked = await asyncio.gather(*[look() for _ in range(200)])

    numbers = [f"event: batch\ndata: number\ndata: {number}\n\n".encode() for number in (1, 2, 3)]
    assert counter.number == 3
    assert {tuple(seen) for seen in looked} == {(*numbers, b"event: ended\ndata: batch\n\n")}


async def test_those_with_other_keys_see_their_own_and_nothing_is_kept_of_them():
    live, first, second = LiveFragments(lambda: False), Counter(last=2), Counter(last=2)
    one = live.changes("batch", "b1", first.render, always)
    other = live.changes("batch", "b2", second.render, always)
    for changes in (one, other):
        assert b"data: 1" in (await anext(changes) or b"")
        await changes.aclose()

    again = Counter(last=1)
    assert b"data: 1" in b"".join(await events(live.changes("batch", "b1", again.render, always)))
    assert (first.number, second.number, again.number) == (1, 1, 1)


async def test_a_failure_ends_the_events_of_all_and_the_next_render_anew():
    live = LiveFragments(lambda: False)

    async def fail() -> tuple[str, bool]:
        await asyncio.sleep(0)
        raise ConnectionError

    ended = await asyncio.gather(
        *[events(live.changes("batch", "b1", fail, always)) for _ in range(3)], return_exceptions=True
    )
    assert [type(one) for one in ended] == [ConnectionError] * 3
    assert await events(live.changes("batch", "b1", Counter(last=1).render, always))


async def test_the_events_end_with_the_server(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("scorepool.api.page.live.REFRESH_S", 0.01)
    closing = [False]
    live = LiveFragments(lambda: closing[0])
    changes = live.changes("overview", "overview", Counter(last=1000).render, always)
    assert await anext(changes)
    closing[0] = True
    assert await events(changes) == []
