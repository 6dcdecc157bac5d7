#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The vllm-timings Authors
"""Edits the source of the vLLM that this Python would import, all files or none. Made by `vllm-timings patch export`.

  python vllm-timings-patch.py --check    says whether the edits fit or are made already, and writes nothing
  python vllm-timings-patch.py            makes them; once they are made it does nothing
  python vllm-timings-patch.py --revert   takes them out again, to the very same bytes as before

Run it before `vllm serve` starts. It needs nothing but Python's own library, and exits with 0 (done, or nothing to do),
1 (it refused or failed, and nothing is changed) or 2 (the command line is wrong).
"""

import argparse
import collections
import errno
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import stat
import sys
import time
import warnings

# What is edited. Each old side must be in its file exactly once, as whole lines; the new side takes its place.
SETS = []  # the sets go here
GATE = ""  # the gate goes here
CHOOSE = True  # choose the one set that fits, else apply all in order

GATE_MARK = b"@gate@"  # in SETS it stands for GATE, the environment variable that switches the patch on; "": always on
MARKER = b"# [vllm-timings]"
FOREIGN_MARKER = b"# [%s]" % b"patch_timings"  # of another script; in pieces, as this file may lie in the package too
JOURNAL, NEW, OLD = ".vllm-timings.journal", ".vllm-timings.new", ".vllm-timings.old"
STAGING, COMMITTING, DONE = "staging", "committing", "done"
PRISTINE, PATCHED, DRIFTED = "pristine", "patched", "drifted"
FORWARD, BACKWARD = "forward", "backward"
LOCK_WAIT = 60  # seconds for which another patcher at the same tree is waited for

Set = collections.namedtuple("Set", "name files")
File = collections.namedtuple("File", "path content anchors")  # content: of a file that is added, else None
Anchor = collections.namedtuple("Anchor", "old new")
Survey = collections.namedtuple("Survey", "raw set state gate states drifts")  # the last two: by path
Change = collections.namedtuple("Change", "path old new")  # None: the file is not there


class Refused(Exception):
    """Says why nothing was done."""


def load():
    """Returns SETS as bytes."""
    def text(lines):
        return "".join(lines).encode("utf-8")

    def file(f):
        content = text(f["content"]) if "content" in f else None
        return File(f["path"], content, [Anchor(text(a["old"]), text(a["new"])) for a in f.get("anchors", [])])

    return [Set(s["name"], [file(f) for f in s["files"]]) for s in SETS]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="only say whether the edits fit or are made")
    what.add_argument("--revert", action="store_true", help="take the edits out again")
    parser.add_argument("--vllm-dir", metavar="DIR", help="the package folder vllm; else the one this Python imports")
    parser.add_argument("--force", action="store_true", help="also while a process has the package loaded")
    args = parser.parse_args()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.reconfigure(errors="backslashreplace")
    try:
        tree = Tree(find() if args.vllm_dir is None else args.vllm_dir)
        if args.check:
            tree.check()
        else:
            tree.run(BACKWARD if args.revert else FORWARD, args.force)
    except (Refused, OSError) as e:
        sys.exit("vllm-timings-patch: " + explain(e))
    except KeyboardInterrupt:
        sys.exit("vllm-timings-patch: interrupted")


# --- which vllm -------------------------------------------------------------------------------------------------------

def find():
    """Returns the package folder that this Python would import, without importing it: that may take a GPU."""
    if sys.path and not sys.flags.isolated and not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # this script's own folder, which the command `vllm` does not look into
    try:
        spec = importlib.util.find_spec("vllm")
    except (ImportError, ValueError) as e:
        raise Refused(f"{sys.executable} cannot look for vllm: {e}{elsewhere()}")
    if spec is None:
        raise Refused(f"{sys.executable} has no vllm installed{elsewhere()}")
    if not spec.origin or os.path.basename(spec.origin) != "__init__.py":
        where = ", ".join(spec.submodule_search_locations or [spec.origin or "nowhere"])
        raise Refused(f"{sys.executable} would not import vLLM but a folder or file that happens to be called so: "
                      f"{where}{elsewhere()}")
    if not os.path.isfile(spec.origin):
        raise Refused(f"{sys.executable} would import vllm from {spec.origin}, which is no file that can be edited"
                      f"{elsewhere()}")
    found = os.path.dirname(os.path.abspath(spec.origin))
    named = set()
    for folder in [*sys.path, os.getcwd()]:
        other = os.path.join(os.path.abspath(folder), "vllm")
        if not os.path.isfile(os.path.join(other, "__init__.py")) or os.path.samefile(other, found):
            continue
        if other not in named:
            named.add(other)
            print(f"vllm-timings-patch: there is another vLLM at {other}, which {sys.executable} does not import",
                  file=sys.stderr)
    return found


