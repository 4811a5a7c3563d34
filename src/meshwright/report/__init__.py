"""What people look at: the run's record on disk, the live progress, trackers, the HTML report, timelines."""

from meshwright.report.html import write_report
from meshwright.report.progress import Progress
from meshwright.report.record import RunRecord, read_events, read_metrics, read_run
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
