"""What a process started by `launch` runs first: tie its life to its parent's, take its cores, become the command.

Run by path, so that it is there at once: importing the package would import PyTorch.

    start.py DEATH_SIGNAL CPUS EXITS COMMAND [ARGUMENT ...]

CPUS lists the cpus of every rank, `0,1:2,3` for two ranks, or is empty. EXITS, if not empty, is a file to which a rank
that ends badly adds a line with its number and exit code: `mpiexec` does not tell which rank it was.
"""

import ctypes
import os
import signal
import sys

_RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "RANK")
_PR_SET_PDEATHSIG = 1


def main(death_signal: str, cpus: str, exits: str, *command: str) -> None:
    rank = next((int(os.environ[name]) for name in _RANKS if name in os.environ), 0)
    die_with_parent(int(death_signal))
    if cpus:
        os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(":")[rank].split(",")})
    if exits:
        child = os.fork()
        if child:
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            code = code if code >= 0 else 128 - code
            if code:
                with open(exits, "a") as file:
                    file.write(f"{rank} {code}\n")
            sys.exit(code)
        die_with_parent(int(death_signal))
    for number in (signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)  # what Python has set would be inherited by the command
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"halocline: cannot start `{' '.join(command)}`: {error.strerror}.", file=sys.stderr)
        sys.exit(127)


def die_with_parent(number: int) -> None:
    """Have the kernel send signal `number` to this process when its parent ends; it stays so in the command."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


if __name__ == "__main__":
    main(*sys.argv[1:])
