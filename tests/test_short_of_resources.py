"""System calls that fail at every step of making a group, and low limits: one clear error everywhere, nothing lost."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from scripts import Ended, assert_codes, run_script

pytestmark = pytest.mark.slow  # each test starts interpreters of its own

SHIM = Path(__file__).parent / "shim" / "failing_calls.c"

# call, errno's name, what the message says; None: pycoll does without it.
FAULTS = {
    "memfd_create": ("EMFILE", "ulimit -n"),
    "fallocate": ("ENOSPC", "raise the memory limit of the container"),
    "mmap": ("ENOMEM", "ulimit -v"),
    "fcntl": ("EPERM", "seal"),
    "socket": ("EMFILE", "ulimit -n"),
    "bind": ("EADDRINUSE", "cannot listen"),
    "listen": ("ENOBUFS", "cannot listen"),
    "connect": ("ECONNREFUSED", "cannot be reached"),
    "accept4": ("EMFILE", "ulimit -n"),
    "sendmsg": ("EPIPE", "cannot pass shared memory"),
    "recvmsg": ("ECONNRESET", "before it passed its shared memory"),
    "getsockopt": ("EINVAL", "cannot ask who connected"),
    "pidfd_open": ("EMFILE", None),
}

SCRIPT = """
    import ctypes, errno, gc
    import pycoll.backend; pycoll.backend.extension()
    shim, store = ctypes.CDLL(None), os.environ["STORE"]
    def meet(name):
        open(f"{store}.{name}.{rank}", "w").close()
        while not os.path.exists(f"{store}.{name}.{1 - rank}"): time.sleep(0.01)
    def attempt(name):
        meet(name)
        os.environ["STORE"] = f"{store}.{name}"
        return raised(lambda: init(timeout=20))
    def use_and_leave():
        x = torch.arange(100_003.0) * (rank + 1)
        dist.all_reduce(x)
        assert torch.equal(x, torch.arange(100_003.0) * 3)
        dist.destroy_process_group()
        gc.collect()
    def held():
        maps = sum("pycoll" in line for line in open("/proc/self/maps"))
        return len(os.listdir("/proc/self/fd")), maps
    attempt("first"); use_and_leave()
    before = held()
    for call, error in FAULTS:
        for victim in (0, 1):
            for nth in (1, 2):
                name = f"{call}.{victim}.{nth}"
                if rank == victim: shim.fail_call(call.encode(), nth, getattr(errno, error))
                text, took = attempt(name)
                failed = shim.failed_calls() if rank == victim else ""
                shim.fail_call(b"", 0, 0)
                if text == "nothing was raised": use_and_leave()
                gc.collect()
                assert held() == before, (name, held(), before)
                say(f"{name}|{failed}|{took:.1f}|{text}")
    attempt("last"); use_and_leave()
    assert held() == before
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library = tmp_path_factory.mktemp("shim") / "failing_calls.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", str(SHIM), "-ldl"]
    subprocess.run([*command, "-o", str(library)], check=True)
    return str(library)


def outcomes(ended: list[Ended]) -> dict[str, list[list[str]]]:
    """For each attempt what both ranks said: whether the call failed there, seconds, error."""
    said: dict[str, list[list[str]]] = {}
    for rank in ended:
        for line in rank.out.splitlines():
            name, *rest = line.split("|", 3)
            said.setdefault(name, []).append(rest)
    return said


def test_every_call_of_making_a_group_may_fail(shim: str, tmp_path: Path) -> None:
    """Others hang, or leave the other ranks waiting for half an hour, or lose a descriptor at each attempt."""
    faults = [(call, error) for call, (error, _) in FAULTS.items()]
    script = SCRIPT.replace("FAULTS", repr(faults))
    ended = run_script(script, 2, tmp_path, timeout=240, LD_PRELOAD=shim)
    assert_codes(ended, 0, 0)
    hit = set()
    for name, ranks in outcomes(ended).items():
        call, victim, _ = name.split(".")
        failed, took, text = ranks[int(victim)]
        _, others_took, others_text = ranks[1 - int(victim)]
        if failed == "0":  # never called that often
            assert text == others_text == "nothing was raised", (name, ranks)
            continue
        hit.add(call)
        says = FAULTS[call][1]
        if text != "nothing was raised":
            assert says is not None, (name, ranks)
            assert says in text, (name, ranks)
            assert f"rank {victim}: " in others_text, (name, ranks)
            assert max(float(took), float(others_took)) < 10, (name, ranks)
        else:
            assert others_text == text, (name, ranks)
    assert hit == set(FAULTS)


def test_no_thread_can_be_started(shim: str, tmp_path: Path) -> None:
    """Others end in std::terminate, or hold on to a tensor that is gone."""
    script = """
        import ctypes, errno
        init()
        x = torch.ones(1_000_003)
        if rank == 0: ctypes.CDLL(None).fail_call(b"pthread_create", 1, errno.EAGAIN)
        text, _ = raised(lambda: dist.all_reduce(x, async_op=True).wait())
        say(text)
        assert ("ulimit -u" in text) if rank == 0 else ("rank 0" in text), text
        again, _ = raised(lambda: dist.all_reduce(x))
        assert "destroy" in again or "rank 0" in again, again
    """
    assert_codes(run_script(script, 2, tmp_path, LD_PRELOAD=shim), 0, 0)


@pytest.mark.parametrize(
    ("limit", "free", "remedy"),
    [
        ("RLIMIT_AS", 8 << 30, "PYCOLL_SEGMENT_BYTES"),
        ("RLIMIT_FSIZE", 1 << 20, "ulimit -f"),
    ],
)
def test_a_low_limit_is_named(limit: str, free: int, remedy: str, tmp_path: Path) -> None:
    """Others die of a signal when memory that they have been promised is not there."""
    script = f"""
        import resource
        used = 0
        if {limit!r} == "RLIMIT_AS":
            used = 1024 * next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmSize"))
        resource.setrlimit(resource.{limit}, (used + {free}, resource.RLIM_INFINITY))
        def use():
            init(timeout=20)
            dist.all_reduce(torch.ones(16_000_057))
        text, took = raised(use)
        say(text)
        assert {remedy!r} in text and took < 15, (took, text)
    """
    # Otherwise such a tensor needs no memory beside its own.
    assert_codes(run_script(script, 2, tmp_path, PYCOLL_MEMORY_PATH="staged"), 0, 0)


def test_a_full_dev_shm_does_not_matter(tmp_path: Path) -> None:
    """Containers have 64 MiB of it, or none; others fail there, or die of SIGBUS later."""
    mount = "mount -t tmpfs -o size=4k tiny /dev/shm"
    namespace = ["unshare", "--mount", "sh", "-c"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*namespace, mount], check=False, capture_output=True).returncode
    ):
        pytest.skip("needs the right to mount")
    script = """
        if "tiny" not in open("/proc/mounts").read():
            os.execvp("unshare", ["unshare", "--mount", "sh", "-c", MOUNT, "sh", sys.executable, *sys.orig_argv[1:]])
        init()
        x = torch.ones(16_000_057)
        dist.all_reduce(x)
        assert (x == 2).all()
        say(os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_bsize)
    """
    ended = run_script(script.replace("MOUNT", repr(mount + ' && exec "$@"')), 2, tmp_path)
    assert_codes(ended, 0, 0)
    assert [rank.out for rank in ended] == ["4096\n"] * 2
