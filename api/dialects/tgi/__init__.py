"""Speak the API of text-generation-inference: `/` and `/generate_stream`. `/generate` is in generate_route.py."""

from scorepool.api.dialects.protocol import Dialect
from scorepool.api.dialects.tgi.endpoints import GENERATE_STREAM, ROOT

DIALECT = Dialect(tag="text-generation-inference", endpoints=(ROOT, GENERATE_STREAM), form="tgi")
