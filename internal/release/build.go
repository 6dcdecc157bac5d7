package main

import (
	"bytes"
	"context"
	"debug/buildinfo"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"
	"time"
)

const mainPackage = "./cmd/" + program

// built is the program for one platform.
type built struct {
	goos, goarch string
	data         []byte
	info         *debug.BuildInfo // what the program says is in it
	packages     []listed
	licences     []file
}

// listed is what `go list` says of a package in the program.
type listed struct {
	ImportPath, Dir string
	Imports         []string
	Module          *struct {
		Path, Dir string
		Main      bool
	}
}

// build builds the program with the flags that the Dockerfile has too: version, commit and date are given and not
// recorded by Go, as what Go records depends on which tags a clone has.
func (s *source) build(ctx context.Context, goTool, goos, goarch, to string) (*built, error) {
	env := []string{"CGO_ENABLED=0", "GOOS=" + goos, "GOARCH=" + goarch, "GOAMD64=v1", "GOARM64=v8.0", "GOFLAGS=-mod=readonly", "GOWORK=off"}
	flags := fmt.Sprintf("-s -w -X main.version=%s -X main.commit=%s -X main.date=%s", s.version, s.commit, s.date.Format(time.RFC3339))
	if _, err := output(ctx, s.root, env, goTool, "build", "-trimpath", "-buildvcs=false", "-ldflags", flags, "-o", to, mainPackage); err != nil {
		return nil, err
	}
	b := &built{goos: goos, goarch: goarch}
	var err error
	if b.data, err = os.ReadFile(to); err != nil {
		return nil, err
	}
	if b.info, err = buildinfo.Read(bytes.NewReader(b.data)); err != nil {
		return nil, err
	}
	if err := checkSettings(b.info.Settings); err != nil {
		return nil, err
	}
	list, err := output(ctx, s.root, env, goTool, "list", "-deps", "-json=ImportPath,Dir,Imports,Module", mainPackage)
	if err != nil {
		return nil, err
	}
	for d := json.NewDecoder(strings.NewReader(list)); ; {
		var p listed
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, err
		}
		b.packages = append(b.packages, p)
	}
	goroot, err := output(ctx, s.root, env, goTool, "env", "GOROOT")
	if err != nil {
		return nil, err
	}
	b.licences, err = licences(b.packages, strings.TrimSpace(goroot))
	return b, err
}

// checkSettings refuses a program that came out otherwise than with the flags above: something in the environment of who
// builds, such as GOEXPERIMENT, has changed it.
func checkSettings(settings []debug.BuildSetting) error {
	expected := []string{"-buildmode", "-compiler", "-trimpath", "CGO_ENABLED", "DefaultGODEBUG", "GOAMD64", "GOARCH", "GOARM64", "GOOS"}
	for _, s := range settings {
		if !slices.Contains(expected, s.Key) {
			return fmt.Errorf("%s=%s changes the program: unset it, also with go env -u", s.Key, s.Value)
		}
	}
	return nil
}

var (
	licenceForm = regexp.MustCompile(`(?i)^(licen[cs]e|copying)([.-]|$)`)
	noticeForm  = regexp.MustCompile(`(?i)^(notice|patents)([.-]|$)`)
)

// licences reads the licences that the packages' modules, and Go itself, want to be passed on with the program: those in
// each package's folder and in the folders above it, up to the module's.
func licences(packages []listed, goroot string) ([]file, error) {
	var files []file
	seen := map[string]bool{}
	// add reads those in one folder.
	add := func(to, dir string) (found bool, err error) {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return false, err
		}
		for _, e := range entries {
			isLicence := licenceForm.MatchString(e.Name())
			if !e.Type().IsRegular() || !isLicence && !noticeForm.MatchString(e.Name()) {
				continue
			}
			found = found || isLicence
			data, err := os.ReadFile(filepath.Join(dir, e.Name()))
			if err != nil {
				return false, err
			}
			name := "licenses/" + to + "/" + e.Name()
			if !seen[name] {
				seen[name] = true
				files = append(files, file{name, 0o644, data})
			}
		}
		return found, nil
	}
	if found, err := add("go", goroot); err != nil {
		return nil, err
	} else if !found {
		return nil, fmt.Errorf("there is no licence of Go in %s", goroot)
	}
	for _, p := range packages {
		if p.Module == nil || p.Module.Main {
			continue
		}
		for dir := p.Dir; ; dir = filepath.Dir(dir) {
			below, err := filepath.Rel(p.Module.Dir, dir)
			if err != nil {
				return nil, err
			}
			found, err := add(filepath.ToSlash(filepath.Join(p.Module.Path, below)), dir)
			if err != nil {
				return nil, err
			}
			if below != "." {
				continue
			}
			if !found {
				return nil, fmt.Errorf("module %s has no licence", p.Module.Path)
			}
			break
		}
	}
	return files, nil
}
