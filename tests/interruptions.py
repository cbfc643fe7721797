"""Interrupts a command wherever it changes something on disk, and in between.

A server (``python interruptions.py FOLDER``) has everything imported and warm. For a command it
forks a child that runs it once, in ``FOLDER/work``. At every event of the file system there, as
Python's audit hooks tell it, and after every so many seconds of the processor, the child forks
again: that process meets with a fault and comes to its end, what is then in the folder is a
*state*, and the folder is put back before the child goes on. So one run of a command visits all its
moments. From every state that differs the same command is then run to its end.

Faults at an event and at a moment in between:

    kill     SIGKILL: the state is what is there

At an event alone:

    torn     killed by the system in the middle of the next write that reaches some bytes; that
             includes writers which are no Python, and raise no events
    full     every event from this one on fails with ENOSPC
    cut      every write fails that reaches some bytes, from the event on

At a moment in between alone, in turns: SIGTERM, SIGINT, SIGHUP; all three where a stage begins.

``Server`` is the other end, for tests.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import hashlib
import io
import json
import os
import pickle
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

Tree = dict[str, bytes | None]
"""What is in a folder: path -> content; None is a folder."""

TEMPORARY = "tmp"
"""The folder of the system's temporary files, which counts for nothing."""
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink")


def _renew_threads() -> None:
    """Give a fork its own pool of threads, before two threads that load weights both try to."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(torch.get_num_threads())


os.register_at_fork(after_in_child=_renew_threads)

TAKES_ROOM = ("open", "os.mkdir", "os.rename", "os.link", "os.symlink")
"""Events that a full disk can refuse."""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
LIMITS = (16, 3000)
"""Bytes that a file may have before a torn or cut write, in turns: within texts and weights."""
SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP")
TIMEOUT = 120
"""Seconds that one process may take."""
LONGEST = 900
"""Seconds that the process may take that is visited, with all of its forks."""

SCRATCH = re.compile(
    r"(^|/)(\.\d+\.[^/]*|\.[^/]*\.new|\.new-plugin-[^/]*|\.saving|[^/]*\.tmp|tmp[^/]*)(/|$)"
)
"""Names of what is not finished."""
RANDOM = re.compile(r"\.\d+\.|new-plugin-\w+|\.tmp\w+|/tmp\w+")
"""What in a name is another one every time."""
WHOLE = (".safetensors", "tokenizer.json", "quality.json", "loss.json", "dialogues.jsonl")
"""Ends of the names of files in which no clock decides anything."""
DECIDED = (
    "text",
    "turns",
    "tokens",
    "accepted",
    "accept_lengths",
    "new_tokens",
    "finish",
    "identical",
)
"""Keys of results that no clock decides."""


@dataclass
class End:
    """How a process ended, and what it left.

    Attributes:
        fault: what it met with; empty for none.
        place: the event, or the moment.
        code: exit code, as a shell has it.
        output: all that it printed.
        state: number of what was in the folder.
    """

    fault: str
    place: str
    code: int
    output: str
    state: int = -1


@dataclass
class Visit:
    """A command, all its interruptions, and what came of each state.

    Attributes:
        whole: the end without a fault, in the process that was visited.
        ends: of the processes that met with a fault.
        states: what they left, each once.
        resumed: state -> how the same command ended that began from it.
        results: the same, what was then in the folder and is not decided by a clock.
        expected: what is there after an undisturbed run.
    """

    whole: End
    ends: list[End]
    states: list[Tree]
    resumed: dict[int, End] = field(default_factory=dict)
    results: dict[int, dict[str, Any]] = field(default_factory=dict)
    expected: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


# --- folders --------------------------------------------------------------------------------------


def read_tree(folder: Path) -> Tree:
    """What is in a folder."""
    return {
        path.relative_to(folder).as_posix(): None if path.is_dir() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }


def write_tree(tree: Tree, folder: Path) -> None:
    """Fill an empty folder."""
    folder.mkdir(parents=True)
    for name, content in sorted(tree.items()):
        (folder / name).mkdir() if content is None else (folder / name).write_bytes(content)


class Snapshot:
    """A folder as it is now, to be put back.

    Its files stay the same files, by hard links: a process may have them open.

    Args:
        folder: which is to be put back.
        links: another folder of the same disk, for this snapshot's own.
    """

    def __init__(self, folder: Path, links: Path) -> None:
        self.folder, self.tree = folder, read_tree(folder)
        shutil.rmtree(links, ignore_errors=True)
        links.mkdir()
        files = [name for name, content in self.tree.items() if content is not None]
        self._links = {name: links / str(number) for number, name in enumerate(files)}
        for name, link in self._links.items():
            link.hardlink_to(folder / name)

    def put_back(self) -> None:
        """Make the folder what it was."""
        for path in sorted(self.folder.rglob("*"), reverse=True):
            name = path.relative_to(self.folder).as_posix()
            if path.is_dir():
                if name not in self.tree:
                    path.rmdir()
            elif name not in self._links or not path.samefile(self._links[name]):
                path.unlink()
        for name, content in self.tree.items():
            path = self.folder / name
            if content is None:
                path.mkdir(exist_ok=True)
                continue
            if not path.exists():
                path.hardlink_to(self._links[name])
            if path.read_bytes() != content:
                path.write_bytes(content)


def fingerprint(tree: Tree) -> str:
    """A hash in which no process id and no random name counts."""
    lines = [
        (RANDOM.sub(".", name), hashlib.sha256(content or b"").digest())
        for name, content in tree.items()
        if name.split("/")[0] != TEMPORARY
    ]
    return hashlib.sha256(repr(sorted(lines)).encode()).hexdigest()


def facts(tree: Tree) -> dict[str, Any]:
    """What a clock does not decide, by file; names alone where all of a file does."""
    found: dict[str, Any] = {}
    for name, content in tree.items():
        if content is None or SCRATCH.search(name) or name.endswith((".lock", ".ckpt")):
            continue
        found[name] = None
        if name.endswith(WHOLE):
            found[name] = hashlib.sha256(content).hexdigest()
        elif name.endswith("history.jsonl"):
            found[name] = curves(content)
        elif "rows/" in name:
            # A prompt that a kill cut off is measured again, and its answers stand there twice.
            found[name] = sorted(set(map(repr, kept(lines_of(content)))))
        elif name.endswith(".jsonl"):
            found[name] = kept(lines_of(content))
        elif name.endswith(".json"):
            found[name] = kept(json.loads(content))
    return found


def kept(node: Any) -> Any:
    """What of a JSON file is decided by the settings alone."""
    if isinstance(node, list):
        return [kept(each) for each in node if isinstance(each, dict | list)] or None
    if not isinstance(node, dict):
        return None
    chosen = {key: node[key] for key in DECIDED if key in node and not _holds_dicts(node[key])}
    inner = {key: kept(value) for key, value in node.items() if isinstance(value, dict | list)}
    return chosen | {key: value for key, value in inner.items() if value and key not in chosen}


def _holds_dicts(node: Any) -> bool:
    return isinstance(node, list) and any(isinstance(each, dict) for each in node)


def lines_of(content: bytes) -> list[Any]:
    """The whole lines of a JSONL file."""
    found = []
    for line in content.splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def curves(content: bytes) -> dict[int, dict[str, float]]:
    """Losses by step, the later one where a step stands twice."""
    steps: dict[int, dict[str, float]] = {}
    for line in lines_of(content):
        losses = {key: line[key] for key in ("train/loss", "val/loss") if key in line}
        steps.setdefault(line["step"], {}).update(losses)
    return {step: losses for step, losses in steps.items() if losses}


# --- the process that is visited ------------------------------------------------------------------


class Visited:
    """Runs a command and lets a fault happen at every moment, each in a fork of this process.

    Args:
        folder: where it works.
        faults: which.
        between: seconds of the processor from one moment to the next.
    """

    def __init__(self, folder: Path, faults: Sequence[str], between: float) -> None:
        self.folder, self.faults, self.between = folder, faults, between
        self.ends: list[End] = []
        self.states: dict[str, tuple[int, Tree]] = {}
        self.in_fork = self._busy = self._full = self._over = False
        self._events, self._moments = count(), count()

    def begin(self) -> None:
        """Watch this process from now on."""
        from falcon_lab.experiment import STAGE

        gc.freeze()  # what is collected is copied into every fork
        sys.addaudithook(self._on_event)
        for name, stage in STAGE.items():
            STAGE[name] = partial(self._begin_stage, name, stage)
        signal.signal(signal.SIGPROF, self._on_moment)
        signal.setitimer(signal.ITIMER_PROF, self.between)

    def end(self) -> None:
        """Watch no more."""
        self._busy = self._over = True
        signal.setitimer(signal.ITIMER_PROF, 0)

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._busy or not (event == "open" or event in CHANGES) or not self._counts(arguments):
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & WRITING):
            return
        place = f"{event} {arguments[0]}"
        if self.in_fork:
            if self._full and event in TAKES_ROOM and not _is_there(event, arguments[0]):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), arguments[0])
            return
        number = next(self._events)
        chosen = [fault for fault in self.faults if fault not in SIGNALS]
        if _locking():  # a lock refuses to be taken on in a fork
            chosen = [fault for fault in chosen if fault == "kill"]
        self._interrupt(chosen, place, LIMITS[number % len(LIMITS)])
        if self.in_fork and self._full:
            self._on_event(event, arguments)

    def _counts(self, arguments: tuple[Any, ...]) -> bool:
        path = arguments[0]
        if not isinstance(path, str | bytes | os.PathLike):
            return False
        if isinstance(arguments[-1], int) and arguments[-1] > 2 and len(arguments) == 2:
            return True  # below a folder that is open
        return Path(os.path.abspath(os.fsdecode(path))).is_relative_to(self.folder)  # noqa: PTH100

    def _begin_stage(self, name: str, stage: Callable[..., None], *given: Any, **more: Any) -> None:
        if not self.in_fork:
            self._interrupt([each for each in self.faults if each in SIGNALS], f"{name}: begins", 0)
        stage(*given, **more)

    def _on_moment(self, *_: Any) -> None:
        if not self._busy and not self.in_fork:
            number = next(self._moments)
            chosen = [fault for fault in self.faults if fault == "kill"]
            if not _locking() and not _finalising():
                signals = [fault for fault in self.faults if fault in SIGNALS]
                chosen += filter(_is_received, signals[number % len(SIGNALS) :][:1])
            self._interrupt(chosen, _where(), 0)
        if not self.in_fork and not self._over:
            signal.setitimer(signal.ITIMER_PROF, self.between)

    def _interrupt(self, faults: Sequence[str], place: str, limit: int) -> None:
        self._busy = True
        before = Snapshot(self.folder, self.folder.with_name("links"))
        for fault in faults:
            if fault == "kill":
                self._note(End(fault, place, 137, ""), before.tree)
                continue
            if _clearing():
                continue
            reader, writer = os.pipe()
            process = os.fork()
            if process == 0:
                self.in_fork = True
                redirect_output(writer)
                os.close(reader)
                self._meet(fault, limit)
                return
            os.close(writer)
            code, output = ended(process, reader)
            self._note(End(fault, place, code, output), read_tree(self.folder))
            before.put_back()
        self._busy = False

    def _meet(self, fault: str, limit: int) -> None:
        self._busy = False
        gc.disable()
        if fault in SIGNALS:
            os.kill(os.getpid(), getattr(signal, fault))
        elif fault == "full":
            self._full = True
        else:
            how = signal.SIG_DFL if fault == "torn" else signal.SIG_IGN
            signal.signal(signal.SIGXFSZ, how)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    def _note(self, end: End, tree: Tree) -> None:
        number, _ = self.states.setdefault(fingerprint(tree), (len(self.states), tree))
        end.state = number
        self.ends.append(end)


def _is_there(event: str, path: Any) -> bool:
    return event == "os.mkdir" and Path(os.fsdecode(path)).is_dir()


def _running() -> Iterator[str]:
    """The functions that are running, the innermost first."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        yield f"{frame.f_globals.get('__name__', '')}.{frame.f_code.co_name}"
        frame = frame.f_back


