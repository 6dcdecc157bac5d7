package patch

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// notServing is an error where a process has the tree loaded: it would go on with the old text, and what it imports
// later would be the new one. Processes of other users cannot be seen into without being root, and none at all where
// there is no /proc.
func (t *Tree) notServing() error {
	var found []string
	names, _ := filepath.Glob("/proc/[0-9]*")
	for _, proc := range names {
		pid, err := strconv.Atoi(filepath.Base(proc))
		if err != nil || pid == os.Getpid() {
			continue
		}
		if t.loadedBy(proc) {
			found = append(found, fmt.Sprintf("%d (%s)", pid, commandLine(proc)))
		}
	}
	if len(found) == 0 {
		return nil
	}
	slices.Sort(found)
	return fmt.Errorf("%s is in use by process %s: stop vLLM first, or give --force and start it again afterwards", t.Dir, strings.Join(found, ", "))
}

// loadedBy reports whether a process has a library of the tree in its memory. Python leaves no trace of the text files
// that it imported, but vLLM always loads its compiled kernels.
func (t *Tree) loadedBy(proc string) bool {
	maps, err := os.Open(filepath.Join(proc, "maps"))
	if err != nil {
		return false
	}
	defer func() { _ = maps.Close() }()
	real, err := filepath.EvalSymlinks(t.Dir)
	if err != nil {
		real = t.Dir
	}
	lines := bufio.NewScanner(maps)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		// address, rights, offset, device, inode, and then the path with its blanks
		if i := strings.IndexByte(lines.Text(), '/'); i >= 0 && strings.HasPrefix(lines.Text()[i:], real+string(filepath.Separator)) {
			return true
		}
	}
	return false
}

func commandLine(proc string) string {
	text, err := os.ReadFile(filepath.Join(proc, "cmdline"))
	if err != nil {
		return "?"
	}
	line := strings.TrimSpace(strings.ReplaceAll(string(text), "\x00", " "))
	if len(line) > 80 {
		line = line[:80] + "..."
	}
	return line
}
