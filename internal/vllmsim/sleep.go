package vllmsim

import (
	"encoding/json"
	"net/http"
	"strconv"
	"sync"
)

// sleeper is what vLLM's sleep mode keeps. Its routes are there with [Config].DevMode only.
type sleeper struct {
	mu      sync.Mutex
	asleep  map[string]bool // the parts that sleep, see sleepTags
	level   int             // of the sleep, as the metrics tell it; 0 when awake
	lost    bool            // the weights were thrown away and not loaded again
	changed chan struct{}   // closed by the next change
}

// sleepTags are the parts that can be woken up on their own.
var sleepTags = []string{"weights", "kv_cache"}

// Sleeping returns the level at which the server sleeps, 0 when it is awake.
func (s *Sim) Sleeping() int {
	s.sleep.mu.Lock()
	defer s.sleep.mu.Unlock()
	return s.sleep.level
}

// WeightsLost reports whether the server woke up from level 2 without having its weights loaded again: vLLM would answer
// with noise.
func (s *Sim) WeightsLost() bool {
	s.sleep.mu.Lock()
	defer s.sleep.mu.Unlock()
	return s.sleep.lost && len(s.sleep.asleep) == 0
}

// dev serves the routes of the development mode, and reports whether the path is one of them.
func (s *Sim) dev(w http.ResponseWriter, r *http.Request) bool {
	switch r.URL.Path {
	case "/sleep":
		s.method(w, r, func() { s.fallAsleep(w, r) }, http.MethodPost)
	case "/wake_up":
		s.method(w, r, func() { s.wakeUp(w, r) }, http.MethodPost)
	case "/is_sleeping":
		s.method(w, r, func() {
			writeJSON(w, http.StatusOK, `{"is_sleeping":`+strconv.FormatBool(s.Sleeping() > 0)+`}`)
		}, http.MethodGet)
	case "/server_info":
		s.method(w, r, func() {
			writeJSON(w, http.StatusOK, `{"vllm_config":{"model_config":{"enable_sleep_mode":`+strconv.FormatBool(s.cfg.SleepMode)+`}},"vllm_env":{},"system_env":{}}`)
		}, http.MethodGet)
	case "/collective_rpc":
		s.method(w, r, func() { s.collectiveRPC(w, r) }, http.MethodPost)
	default:
		return false
	}
	return true
}

// change changes what is kept under the lock, and wakes the requests that wait.
func (s *sleeper) change(do func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	do()
	if s.changed != nil {
		close(s.changed)
		s.changed = nil
	}
}

// fallAsleep does what the real one does by default but for one thing: answers in flight end as they would have, instead of
// being aborted.
func (s *Sim) fallAsleep(w http.ResponseWriter, r *http.Request) {
	level := 1
	if text := r.URL.Query().Get("level"); text != "" {
		var err error
		if level, err = strconv.Atoi(text); err != nil || level < 0 || level > 2 {
			writeJSON(w, http.StatusUnprocessableEntity, `{"detail":[{"type":"int_parsing","loc":["query","level"],"msg":"Input should be between 0 and 2"}]}`)
			return
		}
	}
	s.sleep.change(func() {
		if s.sleep.asleep["weights"] { // a warning in vLLM's log, no more
			return
		}
		s.sleep.asleep = map[string]bool{}
		for _, tag := range sleepTags {
			s.sleep.asleep[tag] = true
		}
		s.sleep.level = level
		s.sleep.lost = s.sleep.lost || level == 2
	})
	s.done(w, `{"status":"sleeping","level":`+strconv.Itoa(level)+`}`)
}

func (s *Sim) wakeUp(w http.ResponseWriter, r *http.Request) {
	tags := r.URL.Query()["tags"]
	if !s.pause(r.Context(), s.cfg.WakeTime) {
		panic(http.ErrAbortHandler)
	}
	awake := false
	s.sleep.change(func() {
		if len(tags) == 0 {
			tags = sleepTags
		}
		for _, tag := range tags {
			delete(s.sleep.asleep, tag)
		}
		if awake = len(s.sleep.asleep) == 0; awake {
			s.sleep.level = 0
		}
	})
	status := "sleeping"
	if awake {
		status = "awake"
	}
	list, _ := json.Marshal(r.URL.Query()["tags"])
	s.done(w, `{"status":"`+status+`","tags":`+string(list)+`}`)
}

func (s *Sim) collectiveRPC(w http.ResponseWriter, r *http.Request) {
	var body struct{ Method string }
	if err := json.NewDecoder(r.Body).Decode(&body); err != nil || body.Method == "" {
		writeJSON(w, http.StatusBadRequest, `{"detail":"Missing 'method' in request body"}`)
		return
	}
	if body.Method == "reload_weights" {
		s.sleep.change(func() {
			if !s.sleep.asleep["weights"] {
				s.sleep.lost = false
			}
		})
	}
	writeJSON(w, http.StatusOK, `{"results":[null]}`)
}

// done answers as that version does.
func (s *Sim) done(w http.ResponseWriter, body string) {
	if s.era != era032 {
		empty(w)
		return
	}
	writeJSON(w, http.StatusOK, body)
}

// awake waits until the server is, as requests do. It reports false when the client left or the server closed before.
func (s *Sim) awake(r *http.Request) bool {
	for {
		s.sleep.mu.Lock()
		if len(s.sleep.asleep) == 0 {
			s.sleep.mu.Unlock()
			return true
		}
		if s.sleep.changed == nil {
			s.sleep.changed = make(chan struct{})
		}
		changed := s.sleep.changed
		s.sleep.mu.Unlock()
		select {
		case <-changed:
		case <-r.Context().Done():
			return false
		case <-s.quit:
			return false
		}
	}
}

// sleepStates are the samples of the sleep state.
func sleepStates(level int) []value {
	is := func(l int) float64 {
		if level == l {
			return 1
		}
		return 0
	}
	return []value{{"awake", is(0)}, {"weights_offloaded", is(1)}, {"discard_all", is(2)}}
}
