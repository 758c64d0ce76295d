"""Speak the API of ms-swift's rollout server, `/infer/`, as its trainers ask a teacher (`--teacher_model_server`)."""

from scorepool.api.dialects.protocol import Dialect
from scorepool.api.dialects.swift.endpoint import INFER

DIALECT = Dialect(tag="swift", endpoints=(INFER,))
