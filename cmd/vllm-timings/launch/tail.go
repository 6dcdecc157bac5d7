package launch

import (
	"context"
	"io"
	"os"
	"time"
)

const tailEvery = 100 * time.Millisecond

// Tail passes on what is appended to a file from offset on, as a program's output, until ctx ends. A file that gets
// shorter is read anew.
func Tail(ctx context.Context, name string, offset int64, out *Output) {
	f, err := os.Open(name)
	if err != nil {
		return
	}
	defer f.Close()
	tick := time.NewTicker(tailEvery)
	defer tick.Stop()
	buf := make([]byte, 64<<10)
	for {
		last := ctx.Err() != nil
		if info, err := f.Stat(); err == nil && info.Size() < offset {
			offset = 0
		}
		for {
			n, err := f.ReadAt(buf, offset)
			out.program(buf[:n])
			offset += int64(n)
			if err != nil || n == 0 {
				if err != nil && err != io.EOF {
					return
				}
				break
			}
		}
		if last {
			return
		}
		select {
		case <-ctx.Done():
		case <-tick.C:
		}
	}
}