def _where() -> str:
    """The stage and the function of ours that are running."""
    ours = [name for name in _running() if name.startswith("falcon_lab.")] or ["elsewhere"]
    stages = [name for name in ours if name.startswith("falcon_lab.experiment.")]
    return f"{(stages or ours)[0].rpartition('.')[2]}: {ours[0]}"


def _is_received(name: str) -> bool:
    """Whether the command has begun to receive a signal, and has not ended."""
    handler = signal.getsignal(getattr(signal, name))
    return handler not in (signal.SIG_DFL, signal.default_int_handler)


def _finalising() -> bool:
    """Whether Python drops what is raised; the thread that then raises it again is in no fork."""
    return any(name.endswith(".__del__") for name in _running())


def _clearing() -> bool:
    """Whether a folder is being removed, which one that is put back meanwhile would confuse."""
    return any(name.startswith(("tempfile.", "shutil._rmtree")) for name in _running())


def _locking() -> bool:
    """Whether a lock is held that a fork refuses to take on, or waits for in vain."""
    return any(name.startswith(("filelock", "concurrent.futures.thread.")) for name in _running())


def redirect_output(writer: int) -> None:
    """Let what this process prints go to another pipe.

    The old one may be kept under further numbers: whoever sends output aside puts it back later.
    """
    before = os.fstat(2)
    for number in map(int, os.listdir("/dev/fd")):  # noqa: PTH208
        with contextlib.suppress(OSError):  # the one by which the folder was read
            if os.path.samestat(os.fstat(number), before):
                os.dup2(writer, number)


