"""Carries a change of a file in one step into the same file of all later steps.

    edit step01_single_gpu/model.py, then
    python tools/carry.py step01_single_gpu/model.py
    python tools/carry.py step01_single_gpu/model.py --base HEAD~1     a change that is committed already

Each later file is merged three-way with the change (git merge-file). Files that were identical stay so. A
conflict is left in the file, between git's markers, and makes the exit status 1. A later file that has
uncommitted changes of its own is left alone if it doesn't merge cleanly.
"""

import argparse
import subprocess
import tempfile
from pathlib import Path

from steps import folders


def git(root, *arguments):
    """Runs git in the folder root. Returns its output, bytes, or None if it fails."""
    run = subprocess.run(["git", "-C", root, *arguments], capture_output=True)
    return run.stdout if run.returncode == 0 else None


def merge(ours, base, theirs, labels):
    """Merges two changes of one base. Returns (text, whether there was no conflict)."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("ours", "base", "theirs")]
        for path, text in zip(paths, (ours, base, theirs)):
            path.write_bytes(text)
        command = ["git", "merge-file", "-p"]
        for label in labels:
            command += ["-L", label]
        run = subprocess.run([*command, *paths], capture_output=True)
    if run.returncode > 127:
        raise ValueError(f"git merge-file: {run.stderr.decode().strip()}")
    return run.stdout, run.returncode == 0


def carry(file, revision="HEAD", dry_run=False):
    """Yields (folder's name, what was done: a key of WORDS) of each later step.

    Raises ValueError if there is nothing to carry.
    """
    file = Path(file).resolve()
    root = next((folder.parent for folder in file.parents if folder in folders(folder.parent).values()), None)
    if root is None or not file.is_file():
        raise ValueError(f"{file} is no file of a step")
    step = file.relative_to(root).parts[0]
    name = file.relative_to(root / step)
    base, change = git(root, "show", f"{revision}:./{step}/{name.as_posix()}"), file.read_bytes()
    if base is None:
        raise ValueError(f"{step}/{name} isn't in {revision}")
    if base == change:
        raise ValueError(f"{step}/{name} is as in {revision}: nothing to carry")
    merged = {base: (change, True)}  # what became of each text that was met, and whether without a conflict
    for folder in (folder for folder in folders(root).values() if folder.name > step):
        later = folder / name
        if not later.is_file():
            yield folder.name, "no such file"
            continue
        old = later.read_bytes()
        same = old in merged
        if not same:
            merged[old] = merge(old, base, change, (folder.name, f"{step} before", f"{step} after"))
        new, clean = merged[old]
        if not clean and git(root, "status", "--porcelain", "--", later):
            yield folder.name, "left alone"
            continue
        if new == old:
            yield folder.name, "has it"
            continue
        if not dry_run:
            later.write_bytes(new)
        yield folder.name, "conflict" if not clean else "same" if same else "merged"


WORDS = {
    "same": "changed as an earlier step that it was identical to", "merged": "merged",
    "has it": "has the change already",
    "no such file": "has no such file", "conflict": "CONFLICT, to be solved by hand",
    "left alone": "CONFLICT, left alone: it has uncommitted changes of its own",
}


def main(argv=None):
    parser = argparse.ArgumentParser("carry.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="the file that was changed")
    parser.add_argument("--base", default="HEAD", metavar="REV", help="what it was before; default: HEAD")
    parser.add_argument("--dry_run", action="store_true", help="say what would happen, change nothing")
    args = parser.parse_args(argv)
    conflicts = 0
    try:
        for folder, done in carry(args.file, args.base, args.dry_run):
            print(f"{folder:22}  {WORDS[done]}")
            conflicts += done in ("conflict", "left alone")
    except (ValueError, OSError) as error:
        parser.exit(2, f"carry.py: error: {error}\n")
    parser.exit(1 if conflicts else 0)


if __name__ == "__main__":
    main()
