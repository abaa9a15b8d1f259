"""Run one function on several ranks, each in its own process, and return every rank's result.

The ranks start as they do under torchrun: with its environment, an agent's store on a port that no other process can
take, and an output file and an error file per rank. Unlike torchrun, nothing supervises them: a rank that dies ends no
other rank, and a hang stays visible. They are forked from a server that has imported torch and the frameworks
(`preload`), so starting one is cheap.

    def add_up(value):
        dist.init_process_group("gloo")
        total = torch.tensor([value])
        dist.all_reduce(total)
        return total.item()

    def test_every_rank_gets_the_sum(run_ranks):
        assert [result.value for result in run_ranks(add_up, 4, 3)] == [12, 12, 12, 12]
"""

import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import pickle
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, Final, Literal
from unittest import mock

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  (public in torch's documentation)

from integration_tests import devices
from integration_tests import rank as rank_process
from integration_tests.devices import Placement
from integration_tests.rank import Host, Job
from integration_tests.rank import tell as tell

STREAMING_TURN = Path(tempfile.gettempdir()) / f"one-streaming-job-of-{os.getuid()}"
"""A file that is locked while a job with mosaicml-streaming runs, by whichever test session."""

Environment = Mapping[str, str] | Callable[[int], Mapping[str, str]]
HostedBy = Literal["agent", "rank0", "apart"]
"""Who hosts a job's store: pytest's process, as torchrun's agent does; rank 0; or `StoreHost`, a process of its own."""
ABSENT: Final = type("Absent", (), {"__repr__": lambda self: "ABSENT"})()
_SECONDS_TO_PRINT_STACKS: Final = 1.0
_STORE_SECONDS: Final = timedelta(seconds=5)
_DEFAULT_STORE: Final = "default_pg/0//"
"""How the keys of the job's default store begin, in the store itself."""
_REPOSITORY: Final = Path(__file__).parents[1]
NAME_LOOKUPS: Final = {"RES_OPTIONS": "timeout:1 attempts:1"}
"""Bounds how long a name look-up takes, in every process of a job.

torch's TCPStore makes a reverse DNS look-up of its peer at each connection, on both sides. The address ::ffff:127.0.0.1
is in no hosts file, so the name server is asked, and by default the resolver waits 5 s for an answer that was lost.
"""
_LOST_LOOKUP: Final = re.compile(r"^(\[rank\d+\]:)?\[W.* \[c10d\] The hostname of the .* cannot be retrieved.*\n", re.M)
"""What torch prints then. It is about the name server of the machine, so it is no output of the job."""


def ask_no_name_server() -> None:
    """Lets no name look-up of this process reach the name server; those of its children may.

    This process hosts the ranks' store. Where it waits for a lost answer, the ranks all wait for the store. To be
    called before the first look-up of the process: the C library then reads its options, once.
    """
    os.environ["RES_OPTIONS"] = "attempts:0"
    with contextlib.suppress(OSError):
        socket.getnameinfo(("192.0.2.1", 0), socket.NI_NAMEREQD)  # an address of no host (RFC 5737)
    os.environ.update(NAME_LOOKUPS)


@dataclass(frozen=True)
class RankResult:
    """How one rank ended.

    Attributes:
        rank: Which one.
        value: What the function returned, or ABSENT.
        exit_code: What torchrun would see: negative for a signal, 1 for an uncaught exception; None while it is alive.
        output: Its stdout and stderr, in the order written.
        error_file: What it wrote to its TORCHELASTIC_ERROR_FILE, "" if nothing.
        seconds: From the start of the run to its end.
        host: The name of its host, where the test has made hosts; "" otherwise.
    """

    rank: int
    value: Any
    exit_code: int | None
    output: str
    error_file: str
    seconds: float
    host: str = ""

    def __str__(self) -> str:
        ending = "alive" if self.exit_code is None else f"exit code {self.exit_code}"
        place = f"rank {self.rank} on {self.host}" if self.host else f"rank {self.rank}"
        return f"--- {place}: {ending} after {self.seconds:.1f} s, value {self.value!r}\n{self.output}"


class RanksFailed(AssertionError):
    """A run did not end as expected. The message has the reason and every rank's output; `results` has the results."""

    def __init__(self, how: str, results: Sequence[RankResult]) -> None:
        self.results = list(results)
        super().__init__("\n".join([how, *map(str, results)]))


class RanksTimedOut(RanksFailed):
    """Ranks were alive at the deadline. Their output ends with the stacks of their threads."""


@dataclass
class _Rank:
    rank: int
    process: ForkServerProcess
    messages: Connection
    output: Path
    error_file: Path
    host: str
    pid: int | None  # as seen from here; None until a rank on a host of its own has begun there
    value: Any = ABSENT
    told: set[str] = field(default_factory=set)
    ended_at: float | None = None

    @property
    def alive(self) -> bool:
        return self.ended_at is None

    def read(self) -> None:
        """Receive what the rank has sent. The pipe may end before the rank does."""
        try:
            while not self.messages.closed and self.messages.poll():
                kind, content = self.messages.recv()
                if kind == "told":
                    self.told.add(content)
                elif kind == "pid":
                    self.pid = content
                else:
                    self.value = content
        except (EOFError, ConnectionResetError):
            self.messages.close()

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the rank and to its data loader's workers."""
        if self.alive and self.process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid or self.process.pid or 0, number)

    def result(self, started_at: float) -> RankResult:
        return RankResult(
            rank=self.rank,
            value=self.value,
            exit_code=self.process.exitcode,
            output=_LOST_LOOKUP.sub("", self.output.read_text(errors="replace")) if self.output.exists() else "",
            error_file=self.error_file.read_text() if self.error_file.exists() else "",
            seconds=(self.ended_at or time.monotonic()) - started_at,
            host=self.host,
        )