def ended(process: int, reader: int, seconds: float = TIMEOUT) -> tuple[int, str]:
    """Wait for a process, not longer than is bearable: exit code and output."""
    output, end = io.BytesIO(), time.monotonic() + seconds
    while time.monotonic() < end:
        if select.select([reader], [], [], 1)[0]:
            part = os.read(reader, 65536)
            if not part:
                break
            output.write(part)
    else:
        os.kill(process, signal.SIGKILL)
        output.write(b"\nTraceback: it hung\n")
    os.close(reader)
    _, status = os.waitpid(process, 0)
    code = os.waitstatus_to_exitcode(status)
    return (128 - code if code < 0 else code), output.getvalue().decode(errors="replace")


def evenly(count: int, most: int) -> list[int]:
    """Numbers below ``count`` that lie evenly, the first and the last among them."""
    most = min(most, count)
    return sorted({round(each * (count - 1) / max(most - 1, 1)) for each in range(most)})


def cpu_seconds() -> float:
    """What the processes that have ended took of the processor."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# --- the server -----------------------------------------------------------------------------------


def run_here(arguments: Sequence[str]) -> int:
    """The command line in this process: its exit code, with a traceback where there is one."""
    from falcon_lab.cli import main

    try:
        main(list(arguments))
    except SystemExit as leaving:
        return int(leaving.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def in_fork(work: Path, body: Callable[[], int], seconds: float = TIMEOUT) -> End:
    """Call ``body`` in a process of its own, in the folder ``work``."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        code = 1
        try:
            for stream in (1, 2):
                os.dup2(writer, stream)
            os.close(reader)
            os.chdir(work)
            (work / TEMPORARY).mkdir(exist_ok=True)
            tempfile.tempdir = str(work / TEMPORARY)
            os.environ["FALCON_LAB_CACHE"] = str(work / "cache")
            code = body()
            atexit._run_exitfuncs()  # as the interpreter does: temporary folders are removed
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    code, output = ended(process, reader, seconds)
    return End("", "", code, output)