def elsewhere():
    """Names the Python of the command `vllm`, where that is another one."""
    script = shutil.which("vllm")
    try:
        with open(script or os.devnull, "rb") as f:
            interpreter = re.fullmatch(rb"#!(/\S+)\s*", f.readline(4096))
    except OSError:
        interpreter = None
    if interpreter and os.fsdecode(interpreter[1]) != sys.executable:
        return f"; the command {script} has another one: run this with {os.fsdecode(interpreter[1])}"
    return "; run this with the Python that serves, or name the package folder with --vllm-dir"


# --- anchors ----------------------------------------------------------------------------------------------------------

def ends(anchor, content):
    """Adapts an anchor to a file's line ends. A file that mixes them matches as it is or not at all."""
    crlf = content.count(b"\r\n")
    if crlf == 0 or crlf != content.count(b"\n"):
        return anchor
    return Anchor(anchor.old.replace(b"\n", b"\r\n"), anchor.new.replace(b"\n", b"\r\n"))


def occurrences(content, text, at_end):
    """Returns the offsets at which text stands as whole lines, or just at the end of the file."""
    at, start = [], content.find(text)
    while start >= 0:
        end = start + len(text)
        begins = start == 0 or content[start - 1:start] == b"\n"
        if begins and (end == len(content) or text.endswith(b"\n") and not at_end):
            at.append(start)
        start = content.find(text, start + 1)
    return at


def outside(inner, inner_len, outer, outer_len):
    """Counts the inner occurrences that are not wholly within an outer one."""
    return sum(not (inner_len < outer_len and any(o <= i and i + inner_len <= o + outer_len for o in outer))
               for i in inner)


def locate(anchor, content):
    """Says where an anchor stands: state, offset, why it drifted. When one side contains the other, the inner
    one does not count inside the outer one."""
    at_end = not (anchor.old.endswith(b"\n") and anchor.new.endswith(b"\n"))
    old, new = (occurrences(content, side, at_end) for side in anchor)
    old_left = outside(old, len(anchor.old), new, len(anchor.new))
    new_left = outside(new, len(anchor.new), old, len(anchor.old))
    if (old_left, new_left) == (1, 0):
        return PRISTINE, old[0], ""
    if (old_left, new_left) == (0, 1):
        return PATCHED, new[0], ""
    if (old_left, new_left) == (0, 0):
        return DRIFTED, -1, "the lines to replace are not there"
    if old_left and new_left:
        return DRIFTED, -1, "both the lines to replace and those to put there are there"
    if old_left:
        return DRIFTED, -1, f"the lines to replace are there {old_left} times, not once"
    return DRIFTED, -1, f"the lines to put there are there {new_left} times, not once"


def nearest(anchor, content):
    """Says at which line most of an anchor's old lines stand, and what the first of them is that does not."""
    lines = [line.strip() for line in content.split(b"\n")]
    old = anchor.old[:-1] if anchor.old.endswith(b"\n") else anchor.old
    want = [line.strip() for line in old.split(b"\n")]
    first = next(line for line in want if line)

    def same(i, k):
        return i + k < len(lines) and lines[i + k] == want[k]

    scores = [sum(map(likeness, lines[i:], want)) for i in range(len(lines))]
    if max(scores) == 0:
        return f"; no line of it is, such as {quoted(first)}"
    at = scores.index(max(scores))
    for k, wanted in enumerate(want):
        if wanted and not same(at, k):
            at = min(at + k, len(lines) - 1)
            break
    else:
        wanted = first
    where = f"; nearest is line {at + 1}, {quoted(lines[at])}"
    return where if lines[at] == wanted else f"{where} where {quoted(wanted)} should be"


def likeness(line, want):
    """Says how much of what is wanted a line begins with: twice its length for all of it, 0 for less than half."""
    n = len(os.path.commonprefix([line, want]))
    if line == want:
        return 2 * n
    return n if 2 * n >= len(want) else 0


