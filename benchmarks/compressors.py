"""Bytes of files that are compressed alone, by pathspace, xz, bzip2 and, where they are installed, zpaq and paq8px.

A name may end with a colon and how many bytes of the file to take; a file that ends with .gz is
unpacked first. Seconds are those of the processor, one way; pathspace's file is unpacked again and
compared. paq8px takes four minutes for a megabyte: leave it off the PATH to do without.

    python benchmarks/compressors.py OpenSSH_2k.log text8_first6800000.txt.gz:100000
    python benchmarks/compressors.py *.log --json
"""

from __future__ import annotations

import argparse
import bz2
import gzip
import json
import lzma
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from threadpoolctl import threadpool_limits

from pathspace import sequences


def read(name: str) -> bytes:
    """Return the bytes that a name on the command line stands for."""
    path, colon, size = name.rpartition(":")
    if not colon or not size.isdigit():
        path, size = name, ""
    data = Path(path).read_bytes()
    if path.endswith(".gz"):
        data = gzip.decompress(data)
    return data[: int(size)] if size else data


def alone(data: bytes) -> bytes:
    """Return what `pathspace sequence compress` writes, after unpacking it once."""
    packed = sequences.compress(None, data)
    if sequences.decompress(None, packed) != data:
        raise AssertionError("the file did not come back")
    return packed


def zpaq(data: bytes) -> bytes:
    """Return the archive that `zpaq -m5` makes of the data."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "file").write_bytes(data)
        command = ["zpaq", "add", "archive.zpaq", "file", "-m5", "-t1"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        return (Path(folder) / "archive.zpaq").read_bytes()


def paq8px(data: bytes) -> bytes:
    """Return the archive that `paq8px -6` makes of the data, with a gigabyte of memory."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "file").write_bytes(data)
        command = ["paq8px", "-6", "file", "archive"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        return (Path(folder) / "archive").read_bytes()


def compressors() -> dict[str, Callable[[bytes], bytes]]:
    """Return the compressors of this machine by name."""
    found: dict[str, Callable[[bytes], bytes]] = {
        "bzip2": bz2.compress,
        "xz": lambda data: lzma.compress(data, preset=9 | lzma.PRESET_EXTREME),
    }
    if shutil.which("zpaq"):
        found["zpaq"] = zpaq
    if shutil.which("paq8px"):
        found["paq8px"] = paq8px
    return found | {"pathspace": alone}


def seconds_used() -> float:
    """Return the processor time of this process and of those that it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def measure(name: str) -> dict[str, Any]:
    """Compress a file by each compressor; return its row."""
    data = read(name)
    row: dict[str, Any] = {"file": name, "bytes": len(data)}
    for label, compress in compressors().items():
        begun = seconds_used()
        row[label] = len(compress(data))
        row[f"{label}_seconds"] = round(seconds_used() - begun, 2)
    # it was unpacked, too, which takes as long
    row["pathspace_seconds"] = round(row["pathspace_seconds"] / 2, 2)
    for label in ("zpaq", "paq8px"):
        if label in row:
            row[f"beside_{label}"] = row["pathspace"] / row[label] - 1
    return row


def main() -> None:
    """Print a row for each file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", help="files, or FILE:BYTES for the beginning of one")
    parser.add_argument("--json", action="store_true", help="print a JSON line for each file")
    arguments = parser.parse_args()
    with threadpool_limits(1):
        # compilation is no part of what a file costs
        alone(b"once before the clock starts\n" * 9)
        for name in arguments.files:
            row = measure(name)
            if arguments.json:
                print(json.dumps(row), flush=True)
                continue
            print(f"{name}, {row['bytes']:,} bytes")
            for label in compressors():
                speed = row["bytes"] / 1e6 / max(row[f"{label}_seconds"], 0.01)
                print(f"  {label:10}{row[label]:12,}{speed:9.2f} MB/s", flush=True)


if __name__ == "__main__":
    main()
