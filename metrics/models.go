package metrics

import (
	"strings"
	"sync"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"
)

const (
	// maxModels bounds the values of the label model. A vLLM serves one model
	// and its LoRA adapters; a client can have it load more.
	maxModels = 32
	// maxLabel bounds one label value, in bytes.
	maxLabel = 128

	otherModel   = "other"
	unknownLabel = "unknown"
)

// modelMetrics are the children of modelVecs for one model.
type modelMetrics struct {
	prefill, decode, prefillRate, decodeRate prometheus.Observer
	prompt, cached, predicted                prometheus.Counter
}

// models gives each of the first maxModels names its own metrics and all the
// others common ones. The children are kept so that a request costs one look
// into one map instead of seven.
type models struct {
	vecs *modelVecs

	mu     sync.RWMutex
	byName map[string]*modelMetrics // keyed by the sanitised name
	other  *modelMetrics            // nil until needed
}

func newModels(vecs *modelVecs) *models {
	return &models{vecs: vecs, byName: make(map[string]*modelMetrics)}
}

func (m *models) get(name string) *modelMetrics {
	name = label(name)
	m.mu.RLock()
	found := m.byName[name]
	if found == nil && len(m.byName) >= maxModels {
		found = m.other
	}
	m.mu.RUnlock()
	if found != nil {
		return found
	}
	return m.add(name)
}

func (m *models) add(name string) *modelMetrics {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch found := m.byName[name]; {
	case found != nil: // another request was faster
		return found
	case len(m.byName) < maxModels:
		name = strings.Clone(name) // it may be a slice of a whole body
		found = m.children(name)
		m.byName[name] = found
		return found
	case m.other == nil:
		m.other = m.children(otherModel)
	}
	return m.other
}

func (m *models) children(name string) *modelMetrics {
	return &modelMetrics{
		prefill:     m.vecs.prefill.WithLabelValues(name),
		decode:      m.vecs.decode.WithLabelValues(name),
		prefillRate: m.vecs.prefillRate.WithLabelValues(name),
		decodeRate:  m.vecs.decodeRate.WithLabelValues(name),
		prompt:      m.vecs.prompt.WithLabelValues(name),
		cached:      m.vecs.cached.WithLabelValues(name),
		predicted:   m.vecs.predicted.WithLabelValues(name),
	}
}

// label makes s a label value: valid UTF-8 (client_golang panics on others),
// at most maxLabel bytes, not empty.
func label(s string) string {
	if s == "" {
		return unknownLabel
	}
	if len(s) > maxLabel {
		// Not within a character: step back over continuation bytes, of which
		// valid UTF-8 has at most three.
		end := maxLabel
		for i := 0; i < utf8.UTFMax-1 && !utf8.RuneStart(s[end]); i++ {
			end--
		}
		s = s[:end]
	}
	if !utf8.ValidString(s) {
		s = strings.ToValidUTF8(s, "_") // never longer: one or more bytes become one
	}
	return s
}