def quoted(text):
    return json.dumps(text.decode("utf-8", "backslashreplace"), ensure_ascii=False)


def replace(file, content, way):
    """Returns the file with every anchor replaced."""
    if file.content is not None:
        return file.content if way == FORWARD else None
    edits = []
    for i, anchor in enumerate(file.anchors):
        old, new = ends(anchor, content)
        state, at, reason = locate(Anchor(old, new), content)
        if state != (PRISTINE if way == FORWARD else PATCHED):
            raise Refused(f"anchor {i + 1} is {state}: {reason}")
        edits.append((at, old, new) if way == FORWARD else (at, new, old))
    out, start = [], 0
    for at, old, new in sorted(edits, key=lambda e: e[0]):
        if at < start:
            raise Refused("two anchors stand on the same line")
        out += [content[start:at], new]
        start = at + len(old)
    return b"".join(out) + content[start:]


def turn_file(file, content, way):
    """Is replace, and makes sure that the way back from there leads to the very same bytes."""
    turned = replace(file, content, way)
    try:
        back = replace(file, turned, BACKWARD if way == FORWARD else FORWARD)
    except Refused:
        back = turned
    if back != content:
        raise Refused("its anchors get in each other's way: what they leave could not be taken back exactly")
    return turned


# --- sets -------------------------------------------------------------------------------------------------------------

def with_gate(s, gate):
    """Returns the set with a name in the place of its gate."""
    def put(text):
        return None if text is None else text.replace(GATE_MARK, gate)

    return Set(s.name, [File(f.path, put(f.content), [Anchor(a.old, put(a.new)) for a in f.anchors]) for f in s.files])


def gate_of(read, s):
    """Returns the gate with which a set was put into a tree."""
    for f in s.files:
        content = read(f.path) or b""
        for text in [f.content or b"", *(a.new for a in f.anchors)]:
            for line in text.split(b"\n"):
                parts = line.rstrip(b"\r").split(GATE_MARK)
                if len(parts) == 2:
                    pattern = rb"^%s([A-Za-z0-9_]*)%s\r?$" % tuple(map(re.escape, parts))
                    found = re.search(pattern, content, re.MULTILINE)
                    if found:
                        return found[1]
    return b""


def survey(read, raw):
    """Looks where each anchor of a set stands. read returns a file's bytes, or None."""
    gate = gate_of(read, raw)
    s = with_gate(raw, gate)
    states, drifts = {}, {}
    for f in s.files:
        states[f.path], drifts[f.path] = survey_file(f, read(f.path))
    state = states[s.files[0].path] if len(set(states.values())) == 1 else DRIFTED
    return Survey(raw, s, state, gate if state == PATCHED else b"", states, drifts)


def survey_file(f, content):
    if f.content is not None:
        if content is None or content == f.content:
            return (PRISTINE if content is None else PATCHED), []
        if MARKER in content:
            return DRIFTED, ["it is of another version of this set, or was edited: revert with what put it there, or install "
                             "vLLM again"]
        return DRIFTED, ["there is another file of this name"]
    if content is None:
        return DRIFTED, ["the file is not there"]
    states, drifts = set(), []
    for i, anchor in enumerate(f.anchors):
        anchor = ends(anchor, content)
        state, _, reason = locate(anchor, content)
        states.add(state)
        if state == DRIFTED:
            drifts.append(f"anchor {i + 1}: {reason}{nearest(anchor, content)}")
    if states == {PATCHED}:
        # What one anchor left may look like what another leaves: then only one of them is there.
        try:
            replace(f, content, BACKWARD)
        except Refused as e:
            return DRIFTED, [str(e)]
    if len(states) == 1:
        return states.pop(), drifts
    return DRIFTED, drifts or ["some of its anchors are patched and some are not"]


def drifted(s):
    """Is the error of a survey that is neither."""
    lines = [f"  {path}: {drift}" for path, drifts in s.drifts.items() for drift in drifts]
    done, open_ = ([p for p, state in s.states.items() if state == which] for which in (PATCHED, PRISTINE))
    if done and open_:
        lines.append(f"  only a part is patched: {', '.join(done)} is, {', '.join(open_)} is not")
    return Refused("\n".join([f"the set {s.set.name} does not fit:", *lines]))


