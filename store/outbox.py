"""The outbox: who is told that a job ended. Lua that both ends of a job run, in the transaction that ends it.

store/lua/record_outcome.lua   a worker ends the job
store/lua/cancel.lua      its owner cancels it while it waits
store/lua/deliver.lua     a test event
"""

from scorepool.store import scripts
from scorepool.store.keys import DELIVER, WEBHOOKS, Keys

DELIVERY_KEPT_S = 14 * 86_400  # a delivery that was given up, so that it can be replayed


def _code(lua: str) -> str:
    """Without the comments: the text is sent with every job that ends."""
    return "\n".join(line for line in lua.splitlines() if not line.lstrip().startswith("--"))


# Put before a script: it has `announce` and `deliver` then.
OUTBOX = (
    f"local DELIVER, WEBHOOKS, BELL = '{DELIVER}', '{WEBHOOKS}', '{Keys.wakeup(WEBHOOKS)}'\n"
    f"local KEPT_S = {DELIVERY_KEPT_S}\n"
    f"local ENDPOINTS, DELIVERIES = '{Keys.endpoints('')}', '{Keys.deliveries('')}'\n"
    + _code(scripts.load("outbox.lua"))
)
