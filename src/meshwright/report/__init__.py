"""Output for people: the run's record on disk, live progress, trackers, HTML reports and timelines."""

from meshwright.report.progress import Progress
from meshwright.report.record import RunRecord, read_events, read_metrics, read_run
from meshwright.report.run_page import write_report
from meshwright.report.timeline import write_timeline, write_trace
from meshwright.report.trackers import make_trackers

__all__ = [
    "Progress",
    "RunRecord",
    "make_trackers",
    "read_events",
    "read_metrics",
    "read_run",
    "write_report",
    "write_timeline",
    "write_trace",
]
