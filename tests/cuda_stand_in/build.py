"""Makes a virtual environment with the CUDA build of torch, over a stand-in for CUDA: see README.md.

    python tests/cuda_stand_in/build.py FOLDER

torch is installed without the libraries that it links to. One library takes the names of all of them: `runtime.cpp`,
and for each function that is not there one that aborts with its name.
"""

import re
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).parent
TORCH = "torch==2.11.0"
HEADERS = ["nvidia-cuda-runtime==13.0.96", "nvidia-cuda-crt==13.0.88"]
# Of torch and transformers, whose own dependencies are left out.
NEEDED = ["filelock", "typing-extensions", "setuptools<82", "sympy", "networkx", "jinja2", "fsspec"]
NEEDED += ["numpy", "scipy", "psutil", "nvidia-ml-py", "typer", "rich", "matplotlib", "ninja"]
NEEDED += ["pytest", "pytest-timeout", "hypothesis", "numba"]
NEEDED += ["huggingface_hub", "safetensors", "tokenizers", "regex", "pyyaml", "packaging", "tqdm", "requests"]
APART = ["transformers", "accelerate"]

OURS = re.compile(r"^(__cuda|cu[A-Zdbfrsp]|nccl|nvrtc|nvJitLink|nvshmem|nvtx)")
LIBRARIES = re.compile(r"NEEDED.*\[(lib(?:cu|nccl|nvrtc|nvshmem)[^\]]*)\]")


def main(folder: Path) -> None:
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    pip = [python, "-m", "pip", "install", "-q"]
    constraints = folder / "constraints.txt"
    lines = (HERE.parents[1] / "constraints.txt").read_text().splitlines()
    constraints.write_text("\n".join(line for line in lines if not line.startswith("torch==")))
    run(*pip, "--no-deps", TORCH)
    run(*pip, "-c", constraints, *NEEDED)
    run(*pip, "--no-deps", "-c", constraints, *APART)
    run(*pip, "--no-deps", "--target", folder / "headers", *HEADERS)

    (packages,) = (folder / "lib").glob("python*/site-packages")
    torch, here = packages / "torch", packages / "cuda_stand_in"
    here.mkdir(exist_ok=True)
    (here / "__init__.py").write_text((HERE / "loaded.py").read_text())
    about = packages / "cuda_stand_in-0.dist-info"  # torch calls this when it has been imported
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: cuda-stand-in\nVersion: 0\n")
    (about / "entry_points.txt").write_text("[torch.backends]\ncuda_stand_in = cuda_stand_in:load\n")

    includes = [f"-I{folder}/headers/nvidia/cu13/include"]
    make_runtime(folder, torch, includes)
    includes += [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
    libraries = ["-lc10", "-lc10_cuda", "-ltorch_cpu", "-ltorch_cuda"]
    compile_(
        HERE / "kernels.cpp", *includes, "-shared", f"-L{torch}/lib", "-Wl,--no-as-needed",
        "-Wl,--allow-shlib-undefined", *libraries, "-o", here / "kernels.so",
    )  # fmt: skip


def make_runtime(folder: Path, torch: Path, includes: list[str]) -> None:
    """The library, with the versions that torch's libraries want of symbols, under the names that they ask for."""
    build = folder / "build"
    build.mkdir(exist_ok=True)
    compile_(HERE / "runtime.cpp", *includes, "-c", "-o", build / "runtime.o")
    there = {line.split()[-1] for line in run("nm", "--defined-only", build / "runtime.o").splitlines()}

    versions: dict[str, set[str]] = {}  # symbols by version; "" has none
    names = {"libnvidia-ml.so.1"}
    for library in sorted((torch / "lib").glob("*.so")):
        names.update(LIBRARIES.findall(run("readelf", "-d", library)))
        for line in run("nm", "-D", "--undefined-only", library).splitlines():
            symbol, _, version = line.split()[-1].partition("@")
            if OURS.match(symbol):
                versions.setdefault(version.lstrip("@"), set()).add(symbol)
    names -= {library.name for library in (torch / "lib").glob("*.so")}

    missing = sorted(set().union(*versions.values()) - there)
    lines = ["void stand_in_missing(const char*);"]
    for name in missing:
        # The profiler does without the device where CUPTI fails.
        does = "return 1" if name.startswith("cupti") else f'stand_in_missing("{name}")'
        lines.append(f"int {name}(void) {{ {does}; }}")
    (build / "stubs.c").write_text("\n".join(lines))
    script = [
        f"{version} {{ global: {' '.join(f'{symbol};' for symbol in sorted(symbols))} }};"
        for version, symbols in sorted(versions.items())
        if version
    ]
    script.append("stand_in { global: cu*; nccl*; nv*; stand_in_missing; local: *; };")
    (build / "versions.map").write_text("\n".join(script))
    run("cc", "-fPIC", "-w", "-c", build / "stubs.c", "-o", build / "stubs.o")
    # pynvml and torch open NVML by its bare name, which is found once it is loaded.
    library = torch.parent / "cuda_stand_in" / "libnvidia-ml.so.1"
    run(
        "c++", "-shared", build / "runtime.o", build / "stubs.o", f"-Wl,--version-script={build / 'versions.map'}",
        "-Wl,-soname,libnvidia-ml.so.1", "-o", library,
    )  # fmt: skip
    asked = torch.parent / "nvidia" / "cu13" / "lib"  # where torch's libraries look
    asked.mkdir(parents=True, exist_ok=True)
    for name in names:
        (asked / name).unlink(missing_ok=True)
        (asked / name).symlink_to(library)


def compile_(source: Path, *arguments: object) -> None:
    run("c++", "-std=c++20", "-O2", "-fPIC", "-Wall", "-Wno-unused-function", source, *arguments)


def run(*command: object) -> str:
    return subprocess.run(
        [str(part) for part in command], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
