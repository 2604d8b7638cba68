"""What a process keeps of the event stream: spans as columns, in bounded memory, with the rank that came last to each.

Needs numpy, so neither the coordinator nor a rank imports it.
"""

from hvdlab.collectives.recording.recording import Mark, Recording
from hvdlab.collectives.recording.summary import RankSummary, summarize

__all__ = ["Mark", "RankSummary", "Recording", "summarize"]
