"""What any client can cause thousands of times takes one line of the log."""

from types import SimpleNamespace
from typing import Any

import pytest

from scorepool.worker.webhooks import webhook_worker
from scorepool.worker.webhooks.webhook_worker import Undeliverable, WebhookWorker


def test_a_delivery_that_is_given_up_is_logged_in_one_line(monkeypatch: pytest.MonkeyPatch):
    lines: list[str] = []
    monkeypatch.setattr(webhook_worker.log, "warning", lambda text, *values: lines.append(text % values))
    job: Any = SimpleNamespace(id="wh_a")
    worker = WebhookWorker.__new__(WebhookWorker)  # it needs no Redis
    try:
        raise Undeliverable("its endpoint was deleted")
    except Undeliverable as error:
        worker.handle_exception(job, type(error), error, error.__traceback__)
    assert lines == ["wh_a: its endpoint was deleted"]
