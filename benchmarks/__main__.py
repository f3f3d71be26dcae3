"""Run benchmarks by name, each in a process of its own; without names, all of them.

python -m benchmarks                       # all but those that take half an hour and more
python -m benchmarks overhead planning     # these two
python -m benchmarks sweep --toy           # one name, with that benchmark's own arguments
"""

import subprocess
import sys

# By name only, because they take half an hour and more, or want libraries of others: `LONG`.
NAMES = (
    "overhead",
    "activations",
    "activations_models",
    "prefetch",
    "accumulation",
    "host_step",
    "host_bandwidth",
    "bytes",
    "planning",
    "sweep",
    "fits",
    "lengths",
    "simulation",
    "networks",
    "reorder",
)
LONG = ("allocators", "footprint", "pool", "swap", "zoo")
MODULES = {"bytes": "benchmarks.bytes_moved"}  # a module called bytes would hide the built-in


def main() -> int:
    arguments = sys.argv[1:]
    if arguments[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    names = []
    while arguments and not arguments[0].startswith("-"):
        names.append(arguments.pop(0))
    unknown = sorted(set(names) - {*NAMES, *LONG})
    if unknown:
        print(f"no benchmark {', '.join(unknown)}: choose from {', '.join((*NAMES, *LONG))}", file=sys.stderr)
        return 2
    failed = []
    for name in names or NAMES:
        print(f"== {name}", flush=True)
        # A process of its own: peaks, links and patched functions of one must not be seen by the next.
        module = MODULES.get(name, f"benchmarks.{name}")
        if subprocess.run([sys.executable, "-m", module, *arguments], check=False).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