class Here:
    """What the server does, in its own process and its forks.

    Args:
        root: a folder of its own.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.work = root, root / "work"

    def warm(self, arguments: Sequence[str], begin: Tree) -> None:
        """Run a command in this very process, so that its forks find all imported."""
        self._begin_from(begin)
        before = Path.cwd()
        os.chdir(self.work)
        os.environ["FALCON_LAB_CACHE"] = str(self.work / "cache")
        assert run_here(arguments) == 0
        gc.collect()
        gc.freeze()
        os.chdir(before)

    def run(self, arguments: Sequence[str], begin: Tree) -> tuple[End, Tree]:
        """Run a command from a state to its end."""
        self._begin_from(begin)
        end = in_fork(self.work, lambda: run_here(arguments))
        return end, read_tree(self.work)

    def visit(
        self,
        arguments: Sequence[str],
        begin: Tree,
        faults: Sequence[str],
        between: float,
        most: int,
    ) -> Visit:
        """Run a command once, interrupted everywhere, and from ``most`` states that came of it."""
        started = cpu_seconds()
        undisturbed, tree = self.run(arguments, begin)
        assert undisturbed.code == 0, undisturbed.output
        expected = facts(tree)
        self._begin_from(begin)
        note = self.root / "ends.pickle"

        def body() -> int:
            visited = Visited(self.work, faults, between)
            visited.begin()
            code = run_here(arguments)
            visited.end()
            if not visited.in_fork:
                note.write_bytes(pickle.dumps((visited.ends, list(visited.states.values()))))
            return code

        note.unlink(missing_ok=True)
        whole = in_fork(self.work, body, LONGEST)
        ends, states = pickle.loads(note.read_bytes()) if note.exists() else ([], [])
        visit = Visit(whole, ends, [tree for _, tree in states], expected=expected)
        for number in evenly(len(visit.states), most):
            end, after = self.run(arguments, visit.states[number])
            visit.resumed[number] = end
            visit.results[number] = facts(after) if end.code == 0 else {}
        visit.seconds = cpu_seconds() - started
        return visit

    def _begin_from(self, tree: Tree) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        write_tree(tree, self.work)


def no_needless_work() -> None:
    """Leave out what takes half of the time, or starts threads, and writes no file."""
    import tqdm

    from falcon_lab.report import plots

    tqdm.tqdm.monitor_interval = 0
    plots.draw = lambda *_: "<svg></svg>"


def serve(root: Path) -> None:
    """Answer requests until there are no more: a method of ``Here`` and its arguments."""
    here = Here(root)
    no_needless_work()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores both
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    while True:
        try:
            name, arguments = pickle.load(requests)
        except EOFError:
            return
        try:
            answer = getattr(here, name)(*arguments)
        except Exception:
            answer = RuntimeError(traceback.format_exc())
        pickle.dump(answer, answers)
        answers.flush()


class Server:
    """A server in a process of its own."""

    def __init__(self, root: Path, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(root)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def ask(*arguments: Any) -> Any:
            assert self.process.stdin is not None
            assert self.process.stdout is not None
            pickle.dump((name, arguments), self.process.stdin)
            self.process.stdin.flush()
            answer = pickle.load(self.process.stdout)
            if isinstance(answer, RuntimeError):
                raise answer
            return answer

        return ask

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)


@contextlib.contextmanager
def server(root: Path, environment: dict[str, str]) -> Iterator[Server]:
    """A server for as long as the block lasts."""
    started = Server(root, environment)
    try:
        yield started
    finally:
        started.close()


if __name__ == "__main__":
    sys.modules["interruptions"] = sys.modules["__main__"]  # what is pickled has one name
    for each in (End, Visit):
        each.__module__ = "interruptions"
    serve(Path(sys.argv[1]))
