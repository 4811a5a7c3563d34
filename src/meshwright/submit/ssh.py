"""Runs on hosts that ssh reaches: one launcher on each, which meet in the run's folder, which all have."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from meshwright.spec import UserError
from meshwright.submit.job import ClusterJob
from meshwright.submit.program import output_of
from meshwright.submit.scheduler import Scheduler, State, filled
from meshwright.submit.submission import Submission
from meshwright.units import counted

SSH = ("ssh", "-o", "BatchMode=yes")
"""How hosts are reached: with a key, as nobody can be asked for a password."""


class Ssh(Scheduler):
    """Hosts by ssh."""

    here = True
    file = "job.sh"
    run_file = ""
    sweeps = False

    def check(self, job: ClusterJob) -> None:
        """Raise `UserError` for what hosts without a scheduler do not have."""
        if len(job.hosts) != job.nodes:
            raise UserError(
                f"--hosts: {counted(len(job.hosts), 'hosts')} for {counted(job.nodes, 'nodes')}; "
                f"give a host for each, as --hosts a,b"
            )
        if len({*job.hosts}) < len(job.hosts):
            raise UserError(f"--hosts: {','.join(job.hosts)} has a host twice; give each once")
        if any(host.startswith("-") for host in job.hosts):
            raise UserError(
                f"--hosts: {' '.join(job.hosts)} has a word that ssh takes for a flag; give names"
            )
        for given, flag in ((job.image, "--image"), (job.options, "--option"), (job.mounts, "--volume")):
            if given:
                raise UserError(f"{flag}: ssh starts the run on the hosts as they are; leave the flag out")
        if job.seconds is not None:
            raise UserError("--time: nothing ends what ssh has started; leave the flag out, and stop the run")

    def render(self, job: ClusterJob) -> str:
        """The script that each host runs in the background."""
        words = [*job.train_words(), *job.meeting_words(job.hosts[0].rpartition("@")[2])]
        environment = [(name, shlex.quote(value)) for name, value in job.environment]
        return filled(
            "ssh.sh", folder=shlex.quote(job.folder), environment=environment, train=shlex.join(words)
        )

    def commands(self, job: ClusterJob, file: Path) -> list[list[str]]:
        """A call of ssh for each host, which prints the number of the process that it has started."""
        return [[*SSH, host, self._start(job, file, host)] for host in job.hosts]

    def _start(self, job: ClusterJob, file: Path, host: str) -> str:
        log = shlex.quote(str(_log(job, host)))
        return f"nohup setsid sh {shlex.quote(str(file))} > {log} 2>&1 < /dev/null & echo $!"

    def submit(self, job: ClusterJob, file: Path) -> list[str]:
        """Start the launchers; return `host:process` of each. Those of before are ended where one fails."""
        started: list[str] = []
        for host, words in zip(job.hosts, self.commands(job, file), strict=True):
            try:
                process = output_of(words).strip()
                if not process.isdecimal():
                    raise UserError(
                        f"--hosts: {host} has told no process's number, but {process!r:.80}; see its log"
                    )
            except UserError:
                _signal_all(started, job.out)
                raise
            started.append(f"{host}:{process}")
        return started

    def states(self, submission: Submission) -> list[State]:
        """Running as long as the launcher of any host runs; how it has ended the run's status says."""
        return ["running" if any(_runs(each, submission.job.out) for each in submission.ids) else "unknown"]

    def log(self, submission: Submission, member: int) -> Path:
        """The log of the first host's launcher, whose ranks include the run's first."""
        return _log(submission.job, submission.job.hosts[0])

    def stop(self, submission: Submission) -> None:
        """Ask every launcher to save and end."""
        _signal_all(submission.ids, submission.job.out)


def _log(job: ClusterJob, host: str) -> Path:
    return Path(job.out) / f"ssh-{host.rpartition('@')[2]}.log"


def _runs(started: str, out: str) -> bool:
    host, process = _place(started)
    return "runs" in output_of([*SSH, host, f"{_is_ours(process, out)} && echo runs || echo ended"]).split()


def _signal_all(started: Sequence[str], out: str) -> None:
    for each in started:
        host, process = _place(each)
        output_of([*SSH, host, f"{_is_ours(process, out)} && kill -TERM {process} || true"])


def _place(started: str) -> tuple[str, int]:
    """Host and process of what `submit` has returned."""
    host, _, process = started.rpartition(":")
    return host, int(process)


def _is_ours(process: int, out: str) -> str:
    """A condition that a process is a launcher of the run in `out`, and not a later one of its number."""
    return f"grep -qsaF -- {shlex.quote(out)} /proc/{process}/cmdline"
