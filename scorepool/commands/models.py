"""`scorepool models`: what live workers serve."""

from scorepool.commands.connecting import aligned, connect, print_json


def models(url: str, api_key: str | None, *, as_json: bool) -> int:
    """Print the models that live workers serve."""
    with connect(url, api_key) as client:
        served = sorted(client.models(), key=lambda worker: (worker.id, worker.worker))
    if as_json:
        print_json(served)
        return 0
    rows = [("MODEL", "ALIASES", "DTYPE", "MODE", "CONTEXT", "SELF-TEST", "WORKER")]
    rows += [
        (
            one.id,
            ",".join(one.aliases) or "-",
            one.stamp.dtype,
            one.stamp.mode,
            str(one.context_length),
            one.self_test,
            one.worker,
        )
        for one in served
    ]
    print(aligned(rows) if served else "no worker is live")  # noqa: T201
    return 0
