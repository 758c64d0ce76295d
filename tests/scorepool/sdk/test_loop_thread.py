"""What a thread asks of a loop that ends at that moment is told to it, and leaves nothing behind."""

import asyncio
import gc
import threading
import time
import warnings

from scorepool.sdk.loop_thread import LoopThread


def test_a_call_that_was_canceled_before_it_began_is_closed():
    async def nothing() -> None:
        await asyncio.sleep(0)

    loop = LoopThread(nothing)
    told: list[str] = []

    def call() -> None:
        try:
            loop.run(nothing())
        except RuntimeError as error:
            told.append(str(error))

    busy = threading.Event()
    loop._loop.call_soon_threadsafe(busy.wait)
    calling = threading.Thread(target=call)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")  # of a coroutine that was never awaited
        calling.start()
        time.sleep(0.2)  # it is scheduled by then; later is a call of a closed client
        threading.Timer(0.2, busy.set).start()
        loop.close()
        calling.join(60)
        gc.collect()
    assert told
    assert "closed" in told[0]
    assert not caught
