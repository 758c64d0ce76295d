"""What any client can cause thousands of times takes one line of the log."""

from types import SimpleNamespace
from typing import Any

import pytest

from scorepool.worker.webhooks.webhook_worker import Undeliverable, WebhookWorker


def test_a_delivery_that_is_given_up_is_logged_in_one_line(caplog: pytest.LogCaptureFixture):
    job: Any = SimpleNamespace(id="wh_a")
    worker = WebhookWorker.__new__(WebhookWorker)  # it needs no Redis
    try:
        raise Undeliverable("its endpoint was deleted")
    except Undeliverable as error:
        worker.handle_exception(job, type(error), error, error.__traceback__)
    [record] = caplog.records
    assert (record.getMessage(), vars(record)["job"], record.exc_info) == ("its endpoint was deleted", "wh_a", None)
