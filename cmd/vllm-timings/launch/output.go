package launch

import (
	"bytes"
	"io"
	"os"
	"sync"
	"time"
)

// lineWait is how long our own lines wait for the end of the program's line.
const lineWait = time.Second

// Output is a stream that a program's output and our own log share. The program's bytes go through as they come. Our lines
// wait until the program's line has ended; where that takes long, as with the bar of a progress, they begin a new one.
// It is safe for concurrent use.
type Output struct {
	mu    sync.Mutex
	to    io.Writer
	open  bool // the program's last byte, which is the last of all, ended no line
	lines []byte
	timer *time.Timer // runs while lines wait
}

// NewOutput returns an Output that writes to w.
func NewOutput(w io.Writer) *Output { return &Output{to: w} }

// Write writes whole lines of ours.
func (o *Output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.open {
		return o.to.Write(p)
	}
	o.lines = append(o.lines, p...)
	if o.timer == nil {
		o.timer = time.AfterFunc(lineWait, o.Flush)
	}
	return len(p), nil
}

// Flush writes our lines that wait.
func (o *Output) Flush() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.flush()
}

func (o *Output) flush() {
	if len(o.lines) == 0 {
		return
	}
	if o.open {
		_, _ = io.WriteString(o.to, "\n")
	}
	_, _ = o.to.Write(o.lines)
	o.lines, o.open = nil, false
	o.timer.Stop()
	o.timer = nil
}

// program writes what came from the program.
func (o *Output) program(p []byte) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if end := bytes.LastIndexByte(p, '\n') + 1; end > 0 && len(o.lines) > 0 {
		_, _ = o.to.Write(p[:end])
		o.open = false
		o.flush()
		p = p[end:]
	}
	if len(p) > 0 {
		_, _ = o.to.Write(p)
		o.open = p[len(p)-1] != '\n'
	}
}

// Pipes are where a program writes to.
type Pipes struct {
	Stdout, Stderr *os.File // for the program; the same file where both go to the same place, so that they stay in order
	wg             sync.WaitGroup
	readers        []*os.File
}

// NewPipes passes on what a program writes: to stdout, and to stderr, which is out's.
func NewPipes(stdout, stderr io.Writer, out *Output) (*Pipes, error) {
	p := &Pipes{}
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	p.Stdout, p.Stderr = w, w
	p.pump(r, out.program)
	if sameFile(stdout, stderr) {
		return p, nil
	}
	if r, w, err = os.Pipe(); err != nil {
		p.CloseWriters()
		p.Wait(0)
		return nil, err
	}
	p.Stdout = w
	p.pump(r, func(b []byte) { _, _ = stdout.Write(b) })
	return p, nil
}

// CloseWriters is to be called when the program has them.
func (p *Pipes) CloseWriters() {
	_ = p.Stderr.Close()
	_ = p.Stdout.Close()
}

// Wait waits until all that was written is passed on, or the time is over: what keeps a pipe open may have become immortal.
func (p *Pipes) Wait(limit time.Duration) {
	end := time.Now().Add(limit)
	for _, r := range p.readers {
		_ = r.SetReadDeadline(end)
	}
	p.wg.Wait()
}

func (p *Pipes) pump(r *os.File, write func([]byte)) {
	p.readers = append(p.readers, r)
	p.wg.Go(func() {
		defer r.Close()
		buf := make([]byte, 64<<10)
		for {
			n, err := r.Read(buf)
			if n > 0 {
				write(buf[:n])
			}
			if err != nil {
				return
			}
		}
	})
}

// sameFile reports whether both are the same open file, pipe or terminal.
func sameFile(a, b io.Writer) bool {
	x, ok := a.(*os.File)
	y, ok2 := b.(*os.File)
	if !ok || !ok2 {
		return false
	}
	i, err := x.Stat()
	j, err2 := y.Stat()
	return err == nil && err2 == nil && os.SameFile(i, j)
}