def only_with(gate):
    return f", on where the environment has {gate.decode()}=1" if gate else ""


def choose(read, sets):
    """Returns the set that fits, or none of which fits best. Where several fit, it is the one with the most edits."""
    def rank(s):
        if s.state != DRIFTED:
            return sum(max(1, len(f.anchors)) for f in s.set.files)
        whole = sum(s.states[f.path] == DRIFTED and len(f.anchors) == len(s.drifts[f.path]) for f in s.set.files)
        return -sum(map(len, s.drifts.values())) - whole - 1

    surveys = [survey(read, s) for s in sets]
    if not surveys:
        raise Refused("no set to choose from")
    best = [s for s in surveys if rank(s) == max(map(rank, surveys))]
    if len(best) > 1 and best[0].state != DRIFTED:
        raise Refused(f"the sets {best[0].set.name} and {best[1].set.name} fit alike; export the right one with --set")
    return best[0]


# --- the tree ---------------------------------------------------------------------------------------------------------

class Overlay:
    """A tree with changes that are not yet on disk. What was read from there is kept: who edits a file later must not
    have that overwritten."""

    def __init__(self, tree, was, files):
        self.tree, self.was, self.files = tree, was, files  # the last two: bytes by their path; None: not there

    def read(self, path):
        if path in self.files:
            return self.files[path]
        if path not in self.was:
            self.was[path] = self.tree.read(path)
        return self.was[path]

    def turn(self, s, way):
        """Puts a set, which has its gate, in, or takes it out."""
        for f in s.files:
            folder = os.path.dirname(f.path)
            if way == FORWARD and f.content is not None and not os.path.isdir(self.tree.name(folder)):
                raise Refused(f"the set {s.name} adds {f.path}, but vLLM has no folder {folder}")
            before = self.read(f.path)
            try:
                self.files[f.path] = turn_file(f, before, way)
            except Refused as e:
                raise Refused(f"the set {s.name}: {f.path}: {e}")