class StoreHost:
    """A job's store in a process of its own, which can be killed.

    Args:
        host: On whose network; None: on this machine's own.
        port: Of the store; 0: any that is free.
    """

    def __init__(self, host: Host | None = None, port: int = 0) -> None:
        ours, theirs = multiprocessing.Pipe(duplex=False)
        self._process = _forkserver().Process(target=_host_store, args=(theirs, host, port), daemon=True)
        self._process.start()
        theirs.close()  # else nobody would notice that the process has died
        with ours:
            self.port: int = ours.recv()

    def kill(self) -> None:
        """Kills it, and returns when it is gone; nothing if it has been killed."""
        self._process.kill()
        self._process.join()


def _host_store(parent: Connection, host: Host | None, port: int) -> None:
    """Hosts a store until this process is killed."""
    rank_process.end_with_parent()
    if host is not None:
        network = os.pidfd_open(host.pid)
        rank_process.enter_namespaces(network, rank_process.CLONE_NEWNET)
        os.close(network)
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    parent.send(store.port)
    while True:
        signal.pause()


class Watch:
    """A run in progress, for the test's `while_running`.

    Args:
        deadline_seconds: After it every rank prints its stacks and is killed.
        kill_peers_after: Seconds after a rank's failure at which the others get SIGTERM; None for never.
        store: What hosts the job's store, where that is a process of its own.
    """

    def __init__(self, deadline_seconds: float, kill_peers_after: float | None, store: StoreHost | None = None) -> None:
        self._store = store
        self._ranks: list[_Rank] = []
        self._started_at = time.monotonic()
        self._deadline = self._started_at + deadline_seconds
        self._kill_peers_after = kill_peers_after
        self._peers_killed = False

    def start(
        self, call: bytes, environment: Mapping[str, str], directory: Path, finalise: bool, host: Host | None
    ) -> None:
        """Start the next rank; for the functions that run ranks, not for tests.

        Args:
            call: The pickled function and its arguments.
            environment: What torchrun would set.
            directory: The run's own.
            finalise: Whether the rank finalises its interpreter at the end.
            host: Where the rank is to live; None: on this machine itself.
        """
        rank = len(self._ranks)
        output = directory / f"rank{rank}.log"
        messages, theirs = multiprocessing.Pipe(duplex=False)
        job = Job(call, environment, directory, output, finalise, host)
        process = _forkserver().Process(target=rank_process.main, args=(job, theirs), name=f"rank{rank}")
        process.start()
        theirs.close()
        error_file = Path(environment["TORCHELASTIC_ERROR_FILE"])
        pid, name = (process.pid, "") if host is None else (None, host.name)
        self._ranks.append(_Rank(rank, process, messages, output, error_file, name, pid))

    def pid(self, rank: int) -> int:
        """The rank's process id, as seen from here."""
        one = self._ranks[rank]
        self._run_until(lambda: one.pid is not None or not one.alive, self._deadline)
        if one.pid is None:
            raise RanksFailed(f"rank {rank} has not begun", self.results())
        return one.pid

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to one rank's process alone: SIGKILL, SIGSTOP, SIGCONT, SIGTERM, …"""
        os.kill(self.pid(rank), number)

    def kill_store(self) -> None:
        """Kill the process that hosts the job's store, which must be `hosted_by` "apart"."""
        assert self._store is not None, 'the store has no process of its own: hosted_by="apart"'
        self._store.kill()

    def wait_for(self, rank: int, name: str, timeout: float = 30.0) -> None:
        """Return when that rank has called `tell(name)`.

        Raises:
            RanksFailed: If it ends, or `timeout` seconds pass, before it does.
        """
        one = self._ranks[rank]
        self._run_until(lambda: name in one.told or not one.alive, time.monotonic() + timeout)
        if name not in one.told:
            self._print_stacks(self._alive())
            raise RanksFailed(f"rank {rank} has not told {name!r} within {timeout:g} s", self.results())

    def wait_for_end(self, rank: int, timeout: float = 30.0) -> int:
        """Return that rank's exit code, once it has ended."""
        one = self._ranks[rank]
        self._run_until(lambda: not one.alive, time.monotonic() + timeout)
        if one.alive:
            self._print_stacks(self._alive())
            raise RanksFailed(f"rank {rank} has not ended within {timeout:g} s", self.results())
        return one.process.exitcode or 0

    def let_run(self, seconds: float) -> bool:
        """Wait while the ranks go on; return whether any is alive then."""
        self._run_until(lambda: not self._alive(), time.monotonic() + seconds)
        return bool(self._alive())

    def results(self) -> list[RankResult]:
        """What is known of each rank so far."""
        return [one.result(self._started_at) for one in self._ranks]

    def finish(self, expect: int | Sequence[int] | None = None) -> list[RankResult]:
        """Wait for every rank's end, and return their results.

        Args:
            expect: The exit code of every rank, or of each; None for any.

        Raises:
            RanksTimedOut: At the deadline, if ranks are still alive; their stacks have then been printed.
            RanksFailed: If the exit codes are others.
        """
        self._run_until(lambda: not self._alive(), self._deadline)
        if late := self._alive():
            self._print_stacks(late)
            names = ", ".join(str(one.rank) for one in late)
            seconds = self._deadline - self._started_at
            raise RanksTimedOut(f"still alive after {seconds:g} s: ranks {names}", self.results())
        results = self.results()
        codes = [result.exit_code for result in results]
        expected = [expect] * len(results) if isinstance(expect, int) else expect
        if expected is not None and codes != list(expected):
            raise RanksFailed(f"exit codes {codes}, expected {list(expected)}", results)
        return results

    def _alive(self) -> list[_Rank]:
        return [one for one in self._ranks if one.alive]

    def _run_until(self, done: Callable[[], bool], deadline: float) -> None:
        """Receive messages and exits until `done` or the deadline (never later than the run's own)."""
        while not done():
            until = min(deadline, self._deadline, self._peers_die_at() or self._deadline)
            if not self._take_in(until - time.monotonic()) and not self._kill_peers_if_due():
                return

    def _take_in(self, timeout: float) -> bool:
        """Wait until a rank sends something or ends, at most `timeout` seconds; return False if none did."""
        alive = self._alive()
        open_pipes = [one.messages for one in alive if not one.messages.closed]
        news = wait([*open_pipes, *(one.process.sentinel for one in alive)], max(0.0, timeout))
        for one in alive:
            if one.process.sentinel in news:
                one.process.join()
                one.read()
                one.ended_at = time.monotonic()
            elif one.messages in news:
                one.read()
        return bool(news)

    def _peers_die_at(self) -> float | None:
        if self._kill_peers_after is None or self._peers_killed:
            return None
        deaths = [one.ended_at for one in self._ranks if one.ended_at is not None and one.process.exitcode]
        return min(deaths) + self._kill_peers_after if deaths else None

    def _kill_peers_if_due(self) -> bool:
        due = self._peers_die_at()
        if due is None or time.monotonic() < due:
            return False
        self._peers_killed = True
        for one in self._alive():
            one.kill(signal.SIGTERM)
        return True

    def _print_stacks(self, ranks: Sequence[_Rank]) -> None:
        for one in ranks:
            one.kill(signal.SIGCONT)  # a stopped one prints nothing
            if one.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one.pid, signal.SIGUSR1)
        wait([one.process.sentinel for one in ranks], _SECONDS_TO_PRINT_STACKS)

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._alive():
            one.kill()
        for one in self._ranks:
            one.process.join()
            one.process.close()
            one.messages.close()


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    directory: Path,
    deadline_seconds: float = 60.0,
    hosted_by: HostedBy = "agent",
    env: Environment | None = None,
    expect: int | Sequence[int] | None = 0,
    kill_peers_after: float | None = None,
    while_running: Callable[[Watch], None] | None = None,
    finalise: bool = False,
    device: Placement = "cpu",
) -> list[RankResult]:
    """Run `function(*args)` on `world_size` ranks and return their results, by rank.

    Args:
        function: Importable by name. It, or its framework, makes the process group.
        world_size: Number of ranks, on this one host.
        *args: The same for every rank, picklable. A rank knows itself by RANK.
        directory: Where the run's files go; each run has its own below it, the ranks' working directory.
        deadline_seconds: After it every rank prints its stacks and is killed.
        hosted_by: Who hosts the store.
        env: More environment, for all ranks or by rank. COUNTOFF variables of pytest's own do not get through.
        expect: The exit code of every rank, or of each; None for any.
        kill_peers_after: Seconds after a rank's failure at which the others get SIGTERM; None for never.
        while_running: Called while the ranks run; it can wait for what they `tell`, and kill or stop them.
        finalise: True to finalise the interpreter at the end, as a script does, for a test of how ranks exit. It costs
            more CPU time than a short job. Otherwise a rank exits after it has joined its threads and run atexit.
        device: Where the ranks train, and with which backend (`devices`).

    Raises:
        RanksTimedOut: If ranks are alive at the deadline.
        RanksFailed: If the exit codes are not the expected ones.
    """
    directory, call = prepare(function, args, directory)
    with contextlib.ExitStack() as stack:
        rendezvous, store = stack.enter_context(_rendezvous(hosted_by, world_size))
        watch = stack.enter_context(Watch(deadline_seconds, kill_peers_after, store))
        hosts = devices.hosts_of(device, world_size)
        for rank in range(world_size):
            torchruns = torchrun_environment(rank, world_size, directory, world_size // hosts)
            place = {devices.VARIABLE: device, **devices.environment(rank, hosts), **rendezvous}
            watch.start(call, {**torchruns, **place, **of_rank(env, rank)}, directory, finalise, host=None)
        if while_running:
            while_running(watch)
        try:
            return watch.finish(expect)
        except RanksTimedOut as late:
            if hosted_by == "agent":
                with contextlib.suppress(RuntimeError):  # the store may be what hangs
                    late.args = (f"{late}\n{told_to_others(int(rendezvous['MASTER_PORT']), world_size)}",)
            raise


def told_to_others(port: int, world_size: int) -> str:
    """Return what the ranks have told each other through countoff in their last fit, for a hang that nothing explains.

    Args:
        port: The port of their store, on this host.
        world_size: How many they are.
    """
    store: Any = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=_STORE_SECONDS)

    def first_missing(name: str) -> int:
        return next(number for number in itertools.count() if not store.check([f"{name}{number}"]))

    fits = first_missing(f"{_DEFAULT_STORE}countoff/")
    if not fits:
        return "countoff: rank 0 has not told where the ranks meet."
    base = f"countoff/{json.loads(store.get(f'{_DEFAULT_STORE}countoff/{fits - 1}'))['nonce']}/"
    names = ["plan", *(f"{what}/{rank}" for what in ("joined", "plan") for rank in range(world_size))]
    there = [name for name in names if store.check([f"{base}{fits - 1}/{name}"])]
    return (
        f"countoff: fit {fits - 1} has {', '.join(there)} in the store, and not "
        f"{', '.join(name for name in names if name not in there)}; its log ends at {first_missing(f'{base}log/')}."
    )


