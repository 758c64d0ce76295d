"""Name the parts of an API process that batches use."""

from dataclasses import dataclass

from redis.asyncio import Redis

from scorepool.api.admission import Admission
from scorepool.api.batches.line_jobs import LineJobs
from scorepool.api.repositories.files import Files
from scorepool.api.repositories.jobs import Jobs
from scorepool.api.repositories.models import Models
from scorepool.api.submission import Submission
from scorepool.store import Settings


@dataclass(frozen=True)
class BatchServices:
    """Hold these parts."""

    redis: Redis
    settings: Settings
    files: Files
    models: Models
    jobs: Jobs
    admission: Admission
    submission: Submission
    line_jobs: LineJobs
