"""What a person sees of a run: one live line on a terminal, plain lines with a stable prefix everywhere else."""

import io
import math
import os
from collections import deque
from dataclasses import dataclass

from trainerd.daemon.output import STDERR, Output
from trainerd.daemon.states import WorkerState

LIVE_SECONDS = 0.25
PLAIN_SECONDS = 10.0  # between two plain lines of progress, and between two of checkpoints
RATE_SECONDS = 15.0  # over which the rate is taken
BAR_WIDTH = 24

# The phases of an ordinary iteration are not worth a word.
_ORDINARY = frozenset({"step", "data"})


@dataclass(frozen=True)
class View:
    """What is known of a run at one moment; `saved_at`: monotonic, when this worker saved last, None if it has not."""

    state: WorkerState
    phase: str
    step: int
    loss: float
    durable_step: int
    saved_at: float | None
    restarts: int
    max_iter: int


class Rate:
    """Steps per second over the last RATE_SECONDS, as the page showed them."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def restart(self, step: int, now: float) -> None:
        """Forget what was seen: another worker goes on from `step`."""
        self._seen = deque([(now, step)])

    def observe(self, step: int, now: float) -> None:
        """Note that `step` was completed by `now`."""
        self._seen.append((now, step))
        while len(self._seen) > 2 and self._seen[0][0] < now - RATE_SECONDS:
            self._seen.popleft()

    @property
    def per_second(self) -> float:
        """The rate; 0 until something was seen to move."""
        if len(self._seen) < 2:
            return 0.0
        (since, from_step), (until, to_step) = self._seen[0], self._seen[-1]
        return max(to_step - from_step, 0) / (until - since) if until > since else 0.0


class Progress:
    """Tells a run's story through an Output; the time is passed in, monotonic."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._rate = Rate()
        self._next_at = -math.inf
        self._next_saved_at = -math.inf
        self.checkpoints = 0

    def event(self, text: str) -> None:
        """Tell of something that happened once."""
        self._output.say(text)

    def began(self, step: int, now: float) -> None:
        """A worker goes on from `step`."""
        self._rate.restart(step, now)
        self._next_at = now if self._output.live else now + PLAIN_SECONDS

    def saved(self, step: int, seconds: float, now: float) -> None:
        """A checkpoint was committed; told at most every PLAIN_SECONDS, and by the live line alone on a terminal."""
        self.checkpoints += 1
        if not self._output.live and now >= self._next_saved_at:
            self._next_saved_at = now + PLAIN_SECONDS
            self.event(f"checkpoint of step {step} saved in {seconds:.2f} s")

    def show(self, view: View, now: float) -> None:
        """Bring the line up to date, if it is time to."""
        if view.state in {WorkerState.TRAINING, WorkerState.STOPPING}:
            self._rate.observe(view.step, now)
        if now < self._next_at:
            return
        if self._output.live:
            self._next_at = now + LIVE_SECONDS
            self._output.show_line(_live_line(view, self._rate.per_second, now))
        elif view.state is not WorkerState.STARTING:
            self._next_at = now + PLAIN_SECONDS
            self.event(plain_line(view, self._rate.per_second, now))

    def waiting(self, text: str) -> None:
        """Show `text` in place of the live line while there is no worker."""
        if self._output.live:
            self._output.show_line(f"  {text}".encode())


def plain_line(view: View, rate: float, now: float) -> str:
    """Return one line of progress."""
    return "  ".join([_position(view), *_facts(view, rate, now)])


def short_time(seconds: float) -> str:
    """Return a duration in two units at most: "45 s", "4 min 10 s", "3 h 05 min"."""
    whole = int(max(seconds, 0.0))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _position(view: View) -> str:
    return f"step {view.step}/{view.max_iter} ({view.step / view.max_iter:.1%})"


def _facts(view: View, rate: float, now: float) -> list[str]:
    age = f" ({short_time(now - view.saved_at)} ago)" if view.saved_at is not None else ""
    facts = [
        _activity(view),
        f"{rate:.3g} it/s" if rate else "",
        f"loss {view.loss:.4g}" if not math.isnan(view.loss) else "",
        f"ETA {short_time((view.max_iter - view.step) / rate)}" if rate else "",
        f"checkpoint {view.durable_step}{age}" if view.durable_step or view.saved_at else "no checkpoint yet",
        f"restarts {view.restarts}" if view.restarts else "",
    ]
    return [fact for fact in facts if fact]


def _activity(view: View) -> str:
    """Return what the worker does, unless it simply trains."""
    if view.state is WorkerState.STARTING or view.phase == "start":
        return "starting"
    if view.state is WorkerState.STOPPING:
        return "stopping"
    if view.state is WorkerState.LEAVING:
        return "ending"
    return "" if view.phase in _ORDINARY else {"save": "saving"}.get(view.phase, view.phase)


def _live_line(view: View, rate: float, now: float) -> bytes:
    # Imported here: a daemon without a terminal never needs it.
    from rich.console import Console
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    try:
        width = os.get_terminal_size(STDERR).columns
    except OSError:
        width = 80
    # One column stays free: a line that fills the last one wraps on some terminals.
    console = Console(file=io.StringIO(), force_terminal=True, width=max(width - 1, 20), legacy_windows=False)
    text = Text("  ").join(Text(part) for part in [_position(view), *_facts(view, rate, now)])
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    grid.add_row(ProgressBar(total=view.max_iter, completed=view.step, width=min(BAR_WIDTH, width // 4)), text)
    with console.capture() as capture:
        console.print(grid, end="")
    return capture.get().rstrip("\n").encode(errors="replace")
