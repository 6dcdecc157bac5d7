//go:build !unix

package patch

import "os"

// vLLM serves on Linux (and macOS); elsewhere only the text of files is kept safe.
func tryLock(*os.File) (taken bool, err error) { return true, nil }
func keepOwner(string, os.FileInfo) error      { return nil }
func isReadOnly(error) bool                    { return false }
func syncDir(string) error                     { return nil }
