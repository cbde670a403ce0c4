"""What the simulator found, as objects whose text is made for people."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Access:
    """One access to memory.

    Attributes:
        rank: the rank that accessed.
        kernel: the kernel's name; empty for host code.
        program: index of the program in its grid; None for host code.
        file, line, source: the place in the kernel or script, and the line's text.
        what: ``load``, ``store``, ``atomic add (acq_rel, gpu)``, ``aten.zero_`` and so on.
        tensor: the tensor's label.
        owner: the rank whose memory it is.
        site: where the tensor was made.
        elements: the elements, in words.
        launch: a number that tells launches apart; 0 for host code.
        nth: which launch of the kernel by its rank it is, from 1.
    """

    rank: int
    kernel: str
    program: tuple[int, ...] | None
    file: str
    line: int
    source: str
    what: str
    tensor: str
    owner: int
    site: str
    elements: str
    launch: int = 0
    nth: int = 0

    def who(self, with_launch: bool = False) -> str:
        """Rank, kernel and program, and which launch of the kernel when asked for."""
        if not self.kernel:
            return f"rank {self.rank}, host code"
        launch = f" (launch {self.nth})" if with_launch else ""
        return f"rank {self.rank}, kernel {self.kernel}{launch}, program {_index(self.program)}"

    def __str__(self) -> str:
        return self.text()

    def text(self, with_launch: bool = False) -> str:
        """Two lines: who did what, and where."""
        made = f" (made at {self.site})" if self.site and self.site != self.tensor else ""
        return (
            f"{self.who(with_launch)}: {self.what} of {self.elements} on rank {self.owner}{made}\n"
            f"      at {self.file}:{self.line}: {self.source}"
        )


@dataclass(frozen=True)
class RaceReport:
    """Two accesses that nothing orders, in the order in which they happened this time; ``missing`` says what would."""

    first: Access
    second: Access
    missing: str

    def __str__(self) -> str:
        # Launches of one kernel look alike: say which of them meet.
        apart = self.first.kernel == self.second.kernel and self.first.nth != self.second.nth
        return (
            f"race on {self.second.elements}\n    {self.first.text(apart)}\n    {self.second.text(apart)}\n"
            f"    missing order: {self.missing}"
        )


@dataclass(frozen=True)
class BoundsReport:
    """An access outside any live tensor; ``nearby`` says where it is, ``count`` how many elements are outside."""

    access: Access
    nearby: str
    count: int

    def __str__(self) -> str:
        return f"out of bounds, {self.count} elements, the first {self.nearby}\n    {self.access}"


@dataclass(frozen=True)
class UninitializedReport:
    """A read of memory that nothing has written."""

    access: Access

    def __str__(self) -> str:
        return f"read of memory that nothing has written: {self.access.elements}\n    {self.access}"


@dataclass(frozen=True)
class Waiter:
    """A program that waits.

    Attributes:
        rank, kernel, program: who waits.
        file, line, source: where.
        values: values of the names in that line.
        flag: the tensor and element it polls.
        owner: the rank whose memory the flag is.
        wanted: the value it waits for; None when the loop does not say.
        seen: the value that is there.
        writers: who wrote the flag, or its neighbours when nobody did.
    """

    rank: int
    kernel: str
    program: tuple[int, ...]
    file: str
    line: int
    source: str
    values: dict[str, str]
    flag: str
    owner: int
    wanted: int | None
    seen: object
    writers: str

    def __str__(self) -> str:
        wanted = f" to reach {self.wanted}" if self.wanted is not None else ""
        values = f"\n      with {', '.join(f'{n} = {v}' for n, v in self.values.items())}" if self.values else ""
        return (
            f"rank {self.rank}, kernel {self.kernel}, program {_index(self.program)} waits for {self.flag} of rank "
            f"{self.owner}{wanted}, seen {self.seen}\n      at {self.file}:{self.line}: {self.source}{values}\n"
            f"      {self.writers}"
        )


@dataclass(frozen=True)
class DeadlockReport:
    """Why nothing can move.

    Attributes:
        waiters: the programs that wait.
        hosts: what each rank's host code does, in words.
        not_started: launches whose programs wait for a place, in words.
    """

    waiters: tuple[Waiter, ...]
    hosts: tuple[str, ...]
    not_started: tuple[str, ...]

    def __str__(self) -> str:
        shown = list(self.waiters[:12])
        lines = ["deadlock: nothing can move"]
        lines += [f"    {waiter}" for waiter in shown]
        if len(self.waiters) > len(shown):
            lines.append(f"    and {len(self.waiters) - len(shown)} more programs that wait")
        lines += [f"    {text}" for text in (*self.not_started, *self.hosts)]
        return "\n".join(lines)


@dataclass(frozen=True)
class StepLimitReport:
    """A program that does not end.

    Attributes:
        rank: its rank; None in a process that is a rank itself.
        kernel, program: which program.
        file, line, source: where it is.
        why: what it did too often, in words.
    """

    rank: int | None
    kernel: str
    program: tuple[int, ...]
    file: str
    line: int
    source: str
    why: str

    def __str__(self) -> str:
        rank = "" if self.rank is None else f"rank {self.rank}, "
        return (
            f"{rank}kernel {self.kernel}, program {_index(self.program)} {self.why}\n"
            f"      at {self.file}:{self.line}: {self.source}"
        )


def _index(program: tuple[int, ...] | None) -> str:
    """A program's index without the axes that the grid does not use."""
    if program is None:
        return "?"
    used = list(program)
    while len(used) > 1 and used[-1] == 0:
        used.pop()
    return str(used[0]) if len(used) == 1 else f"({', '.join(map(str, used))})"
