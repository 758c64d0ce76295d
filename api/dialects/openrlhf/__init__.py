"""Speak the API of OpenRLHF's reward server: `/get_reward`, which its trainers ask with `--remote_rm_url`."""

from scorepool.api.dialects.openrlhf.rewards import GET_REWARD
from scorepool.api.dialects.protocol import Dialect

DIALECT = Dialect(tag="openrlhf", endpoints=(GET_REWARD,))