class Tree:
    """A vllm package folder on disk."""

    def __init__(self, folder):
        self.dir = os.path.abspath(folder)
        if not os.path.isdir(self.dir):
            what = ("it is a file; give the folder vllm that holds __init__.py" if os.path.exists(self.dir)
                    else "no such file or directory")
            raise Refused(f"no vllm package at {self.dir}: {what}")
        if not os.path.isfile(self.name("__init__.py")):
            if os.path.isfile(self.name("vllm/__init__.py")):
                raise Refused(f"no vllm package at {self.dir}, but one below it: give {self.name('vllm')}")
            raise Refused(f"no vllm package at {self.dir}: it has no __init__.py; give the folder vllm that holds it")

    def __str__(self):
        try:
            version = re.search(rb"""(?m)^\s*(?:__version__ = )?(?:version|__version__) = ['"]([^'"]+)['"]""",
                                read_file(self.name("_version.py")))
        except OSError:
            version = None
        return f"{self.dir} (vLLM {version[1].decode('utf-8', 'replace')})" if version else self.dir

    def name(self, path):
        return os.path.join(self.dir, path)

    def beside(self, path, suffix):
        """Returns the name of a file laid ready beside path."""
        folder, base = os.path.split(self.name(path))
        return os.path.join(folder, "." + base + suffix)

    def read(self, path):
        """Returns a file's bytes, or None. A link to a file is read through, and one to a folder refused: what was
        written below it would be written into the cache of a package manager."""
        parts = path.split("/")
        for i in range(1, len(parts)):
            folder = self.name("/".join(parts[:i]))
            if os.path.islink(folder):
                raise Refused(f"{folder} is a symbolic link to a folder, maybe into a cache that others use: replace "
                              "it with a copy, or install vLLM with uv's --link-mode=copy")
        try:
            mode = os.stat(self.name(path)).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not stat.S_ISREG(mode):
            raise Refused(f"{self.name(path)} is no regular file")
        return read_file(self.name(path))

    def check(self):
        self.lock()
        if self.pending():
            raise Refused(f"a patcher was cut off at {self.dir}, which may be half patched: "
                          "apply or --revert puts it right first")
        surveys, after = self.plan(FORWARD)
        self.compile_all(after.files)
        for s in surveys:
            applied = f"is applied to {self}{only_with(s.gate)}"
            print(s.set.name, applied if s.state == PATCHED else f"fits {self}; it is not applied")

    def run(self, way, force):
        self.lock()
        self.recover()
        surveys, after = self.plan(way)
        if way == FORWARD:
            self.compile_all(after.files)
        changes = [Change(path, after.was[path], new) for path, new in sorted(after.files.items())]
        changes = [c for c in changes if c.old != c.new]
        if changes:
            if not force:
                self.not_serving()
            # Who stops this script meanwhile would leave the rest to the next one: so that waits these milliseconds.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGINT, signal.SIGTERM})
            try:
                self.commit(changes, way)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for s in surveys if way == FORWARD else reversed(surveys):
            paths = ", ".join(f.path for f in s.set.files)
            if way == FORWARD and s.state == PATCHED:
                print(f"{s.set.name} is applied already to {self}{only_with(s.gate)}: nothing to do")
            elif way == FORWARD:
                print(f"{s.set.name} is applied to {self}{only_with(GATE.encode())}: {paths}")
            elif s.state == PATCHED:
                print(f"{s.set.name} is taken out of {self}: {paths}")
            else:
                print(f"{s.set.name} is not applied to {self}: nothing to do")

    def survey(self):
        """Says where the tree stands towards each set, and returns the tree without those that are applied. A set may
        stand on what one before it puts there: so one that is applied is looked at without those behind it, another one
        with those before it."""
        without = Overlay(self, {}, {})
        sets = load()
        if CHOOSE:
            sets = [choose(without.read, sets).raw]
        surveys = []
        for raw in reversed(sets):
            s = survey(without.read, raw)
            if s.state == PATCHED:
                without.turn(s.set, BACKWARD)
            surveys.insert(0, s)
        before = Overlay(self, without.was, dict(without.files))
        for i, was in enumerate(surveys):
            s = survey(before.read, was.raw)
            if was.state != PATCHED:
                surveys[i] = s
            if s.state == PRISTINE:
                try:
                    before.turn(with_gate(was.raw, was.gate), FORWARD)
                except (Refused, OSError):
                    pass  # plan says why that cannot be
        return surveys, without

    def plan(self, way):
        """Works out all files in memory: forward as the sets leave them, else as they were."""
        foreign = ", ".join(self.foreign())
        if foreign:
            raise Refused(f"{self.dir} was patched by another script, which left its marker {quoted(FOREIGN_MARKER)} "
                          f"in {foreign}: revert that one, or install vLLM again, first")
        surveys, files = self.survey()
        for s in surveys:
            if s.state == DRIFTED:
                raise drifted(s)
        for s in surveys if way == FORWARD else []:
            if s.state == PATCHED and s.gate != GATE.encode():
                was, wanted = (f"the gate {g}" if g else "no gate" for g in (s.gate.decode(), GATE))
                raise Refused(f"the set {s.set.name} is applied with {was}, and not with {wanted}: revert it first")
            new = with_gate(s.raw, GATE.encode())
            if survey(files.read, new).state != PATCHED:  # as it is where a set is named twice
                files.turn(new, FORWARD)
        return surveys, files

    def foreign(self):
        """Returns the files that another script has patched."""
        found = []
        for folder, _, files in os.walk(self.dir):
            for base in files:
                name = os.path.join(folder, base)
                try:
                    if base.endswith(".py") and os.path.isfile(name) and FOREIGN_MARKER in read_file(name):
                        found.append(os.path.relpath(name, self.dir))
                except OSError:
                    pass  # what cannot be read is told where it is needed
        return sorted(found)

    def compile_all(self, files):
        for path, content in sorted(files.items()):
            self.compile(path, content)

    def compile(self, path, content):
        """Makes sure that Python takes a file, without writing anything."""
        if content is not None and path.endswith(".py"):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    compile(content, self.name(path), "exec", dont_inherit=True)
            except (SyntaxError, ValueError) as e:
                raise Refused(f"what the patch makes does not compile: {self.name(path)}: {e}")

    def not_serving(self):
        """Refuses where a process has a library of the tree in its memory, as each vLLM that runs has. Only root sees
        those of other users, and without /proc nobody sees any."""
        inside = os.fsencode(os.path.join(os.path.realpath(self.dir), ""))
        found = []
        for pid in os.listdir("/proc") if os.path.isdir("/proc") else []:
            if not pid.isdigit() or int(pid) == os.getpid():
                continue
            try:
                # address, rights, offset, device, inode, and then the path with its blanks
                maps = read_file(f"/proc/{pid}/maps").splitlines()
                if any(b"/" in m and m[m.index(b"/"):].startswith(inside) for m in maps):
                    line = read_file(f"/proc/{pid}/cmdline").replace(b"\0", b" ").strip().decode("utf-8", "replace")
                    found.append(f"{pid} ({line[:80] + '...' if len(line) > 80 else line})")
            except OSError:
                pass
        if found:
            found = ", ".join(sorted(found))
            raise Refused(f"{self.dir} is in use by process {found}: stop vLLM first, or give --force and start it "
                          "again afterwards")

    def lock(self):
        """Keeps other patchers out. It locks the folder itself, so it leaves no file behind and ends with the process.
        Where the file system cannot lock, the journal alone has to do."""
        self.locked = os.open(self.dir, os.O_RDONLY)
        deadline = time.monotonic() + LOCK_WAIT
        while True:
            try:
                return fcntl.flock(self.locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise Refused(f"another vllm-timings has been patching {self.dir} for {LOCK_WAIT} s: wait for it, "
                                  "or end it")
            except OSError:
                return None
            time.sleep(0.02)

    # Several files cannot change in one instant. So before the first one changes, a journal in the package folder says
    # which will, and the bytes of both sides lie beside each of them: from there every step is a rename, which needs no
    # space on the disk and can be undone by another one. Whoever comes next after a crash, this script or the program
    # vllm-timings, finds the journal and undoes.

    def commit(self, changes, way):
        """Makes all changes, or none."""
        files = [{"path": c.path, "old": digest(c.old), "new": digest(c.new)} for c in changes]
        journal = {"phase": STAGING, "files": files}
        try:
            self.write_journal(journal)
            for c in changes:
                if c.old is not None:
                    self.lay(c.path, OLD, c.old, c.path)
                if c.new is not None:
                    self.lay(c.path, NEW, c.new, "__init__.py" if c.old is None else c.path)
            journal["phase"] = COMMITTING
            self.write_journal(journal)
            for f in files:
                if digest(self.read(f["path"])) != f["old"]:
                    raise Refused(f"{self.name(f['path'])}: somebody else changed it just now")
                self.put(f["path"], NEW, f["new"] != "")
            for c in changes:
                self.forget(c.path)
                if way == FORWARD:  # the other way they are the files that came with vLLM
                    self.compile(c.path, self.read(c.path))
            self.write_journal({"phase": DONE, "files": files})
        except Exception as e:
            try:
                on_disk = self.pending()
                finished = on_disk and on_disk["phase"] == DONE  # from there nobody may undo it
                if not finished:
                    self.undo(journal)
            except (OSError, Refused) as undo:
                raise Refused(f"{explain(e)}; and it could not be undone yet: {explain(undo)}. Once that is put right, "
                              "the next apply or --revert undoes it first")
            if not finished:
                raise Refused(f"{explain(e) or repr(e)}. Nothing is changed")
        try:
            self.clean(journal)
        except OSError as e:
            raise Refused(f"it is done, but what was laid ready could not be removed: {explain(e)}. The next apply or "
                          "--revert does that first")

    def lay(self, path, suffix, content, like):
        """Writes a file beside path, with the mode and owner of another one, down to the disk."""
        info = os.stat(self.name(like))
        name = self.beside(path, suffix)
        write_file(name, content, 0o600)
        try:
            os.chown(name, info.st_uid, info.st_gid)
        except OSError:
            if info.st_uid != os.geteuid():  # a group that this user is not in is let go
                raise
        os.chmod(name, info.st_mode & 0o777)  # after the owner: changing that drops bits

    def put(self, path, suffix, there):
        """Renames what was laid ready to path, which breaks links and leaves what they share; or removes path."""
        if there:
            os.replace(self.beside(path, suffix), self.name(path))
        else:
            os.remove(self.name(path))
        sync_dir(os.path.dirname(self.name(path)))

    def forget(self, path):
        """Removes a module's compiled code, which Python would take for the new text if both had one time."""
        folder, base = os.path.split(self.name(path))
        cache = os.path.join(folder, "__pycache__")
        for compiled in os.listdir(cache) if os.path.isdir(cache) else []:
            if compiled.startswith(os.path.splitext(base)[0] + ".") and compiled.endswith(".pyc"):
                remove(os.path.join(cache, compiled))

    def write_journal(self, journal):
        name = self.name(JOURNAL)
        write_file(name + NEW, (json.dumps(journal, indent=2) + "\n").encode(), 0o644)
        os.replace(name + NEW, name)
        sync_dir(self.dir)

    def pending(self):
        """Returns the journal of a patcher that was cut off, or None."""
        name = self.name(JOURNAL)
        try:
            journal = json.loads(read_file(name))
            journal = {"phase": journal["phase"],
                       "files": [{key: str(f[key]) for key in ("path", "old", "new")} for f in journal["files"]]}
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, LookupError) as e:
            raise Refused(f"{name} is no journal: {e}; remove it if you know that no patch was cut off")
        if journal["phase"] not in (STAGING, COMMITTING, DONE):
            raise Refused(f"{name} has the phase {json.dumps(journal['phase'])}, which this vllm-timings does not know")
        for f in journal["files"]:
            if not f["path"] or os.path.isabs(f["path"]) or os.path.normpath(f["path"]).split("/")[0] == "..":
                raise Refused(f"{name} names {json.dumps(f['path'])}, which is outside of the package")
        return journal

    def recover(self):
        """Undoes what a patcher that was cut off has left."""
        journal = self.pending()
        if not journal:
            remove(self.name(JOURNAL + NEW))  # of one that was cut off even before its journal was there
            return
        self.undo(journal)
        if journal["phase"] != DONE:  # else only what was laid ready was still there
            files = ", ".join(f["path"] for f in journal["files"])
            print(f"vllm-timings-patch: a patcher was cut off at {self.dir}; what it had begun is undone: {files}",
                  file=sys.stderr)

    def undo(self, journal):
        """Brings every file back to its old side. It may be cut off anywhere and begun anew."""
        for f in journal["files"] if journal["phase"] == COMMITTING else []:
            path, old, now = f["path"], self.beside(f["path"], OLD), digest(self.read(f["path"]))
            if now == f["old"]:
                continue
            if now == f["new"]:
                self.put(path, OLD, f["old"] != "")
            # Swapping takes away what was laid ready as the new side, and putting back the old one. So where this file
            # was not swapped, or was put back already, what somebody else did to it stays.
            elif not os.path.lexists(self.beside(path, NEW)) and (f["old"] == "" or os.path.lexists(old)):
                what = (f"keep a copy of that, and put {old}, its text from before, in its place" if f["old"]
                        else "and it was not there before: take it away")
                raise Refused(f"{self.name(path)}: somebody else changed it meanwhile{':' if f['old'] else ','} {what}")
        for f in journal["files"] if journal["phase"] == COMMITTING else []:
            self.forget(f["path"])
        self.clean(journal)

    def clean(self, journal):
        """Removes what was laid ready, the new side last (see undo), and at the end the journal."""
        for f in journal["files"]:
            for suffix in (OLD, NEW):
                remove(self.beside(f["path"], suffix))
        remove(self.name(JOURNAL + NEW))
        remove(self.name(JOURNAL))


# --- files ------------------------------------------------------------------------------------------------------------

def digest(content):
    return "" if content is None else hashlib.sha256(content).hexdigest()


def read_file(name):
    with open(name, "rb") as f:
        return f.read()


def write_file(name, content, mode):
    """Writes a new file down to the disk; one of that name that somebody left is taken away first."""
    remove(name)
    try:
        with open(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as f:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
    except OSError as e:
        e.filename = name
        raise


def remove(name):
    if os.path.lexists(name):  # a read-only disk refuses it for what is not there, too
        os.remove(name)
        sync_dir(os.path.dirname(name))


def sync_dir(folder):
    """Makes the names in a folder last through a crash of the machine. Some file systems cannot, and say so."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def explain(e):
    """Says an error, and of the disk's errors what to do about it."""
    if not isinstance(e, OSError) or not e.filename:
        return str(e)
    text = f"{e.filename}: {e.strerror.lower()}"
    if isinstance(e, PermissionError):
        return text + ": this user may not write there; run it as the user that installed vLLM, or as root"
    if e.errno == errno.EROFS:
        return text + ": patch while the image is built, or mount a writable copy of the folder"
    return text


if __name__ == "__main__":
    main()
