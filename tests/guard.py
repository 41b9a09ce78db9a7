"""Keeps the Python code of a graded program from reading the solution and from reaching out of its process.

An audit hook (PEP 578) sees every file that Python opens and every program that it starts, and can't be
removed. It is no sandbox: code that calls C functions by hand gets round it. Where that is to be feared,
grade in a container that has no solution.
"""

import os
import resource
import sys
import tempfile
from pathlib import Path

import torch

READ = {"open", "os.listdir", "os.scandir"}
WRITE = {"os.chmod", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.truncate"}
REFUSED = {"ctypes.dlopen", "os.exec", "os.fork", "os.forkpty", "os.kill", "os.killpg", "os.posix_spawn",
           "os.spawn", "os.system", "socket.connect", "subprocess.Popen"}

MAX_BYTES = 2**28  # of a file


def install(root):
    """From now on this process may read what is below root and Python's own files, and write temporary ones,
    none of them endlessly. Other files, other programs and the network are refused: PermissionError."""
    realpath, readlink, is_path = os.path.realpath, os.readlink, (str, bytes)
    write_flags = os.O_WRONLY | os.O_RDWR | os.O_CREAT
    writable = [realpath(tempfile.gettempdir()), "/dev"]
    python = [sys.prefix, sys.base_prefix, Path(torch.__file__).parents[1]]
    readable = [*writable, *map(realpath, [root, *python])]

    def check(event, arguments):
        if event in REFUSED:
            raise PermissionError(f"not in a graded program: {event}")
        if event in READ:
            paths, writes = arguments[:1], event == "open" and (arguments[2] or 0) & write_flags
        elif event in WRITE:
            paths, writes = arguments, True
        else:
            return
        folders = writable if writes else readable
        if event in ("os.remove", "os.rmdir") and arguments[1] != -1:  # as shutil.rmtree does it
            paths = [os.path.join(readlink(f"/proc/self/fd/{arguments[1]}"), os.fsdecode(paths[0]))]
        for path in paths:
            if isinstance(path, is_path):
                path = realpath(os.fsdecode(path))
                if not any(f"{path}/".startswith(f"{folder}/") for folder in folders):
                    raise PermissionError(f"not in a graded program: {event} {path}")

    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_BYTES, MAX_BYTES))
    sys.addaudithook(check)
