"""Run one function on the ranks of several hosts, and cut their links, or their power.

A host is a set of namespaces of this machine: it has its own network, name, processes and mounts, and so its own /proc
and /etc/hosts. Its ranks start as those of `harness.run_ranks` do. Each host has a link to a switch, which is a bridge
in a network namespace of its own.

    def test_a_partition_that_heals_is_no_fault(run_hosts):
        def cut(watch):
            watch.wait_for(3, "training")
            watch.link_down(1)
            watch.let_run(8)
            watch.link_up(1)

        run_hosts(train, hosts=2, per_host=2, while_running=cut)

Nothing of this has a name or an address outside of these namespaces, so test workers cannot collide. Each host and the
switch live until pytest closes a pipe: the kernel then kills every process of the host, and removes its links. It does
so however pytest ends.
"""

import contextlib
import functools
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  (public in torch's documentation)

from integration_tests.harness import (
    Environment,
    HostedBy,
    RankResult,
    StoreHost,
    Watch,
    of_rank,
    prepare,
    torchrun_environment,
)
from integration_tests.rank import CLONE_NEWNET, Host, enter_namespaces
from integration_tests.torchrun import CompletedRun, Torchrun, started, write_script
from tests.relay import Relay

_PORT: Final = 29500  # of the store; free, because the host's network is its own
_ADDRESSES: Final = "192.0.2"  # /24, for documentation: nobody routes it
_MADE: Final = "made\n"
_HOST: Final = 'echo "$1" > /proc/sys/kernel/hostname; mount --bind "$2" /etc/hosts'


class HostsError(RuntimeError):
    """A command that makes or changes hosts has failed; the message is what it printed."""


class Network:
    """The hosts of one run, numbered from 0, and their links.

    Args:
        switch: A process in the switch's network.
        hosts: The hosts. The link of host 0 is called node-0 at the switch too.
        holders: The process that keeps each host there, until its input ends.
    """

    def __init__(self, switch: int, hosts: Sequence[Host], holders: Sequence[subprocess.Popen[str]]) -> None:
        self.hosts = hosts
        self._switch = switch
        self._holders = holders

    def set_link(self, host: int, state: Literal["up", "down"]) -> None:
        """Pulls a host's cable out of the switch, or plugs it in again."""
        _ip(self._switch, f"link set {self.hosts[host].name} {state}")

    def power_off(self, host: int) -> None:
        """Ends a host as a power failure does: nobody receives a last packet of it."""
        self.set_link(host, "down")
        holder = self._holders[host]
        assert holder.stdin is not None
        holder.stdin.close()
        holder.wait()


@contextlib.contextmanager
def network(count: int, directory: Path) -> Iterator[Network]:
    """Makes hosts that reach each other by name: node-0, node-1 and so on.

    Args:
        count: Number of hosts.
        directory: Where their /etc/hosts is written.

    Raises:
        HostsError: If this machine does not permit it.
    """
    names = [f"node-{number}" for number in range(count)]
    addresses = [f"{_ADDRESSES}.{number + 1}" for number in range(count)]
    file = directory / "hosts"
    file.write_text(_hosts_file({"localhost": "127.0.0.1", **dict(zip(names, addresses, strict=True))}))
    with contextlib.ExitStack() as stack:
        switch = stack.enter_context(_namespaces(["--net"])).pid
        holders = [
            stack.enter_context(
                _namespaces(["--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc"], _HOST, name, str(file))
            )
            for name in names
        ]
        hosts = [Host(name, _first_process(holder)) for name, holder in zip(names, holders, strict=True)]
        links = [f"link add name {host.name} type veth peer name eth0 netns {host.pid}" for host in hosts]
        ports = [f"link set {name} master switch up" for name in names]
        _ip(switch, "link add name switch type bridge", "link set switch up", *links, *ports)
        for host, address in zip(hosts, addresses, strict=True):
            _ip(host.pid, "link set lo up", f"addr add {address}/24 dev eth0", "link set eth0 up")
        yield Network(switch, hosts, holders)


@functools.cache
def why_impossible() -> str:
    """Why this machine cannot make hosts, in one line; "" if it can."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            with network(1, Path(directory)):
                return ""
        except (HostsError, OSError) as error:
            return f"namespaces for several hosts are not permitted here: {error}"


class HostsWatch(Watch):
    """A run on several hosts in progress, for the test's `while_running`.

    Args:
        made: The hosts.
        relay: What delays the store's replies, or None.
        deadline_seconds: As of `Watch`.
        kill_peers_after: As of `Watch`.
        store: As of `Watch`.

    Attributes:
        relay: What delays the store's replies: `watch.relay.delay_seconds` can be changed.
    """

    def __init__(
        self,
        made: Network,
        relay: Relay | None,
        deadline_seconds: float,
        kill_peers_after: float | None,
        store: StoreHost | None,
    ) -> None:
        super().__init__(deadline_seconds, kill_peers_after, store)
        self._made = made
        self.relay = relay

    def link_down(self, host: int) -> None:
        """Cuts a host off from all others. Its processes go on."""
        self._made.set_link(host, "down")

    def link_up(self, host: int) -> None:
        """Ends that."""
        self._made.set_link(host, "up")

    def power_off(self, host: int) -> None:
        """Ends a host and its ranks, and no other host receives a last packet of it."""
        self._made.power_off(host)

    def stall_now_and_then(self, seconds: float, every: float) -> None:
        """Holds the store's replies back for so long, again and again, until the ranks have ended."""
        relay = self.relay
        assert relay is not None, "run_hosts needs delay_seconds"
        usual = relay.delay_seconds
        while self.let_run(every - seconds):
            relay.delay_seconds = seconds
            self.let_run(seconds)
            relay.delay_seconds = usual


def run_hosts(
    function: Callable[..., Any],
    *args: Any,
    hosts: int,
    per_host: int,
    ranks: int | None = None,
    directory: Path,
    deadline_seconds: float = 60.0,
    hosted_by: HostedBy = "agent",
    env: Environment | None = None,
    expect: int | Sequence[int] | None = 0,
    kill_peers_after: float | None = None,
    while_running: Callable[[HostsWatch], None] | None = None,
    finalise: bool = False,
    delay_seconds: float | None = None,
) -> list[RankResult]:
    """Run `function(*args)` on the ranks of several hosts and return their results, by rank.

    Args:
        function: As for `harness.run_ranks`.
        *args: As there.
        hosts: Number of hosts. Host 0 has the first ranks, and the store.
        per_host: Ranks on each.
        ranks: Ranks in all, where the last host has fewer than the others; None: `hosts` times `per_host`.
        directory: As there, and so are the others, as far as they are not below.
        deadline_seconds: After it every rank prints its stacks and is killed.
        hosted_by: Who hosts the store; an agent and a process of its own do so on host 0.
        env: More environment, for all ranks or by rank.
        expect: The exit code of every rank, or of each; None for any. That of a host without power is -SIGKILL.
        kill_peers_after: Seconds after a rank's failure at which the others get SIGTERM; None for never.
        while_running: Called while the ranks run.
        finalise: True to finalise the interpreter at the end.
        delay_seconds: How long each reply of the agent's store takes on its way to another host; None for no relay.

    Raises:
        HostsError: If this machine cannot make hosts.
        RanksTimedOut: If ranks are alive at the deadline.
        RanksFailed: If the exit codes are not the expected ones.
    """
    directory, call = prepare(function, args, directory)
    world_size = ranks or hosts * per_host
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(network(hosts, directory))
        rendezvous, relay, store = stack.enter_context(_rendezvous(made.hosts[0], hosted_by, world_size, delay_seconds))
        watch = HostsWatch(made, relay, deadline_seconds, kill_peers_after, store)
        stack.enter_context(watch)
        for rank in range(world_size):
            torchruns = torchrun_environment(rank, world_size, directory, per_host)
            # The store's own host has no way to it that could be slow.
            direct = {"MASTER_PORT": str(_PORT)} if rank < per_host else {}
            environment = {**torchruns, **rendezvous, **direct, **of_rank(env, rank)}
            watch.start(call, environment, directory, finalise, made.hosts[rank // per_host])
        if while_running:
            while_running(watch)
        return watch.finish(expect)


def run_torchrun_on_hosts(
    script: str | Path,
    *arguments: str,
    hosts: int,
    per_host: int,
    directory: Path,
    env: Mapping[str, str] | None = None,
    deadline_seconds: float = 180.0,
    options: Sequence[str] = (),
    while_running: Callable[[Network, Sequence[Torchrun]], None] | None = None,
) -> list[CompletedRun]:
    """Run a script under one real torchrun on each of several hosts, and return how each ended, by host.

    The torchruns meet at host 0 (`--rdzv-backend=c10d`). Which host has which ranks is for them to decide.

    Args:
        script: As for `torchrun.run_torchrun`.
        *arguments: The script's own.
        hosts: Number of hosts.
        per_host: Ranks on each.
        directory: Working directory of all torchruns and ranks.
        env: More environment.
        deadline_seconds: Past it the workers print their stacks and all are killed.
        options: More options of torchrun; one that is given here as well takes the place of the harness's.
        while_running: Called while they run. It can change links and power, and read what was printed.

    Raises:
        HostsError: If this machine cannot make hosts.
        TorchrunTimedOut: If one is running at the deadline.
    """
    path = write_script(script, directory)
    deadline = time.monotonic() + deadline_seconds
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(network(hosts, directory))
        meet = ["--rdzv-backend=c10d", f"--rdzv-endpoint={made.hosts[0].name}:{_PORT}", "--rdzv-id=test"]
        how = [f"--nnodes={hosts}", f"--nproc-per-node={per_host}", *meet, *options]
        torchruns = [
            stack.enter_context(
                started(
                    path,
                    *arguments,
                    options=how,
                    directory=directory,
                    env=env,
                    within=["nsenter", f"--target={host.pid}", "--net", "--uts", "--mount", "--pid"],
                    log=f"{host.name}.log",
                )
            )
            for host in made.hosts
        ]
        if while_running:
            while_running(made, torchruns)
        return [torchrun.finish(deadline) for torchrun in torchruns]


@contextlib.contextmanager
def _rendezvous(
    host: Host, hosted_by: HostedBy, world_size: int, delay_seconds: float | None
) -> Iterator[tuple[dict[str, str], Relay | None, StoreHost | None]]:
    """The variables by which ranks find their store, and that store, on a host's network, where it is not rank 0's.

    With it come what delays its replies, and its own process.
    """
    agents, relay, apart = None, None, None
    if hosted_by == "agent":
        with _on_network_of(host.pid):
            agents = TCPStore("127.0.0.1", _PORT, world_size, is_master=True, wait_for_workers=False)
            if delay_seconds is not None:
                relay = Relay(_PORT, address="0.0.0.0")
                relay.delay_seconds = delay_seconds
    elif hosted_by == "apart":
        apart = StoreHost(host, _PORT)
    try:
        variables = {
            "MASTER_ADDR": host.name,
            "MASTER_PORT": str(relay.port if relay else _PORT),
            "TORCHELASTIC_USE_AGENT_STORE": str(hosted_by != "rank0"),
        }
        yield variables, relay, apart
    finally:
        if relay is not None:
            relay.close()
        if apart is not None:
            apart.kill()
        del agents


@contextlib.contextmanager
def _namespaces(kinds: Sequence[str], script: str = "", *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Runs `unshare` until the end of its input, which comes here, or earlier, or with this process.

    Args:
        kinds: Its options.
        script: Commands of a shell to begin with.
        *arguments: Those of the script.

    Raises:
        HostsError: If that fails.
    """
    shell = ["sh", "-ec", f"{script}\nprintf '{_MADE}'; exec cat", "sh"]
    with subprocess.Popen(
        ["unshare", *kinds, *shell, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a Ctrl-C is for pytest, which then closes the pipes
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        if process.stdout.readline() != _MADE:
            raise HostsError(process.stderr.read().strip())
        yield process


def _hosts_file(addresses: Mapping[str, str]) -> str:
    """The text of /etc/hosts, with the form in which torch's store looks up its peers' addresses."""
    lines = [f"{address} {name}\n::ffff:{address} {name}.mapped\n" for name, address in addresses.items()]
    return "".join(lines)


def _first_process(holder: subprocess.Popen[str]) -> int:
    """The process 1 of a host, as seen from here: the only child of `unshare --fork`."""
    return int(Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text())


def _ip(process: int, *commands: str) -> None:
    """Carries out commands of `ip` on a process's network."""
    with _on_network_of(process):
        done = subprocess.run(["ip", "-batch", "-"], input="\n".join(commands), capture_output=True, text=True)
    if done.returncode:
        raise HostsError(done.stderr.strip())


@contextlib.contextmanager
def _on_network_of(process: int) -> Iterator[None]:
    """Puts this thread on a process's network; what it starts and opens meanwhile stays there."""
    with open("/proc/thread-self/ns/net", "rb") as own, open(f"/proc/{process}/ns/net", "rb") as other:
        enter_namespaces(other.fileno(), CLONE_NEWNET)
        try:
            yield
        finally:
            enter_namespaces(own.fileno(), CLONE_NEWNET)
