package main

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"slices"
	"time"
)

// file is one file in an archive.
type file struct {
	name string // with slashes
	mode int64
	data []byte
}

// pack makes a .tar.gz with the files below the folder top. Who packed, where and when is not in it.
func pack(top string, files []file, date time.Time) ([]byte, error) {
	files = slices.SortedFunc(slices.Values(files), func(a, b file) int { return cmp.Compare(a.name, b.name) })
	var out bytes.Buffer
	zipped, err := gzip.NewWriterLevel(&out, gzip.BestCompression)
	if err != nil {
		return nil, err
	}
	t := tar.NewWriter(zipped)
	for _, f := range files {
		header := &tar.Header{Typeflag: tar.TypeReg, Name: top + "/" + f.name, Size: int64(len(f.data)), Mode: f.mode, ModTime: date}
		if err := t.WriteHeader(header); err != nil {
			return nil, err
		}
		if _, err := t.Write(f.data); err != nil {
			return nil, err
		}
	}
	if err := t.Close(); err != nil {
		return nil, err
	}
	if err := zipped.Close(); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}
