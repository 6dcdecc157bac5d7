//go:build unix

package patch

import (
	"fmt"
	"io/fs"
	"syscall"
)

func ownerOf(info fs.FileInfo) string {
	st := info.Sys().(*syscall.Stat_t)
	return fmt.Sprintf("%d:%d", st.Uid, st.Gid)
}
