"""Prometheus' own tool reads the alerts, and each fires on the series that it is for and is silent on healthy ones."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool, which comes with Prometheus (apt install prometheus)"
)

# Series that promtool reads as value+increment x count, one value a minute. Each alert fires at FIRES_AT.
FIRES_AT = "30m"
FIRING = {
    "ScorepoolRedisDown": ["scorepool_redis_up 0x40"],
    "ScorepoolJobsWithoutWorker": ['scorepool_queue_jobs{queue="(unserved)",state="queued"} 3x40'],
    "ScorepoolQueueStands": ['scorepool_queue_oldest_seconds{queue="demo"} 1000x40'],
    "ScorepoolWorkerSilent": ['scorepool_worker_heartbeat_age_seconds{model="demo"} 31x40'],
    "ScorepoolNoWebhookWorker": [
        'scorepool_workers{model="webhooks"} 0x40',
        'scorepool_webhook_deliveries{state="waiting"} 1x40',
    ],
    "ScorepoolFaults": ['scorepool_outcomes_total{code="numeric"} 0+1x40'],
    "ScorepoolWorkersDiffer": ['scorepool_crosschecks_total{outcome="differed"} 0+1x40'],
    "ScorepoolWorkerStopped": ['scorepool_workers_stopped{model="demo"} 1x40'],
    "ScorepoolServerErrors": ['scorepool_http_reply_seconds_count{status="503"} 0+60x40'],
    "ScorepoolDeliveriesFail": ['scorepool_webhook_deliveries{state="failed"} 0+1x40'],
}
HEALTHY = [
    "scorepool_redis_up 1x40",
    'scorepool_queue_jobs{queue="(unserved)",state="queued"} 0x40',
    'scorepool_queue_oldest_seconds{queue="demo"} 30x40',
    'scorepool_worker_heartbeat_age_seconds{model="demo"} 4x40',
    'scorepool_workers{model="webhooks"} 1x40',
    'scorepool_webhook_deliveries{state="waiting"} 1x40',
    'scorepool_webhook_deliveries{state="failed"} 1x40',
    'scorepool_outcomes_total{code="numeric"} 2x40',
    'scorepool_outcomes_total{code="result"} 0+100x40',
    'scorepool_crosschecks_total{outcome="differed"} 1x40',
    'scorepool_workers_stopped{model="demo"} 0x40',
    'scorepool_http_reply_seconds_count{status="200"} 0+600x40',
]


def group(series: list[str], expected: dict[str, bool]) -> dict[str, Any]:
    """Describe one test of promtool: these series, and for each alert whether it has to fire."""
    split = [line.rpartition(" ") for line in series]
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, _, values in split],
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})',
                "eval_time": FIRES_AT,
                "exp_samples": [{"labels": "{}", "value": 1}] if fires else [],
            }
            for alert, fires in expected.items()
        ],
    }


def promtool(*arguments: str) -> str:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_alert_fires_on_its_fault_and_none_on_a_healthy_pool(root: Path, tmp_path: Path):
    rules = root / "deploy/alerts.yml"
    named = {rule["alert"] for one in yaml.safe_load(rules.read_text())["groups"] for rule in one["rules"]}
    assert named == {*FIRING, "ScorepoolDown"}
    up = "scorepool_redis_up 1x40"
    tests = [
        group(HEALTHY, dict.fromkeys(named, False)),
        group([], {"ScorepoolDown": True, "ScorepoolRedisDown": False}),
        *(
            group(series if "redis_up" in series[0] else [up, *series], {one: one == alert for one in named})
            for alert, series in FIRING.items()
        ),
    ]
    path = tmp_path / "tests.yml"
    path.write_text(yaml.safe_dump({"rule_files": [str(rules)], "tests": tests}))
    assert "SUCCESS" in promtool("check", "rules", str(rules))
    assert "SUCCESS" in promtool("test", "rules", str(path))
