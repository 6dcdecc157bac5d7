package vllmsim

import (
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"time"
)

// keepAlive is how long uvicorn keeps an idle connection.
const keepAlive = 5 * time.Second

// Server is a Sim that listens.
type Server struct {
	*Sim
	URL string // such as http://127.0.0.1:8000, without a slash at the end

	http   *http.Server
	served chan struct{}
}

// Start listens on a free port of 127.0.0.1.
func Start(cfg Config) (*Server, error) { return Listen("127.0.0.1:0", cfg) }

// Listen listens on the address, host:port.
func Listen(address string, cfg Config) (*Server, error) {
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("simulated vLLM: %w", err)
	}
	sim := New(cfg)
	s := &Server{
		Sim: sim,
		URL: "http://" + l.Addr().String(),
		http: &http.Server{
			Handler:           sim,
			ReadHeaderTimeout: time.Minute,
			IdleTimeout:       keepAlive,
			ErrorLog:          log.New(io.Discard, "", 0),
		},
		served: make(chan struct{}),
	}
	go func() {
		defer close(s.served)
		if err := s.http.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			_ = s.http.Close()
		}
	}()
	return s, nil
}

// Close closes the listener and all connections and ends the Sim. Answers in
// flight break.
func (s *Server) Close() {
	_ = s.http.Close()
	s.Sim.Close()
	<-s.served
}
