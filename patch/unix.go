//go:build unix

package patch

import (
	"errors"
	"os"
	"syscall"
)

// tryLock takes the file's lock unless somebody has it.
func tryLock(f *os.File) (taken bool, err error) {
	err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return false, nil
	}
	return err == nil, err
}

// keepOwner gives a file the owner that info has. For a file of another user only root may; a group that this user is not
// in is let go.
func keepOwner(name string, info os.FileInfo) error {
	want, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return nil
	}
	err := os.Chown(name, int(want.Uid), int(want.Gid))
	if err != nil && int(want.Uid) == os.Geteuid() {
		return nil
	}
	return err
}

func isReadOnly(err error) bool { return errors.Is(err, syscall.EROFS) }

// syncDir makes the names in a folder last through a crash of the machine. Some file systems cannot, and say so.
func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	if err := f.Sync(); err != nil && !errors.Is(err, syscall.EINVAL) && !errors.Is(err, syscall.ENOTSUP) {
		return err
	}
	return nil
}
