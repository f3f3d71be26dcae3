"""Every test file in a process of its own, some at a time:

    python -m tests.each_file FILE ... [--jobs N] [--pytest ARGUMENTS]

The virtual device, its link and autograd's threads are the process's own. Processes are forked off one that has
imported `preloaded` and done nothing else: to import that for each file would take seconds each time. Prints what
pytest says of a file when that has ended; exits with 1 if any has not passed.
"""

import argparse
import multiprocessing
import os
import shlex
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import IO

import pytest

# Files share the processors already: threads of OpenMP that wait for each other would take a third of the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["tests.preloaded"])
# Of plugins, which are there: nobody wants their assertions rewritten.
_PRELOADED = ("-W", "ignore:Module already imported so cannot be rewritten:pytest.PytestAssertRewriteWarning")


def _pytest(file: str, arguments: Sequence[str], output: str) -> None:
    """In the file's process. ``output``: path of a file for all that is printed."""
    with open(output, "wb") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    raise SystemExit(int(pytest.main([file, *_PRELOADED, *arguments])))


def _run(arguments: Sequence[str], file: str) -> tuple[str, int, str]:
    """The file, the exit code of its process, and what it printed."""
    output: IO[str]
    with tempfile.NamedTemporaryFile("r", errors="replace") as output:
        process = _forks.Process(target=_pytest, args=(file, arguments, output.name))
        process.start()
        process.join()
        assert process.exitcode is not None
        return file, process.exitcode, output.read()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--pytest", default="", metavar="ARGUMENTS", help="for pytest, in one word")
    options = parser.parse_args()
    arguments = shlex.split(options.pytest)
    passed = True
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = [pool.submit(partial(_run, arguments), file) for file in options.files]
        for run in as_completed(runs):
            file, code, output = run.result()
            # 5: of this file no test was selected.
            passed = passed and code in (0, 5)
            print(file, output, sep="\n", flush=True)
    raise SystemExit(0 if passed else 1)


if __name__ == "__main__":
    main()
