package proxy

import (
	"sync"
	"time"
)

// maxBackground is how many responses that run in the background are kept in mind, the newest.
const maxBackground = 256

// background keeps in mind when responses that run in the background were sent, until they are asked for. The zero value
// is ready. It is safe for concurrent use.
type background struct {
	mu   sync.Mutex
	sent map[string]time.Time
	ids  []string // in the order of add
}

func (b *background) add(id string, sent time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, known := b.sent[id]; known || id == "" || sent.IsZero() {
		return
	}
	if b.sent == nil {
		b.sent = map[string]time.Time{}
	}
	if len(b.ids) == maxBackground {
		delete(b.sent, b.ids[0])
		b.ids = append(b.ids[:0], b.ids[1:]...)
	}
	b.sent[id] = sent
	b.ids = append(b.ids, id)
}

// when returns the time that the response was sent, zero if it is not known.
func (b *background) when(id string) time.Time {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.sent[id]
}
