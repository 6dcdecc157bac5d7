package vllmsim

import "time"

// MetricsMode says how /metrics and /metrics/ answer.
type MetricsMode int

// The ways in which /metrics can answer.
const (
	MetricsOK            MetricsMode = iota
	MetricsHang                      // no answer until the client leaves
	MetricsUnauthorized              // 401
	MetricsNotFound                  // 404
	MetricsEmpty                     // 200 with an empty body
	MetricsEmptyFiltered             // as MetricsEmpty, but only where name[] was asked and works: --api-server-count 2
)

// Faults are things that go wrong, set while the server runs by
// [Sim.SetFaults]. Each request to the server uses the faults that were set
// when it came in. The zero value is a server without faults.
type Faults struct {
	// Metrics is how /metrics and /metrics/ answer.
	Metrics MetricsMode

	// MetricsDelay is waited before /metrics or /metrics/ answers.
	MetricsDelay time.Duration

	// DieAfterEvents closes the connection in the middle of an answer: a
	// stream after this many events ([DONE] counts as one), a JSON answer in
	// the middle of its body. A negative number closes it right after the
	// headers. 0 is no fault.
	DieAfterEvents int

	// HeaderDelay is waited before the headers of an answer are sent and its
	// request is handed to the engine.
	HeaderDelay time.Duration

	// EarlyMetrics moves the histograms of finished requests this long after
	// the answer's last byte was written, instead of before its last event: a
	// reading made at once comes too early.
	EarlyMetrics time.Duration

	// Burst sends a stream's whole body in one write when it is complete.
	Burst bool
}

// Record describes an engine request that ended. All times are those that
// vLLM's histograms count; they are measured, not planned.
type Record struct {
	ID               string // of the answer, such as chatcmpl-1234
	PromptTokens     int
	CachedTokens     int // prompt tokens taken from the prefix cache
	CompletionTokens int
	Queue            time.Duration // handed to the engine to scheduled
	Prefill          time.Duration // scheduled to first token
	Decode           time.Duration // first to last token

	// Aborted: the client left, or [Sim.Restart] or [Sim.Close] ended it. Such
	// a request moves no histogram of finished requests.
	Aborted bool
}

// Stats counts what a [Sim] has seen since [New]; a Restart does not reset it.
type Stats struct {
	Requests        int64 // accepted completion requests (HTTP requests, not choices)
	Rejected        int64 // completion requests answered with an error
	Finished        int64 // engine requests (choices) that came to their end
	Aborted         int64 // engine requests whose client left
	Broken          int64 // engine requests ended by Restart, Close or a fault
	Running         int   // engine requests with a place in the batch now
	Waiting         int   // engine requests in the queue now
	MetricsFull     int64 // readings of the whole page, answered or not
	MetricsFiltered int64 // readings with name[] that the filter works for, answered or not
}