def prepare(function: Callable[..., Any], args: Sequence[Any], directory: Path) -> tuple[Path, bytes]:
    """Return a new directory for one run, below `directory`, and the pickled call."""
    _forkserver()  # its imports are not on the run's deadline
    return Path(tempfile.mkdtemp(prefix=f"{function.__name__}-", dir=directory)), pickle.dumps((function, args))


def of_rank(env: Environment | None, rank: int) -> Mapping[str, str]:
    """What a test adds to the environment of one rank."""
    return env(rank) if callable(env) else env or {}


@functools.cache
def _forkserver() -> ForkServerContext:
    """The server that every rank of this session is forked from."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["integration_tests.preload"])
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("COUNTOFF")}
    # One thread per rank, as torchrun has it. The preload needs the path: the server gets no other. A framework asks on
    # import whether there is a GPU. By default CUDA itself answers, and no fork can use CUDA after that.
    inherited.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", PYTORCH_NVML_BASED_CUDA_CHECK="1")
    inherited.update(PYTHONPATH=python_path(), **NAME_LOOKUPS)
    with mock.patch.dict(os.environ, inherited, clear=True):
        first = context.Process(target=int)
        first.start()
        first.join()
    return context


def python_path() -> str:
    """The PYTHONPATH by which another process finds what this one finds."""
    return os.pathsep.join(dict.fromkeys([str(_REPOSITORY), *filter(os.path.isabs, sys.path)]))


@contextlib.contextmanager
def _rendezvous(hosted_by: HostedBy, world_size: int) -> Iterator[tuple[dict[str, str], StoreHost | None]]:
    """The variables by which ranks find their store, that store where it is the agent's, and its own process."""
    agents, apart = None, None
    if hosted_by == "agent":
        agents = TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
        port = agents.port
    elif hosted_by == "apart":
        apart = StoreHost()
        port = apart.port
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": str(hosted_by != "rank0"),
    }
    try:
        yield variables, apart
    finally:
        if apart is not None:
            apart.kill()
        del agents


def torchrun_environment(rank: int, world_size: int, directory: Path, per_host: int) -> dict[str, str]:
    """What torchrun sets for one rank, but for the address of the store; the last host may have fewer ranks."""
    host, local = divmod(rank, per_host)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(min(per_host, world_size - host * per_host)),
        "GROUP_RANK": str(host),
        "GROUP_WORLD_SIZE": str(-(-world_size // per_host)),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world_size),
        "OMP_NUM_THREADS": "1",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": directory.name,
        "TORCHELASTIC_ERROR_FILE": str(directory / f"rank{rank}-error.json"),
        **NAME_LOOKUPS,
    }
