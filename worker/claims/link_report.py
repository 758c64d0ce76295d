"""Report what a worker measures of its link and of itself, and what follows from it."""

from scorepool.wire import WorkerLink
from scorepool.worker.claims.claim_plan import ClaimPlan
from scorepool.worker.claims.leases import Leases
from scorepool.worker.redis_link.link_speed import LinkSpeed


class LinkReport:
    """The measures of one worker. Any thread may read them; those of its plan are as of its last exchange."""

    def __init__(self, plan: ClaimPlan, link_speed: LinkSpeed, leases: Leases) -> None:
        self._plan = plan
        self._link_speed = link_speed
        self._leases = leases

    def read(self) -> WorkerLink:
        jobs_per_s = self._plan.speed.jobs_per_s
        return WorkerLink(
            round_trip_s=self._link_speed.measured_round_trip_s,
            upload_bytes_per_s=self._link_speed.bytes_per_s,
            jobs_per_s=jobs_per_s,
            tokens_per_s=self._plan.speed.work_per_s,
            prefetch_jobs=self._plan.num_ahead,
            lease_s=self._leases.length.seconds,
            drain_s=None if jobs_per_s is None else self._plan.load.num_jobs / jobs_per_s,
        )
