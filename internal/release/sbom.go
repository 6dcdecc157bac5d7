package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"maps"
	"net/url"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

// sbom lists the modules that the program says it was built from, and Go's standard library, as CycloneDX.
func (b *built) sbom(s *source) ([]byte, error) {
	hash := sha256.Sum256(b.data)
	self := cdx.Component{
		Type:       cdx.ComponentTypeApplication,
		Name:       b.info.Main.Path,
		Version:    s.version,
		PackageURL: purl(b.info.Main.Path, s.version) + "?" + url.Values{"type": {"module"}, "goos": {b.goos}, "goarch": {b.goarch}}.Encode(),
		Hashes:     &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: hex.EncodeToString(hash[:])}},
		Licenses:   &cdx.Licenses{{License: &cdx.License{ID: "Apache-2.0"}}},
	}
	self.BOMRef = self.PackageURL
	goVersion := strings.TrimPrefix(b.info.GoVersion, "go")
	components := []cdx.Component{{Type: cdx.ComponentTypeLibrary, Name: "std", Version: goVersion, PackageURL: purl("std", goVersion)}}
	for _, m := range b.info.Deps {
		if m.Replace != nil {
			return nil, fmt.Errorf("module %s is replaced: nobody else could build this", m.Path)
		}
		c, err := component(m)
		if err != nil {
			return nil, err
		}
		components = append(components, c)
	}
	refs := map[string]string{b.info.Main.Path: self.BOMRef}
	for i := range components {
		c := &components[i]
		c.BOMRef = c.PackageURL
		refs[c.Name] = c.BOMRef
	}
	dependencies, err := b.dependencies(refs)
	if err != nil {
		return nil, err
	}

	bom := cdx.NewBOM()
	bom.SerialNumber = serial(hash)
	bom.Metadata = &cdx.Metadata{Timestamp: s.date.Format(time.RFC3339), Component: &self}
	bom.Components = &components
	bom.Dependencies = &dependencies
	var out bytes.Buffer
	err = cdx.NewBOMEncoder(&out, cdx.BOMFileFormatJSON).SetPretty(true).SetEscapeHTML(false).EncodeVersion(bom, cdx.SpecVersion1_6)
	return out.Bytes(), err
}

// component is a module. Its hash is the one in go.sum: of the module's list of files with their hashes.
func component(m *debug.Module) (cdx.Component, error) {
	sum, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(m.Sum, "h1:"))
	if err != nil || len(sum) != sha256.Size {
		return cdx.Component{}, fmt.Errorf("module %s %s has no checksum: %q", m.Path, m.Version, m.Sum)
	}
	return cdx.Component{
		Type:       cdx.ComponentTypeLibrary,
		Name:       m.Path,
		Version:    m.Version,
		PackageURL: purl(m.Path, m.Version) + "?type=module",
		Hashes:     &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: hex.EncodeToString(sum)}},
	}, nil
}

// dependencies says for each module from which others the program's packages of it import. refs has the name of
// each module in the SBOM.
func (b *built) dependencies(refs map[string]string) ([]cdx.Dependency, error) {
	of := map[string]string{} // package to module
	for _, p := range b.packages {
		module := "std"
		if p.Module != nil {
			module = p.Module.Path
		}
		if refs[module] == "" {
			return nil, fmt.Errorf("package %s is of module %s, which the program does not list", p.ImportPath, module)
		}
		of[p.ImportPath] = refs[module]
	}
	needs := map[string]map[string]bool{}
	for _, ref := range refs {
		needs[ref] = map[string]bool{}
	}
	for _, p := range b.packages {
		if p.Module == nil {
			continue // Go's library needs none; what it says to import from golang.org/x is a copy of its own
		}
		from := of[p.ImportPath]
		for _, imported := range p.Imports {
			if to := of[imported]; to != "" && to != from {
				needs[from][to] = true
			}
		}
	}
	var all []cdx.Dependency
	for _, ref := range slices.Sorted(maps.Keys(needs)) {
		on := slices.Sorted(maps.Keys(needs[ref]))
		all = append(all, cdx.Dependency{Ref: ref, Dependencies: &on})
	}
	return all, nil
}

// purl is a package URL of type golang. Its + is %2B, as in v2.0.0+incompatible.
func purl(path, version string) string {
	return "pkg:golang/" + path + "@" + url.QueryEscape(version)
}

// serial makes the SBOM's number from the program: the same program has the same.
func serial(hash [sha256.Size]byte) string {
	u := hash[:16]
	u[6] = u[6]&0x0f | 0x80 // RFC 9562: a UUID of version 8 is made as one likes
	u[8] = u[8]&0x3f | 0x80
	return fmt.Sprintf("urn:uuid:%x-%x-%x-%x-%x", u[:4], u[4:6], u[6:8], u[8:10], u[10:])
}
