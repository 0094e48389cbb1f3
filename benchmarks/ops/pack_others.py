# SPDX-License-Identifier: Apache-2.0
"""xformers and FlashInfer in one archive, for `benchmarks.ops.attention` on a GPU machine offline.

    python -m benchmarks.ops.pack_others .gpu/others.tar.xz [--no-kernels] [--cuda-home DIR]

pip downloads the wheels for Python 3.12 on x86-64. Left out is what the arms do not use: xformers'
extension (its tree attention is Triton; the extension wants CUDA 12's runtime), and of FlashInfer
all sources but those that its paged prefill and its packing of masks are compiled from. Both are
compiled here for sm_90a (nvcc 13, g++, ninja; a driver is not needed) and put where FlashInfer
looks first, so that nothing is compiled on the GPU machine. With `--no-kernels`, or where they do
not load, FlashInfer compiles them there from the sources in the archive.

Unpack into a folder on PYTHONPATH beside PyTorch 2.11, Triton 3.6 and the small packages that
FlashInfer imports: nvidia-ml-py, requests, packaging, filelock, tqdm, jinja2, cuda-bindings.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

WHEELS = ("xformers==0.0.35", "flashinfer-python==0.7.0.post1", "apache-tvm-ffi==0.1.11")
TO_COMPILE = ("apache-tvm-ffi==0.1.11", "nvidia-ml-py")
"""What FlashInfer needs in the process that compiles its kernels, beside what comes with vLLM."""
PLATFORMS = ("2_28", "2_27", "2_24", "2_17")
ARCHITECTURE = "9.0a"
XFORMERS_DROPPED = ("xformers/_C.so",)
FLASHINFER_KEPT = (
    *("include", "cccl/cub", "cccl/libcudacxx", "cccl/thrust", "spdlog/include"),
    # Files of the folder itself: sources in folders of it belong to other kernels.
    "csrc/*",
)
"""Of `flashinfer/data`."""
COMPILE = """
import shutil, sys, torch
from flashinfer.jit import env
from flashinfer.jit.quantization import gen_quantization_module
from flashinfer.prefill import _gen_batch_prefill_primary_module
bf16 = torch.bfloat16
prefill = ("fa2", bf16, bf16, bf16, torch.int32, 256, 256, 0, False, False, False)
for spec in (gen_quantization_module(), _gen_batch_prefill_primary_module(*prefill)):
    spec.build()
    folder = env.FLASHINFER_AOT_DIR / spec.name
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(spec.jit_library_path, folder / f"{spec.name}.so")
    print(f"compiled {spec.name}", flush=True)
"""
"""The modules that a plan asks for: packing of masks; paged prefill, bfloat16, head dim 256."""


def download(folder: Path, *names: str, here: bool = False) -> None:
    """Unpack wheels by name into a folder: for Python 3.12, or for this interpreter."""
    flags = ["--quiet", "--no-deps", "--only-binary=:all:"]
    if not here:
        flags += ["--python-version", "3.12", "--implementation", "cp"]
        for number in PLATFORMS:
            flags += ["--platform", f"manylinux_{number}_x86_64"]
        flags += ["--platform", "manylinux2014_x86_64"]
    with tempfile.TemporaryDirectory() as wheels:
        command = (sys.executable, "-m", "pip", "download", *flags, "-d", wheels, *names)
        subprocess.run(command, check=True)
        for wheel in sorted(Path(wheels).glob("*.whl")):
            shutil.unpack_archive(wheel, folder, "zip")


def trim(site: Path) -> None:
    """Remove what the arms do not use from unpacked wheels."""
    for name in XFORMERS_DROPPED:
        (site / name).unlink(missing_ok=True)
    data = site / "flashinfer/data"
    kept = {path for pattern in FLASHINFER_KEPT for path in data.glob(pattern)}
    kept = {path for path in kept if path.is_file() or path.parent != data / "csrc"}
    above = {parent for path in kept for parent in path.parents}
    for path in sorted(data.rglob("*")):
        inside = path in kept or path in above or not kept.isdisjoint(path.parents)
        if inside or not path.exists():
            continue
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def compile_kernels(site: Path, work: Path, cuda_home: Path, jobs: int) -> None:
    """Compile FlashInfer's two modules with this interpreter and its PyTorch, of any version.

    What comes out is bound to neither. Raises CalledProcessError if a compiler fails.
    """
    tools, stub = work / "tools", work / "stub"
    download(tools, *TO_COMPILE, here=True)
    stub.mkdir(exist_ok=True)
    # A machine without a driver has no libcuda to link with.
    link = ("gcc", "-shared", "-x", "c", "/dev/null", "-Wl,-soname,libcuda.so.1")
    subprocess.run((*link, "-o", str(stub / "libcuda.so")), check=True)
    # The archive's tvm_ffi is for another Python, so only FlashInfer is imported from there.
    (work / "flashinfer").symlink_to(site / "flashinfer")
    env = os.environ | {
        "PYTHONPATH": f"{work}:{tools}",
        "CUDA_HOME": str(cuda_home),
        "FLASHINFER_WORKSPACE_BASE": str(work),
        "FLASHINFER_CUDA_ARCH_LIST": ARCHITECTURE,
        "FLASHINFER_EXTRA_LDFLAGS": f"-L{stub}",
        "MAX_JOBS": str(jobs),
    }
    subprocess.run((sys.executable, "-c", COMPILE), env=env, cwd=work, check=True)


def pack(site: Path, archive: Path) -> int:
    """Write the archive, in an order that does not change; returns its bytes."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:xz", preset=6) as tar:
        for path in sorted(path for path in site.rglob("*") if path.is_file()):
            if "__pycache__" not in path.parts:
                tar.add(path, str(path.relative_to(site)))
    return archive.stat().st_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("archive", type=Path)
    parser.add_argument("--no-kernels", action="store_true", help="compile on the GPU machine")
    parser.add_argument("--cuda-home", type=Path, default=Path("/usr/local/cuda"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pack-others-") as folder:
        work = Path(folder)
        site = work / "site"
        download(site, *WHEELS)
        trim(site)
        if not args.no_kernels:
            compile_kernels(site, work, args.cuda_home, args.jobs)
        print(f"{args.archive}: {pack(site, args.archive) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
