package main

import (
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"runtime"
)

// mallocsPath is where the plain proxy tells how many allocations it made. It costs it nothing otherwise.
const mallocsPath = "/-/metrics"

// plainHandler is the proxy that everybody writes first. It keeps as many idle connections as there are requests, which
// the default Transport does not: that is a setting, not a cost of the proxy.
func plainHandler(upstream *url.URL) http.Handler {
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.MaxIdleConnsPerHost = 1 << 12
	transport.MaxIdleConns = 0
	transport.DisableCompression = true
	rp := &httputil.ReverseProxy{
		Rewrite:       func(r *httputil.ProxyRequest) { r.SetURL(upstream); r.Out.Host = r.In.Host },
		Transport:     transport,
		FlushInterval: -1,
		ErrorLog:      log.New(io.Discard, "", 0),
	}
	mux := http.NewServeMux()
	mux.Handle("/", rp)
	mux.HandleFunc(mallocsPath, func(w http.ResponseWriter, _ *http.Request) {
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		fmt.Fprintf(w, "go_memstats_mallocs_total %d\n", m.Mallocs)
	})
	return mux
}

func plainMain(listen, upstream string) error {
	u, err := url.Parse("http://" + upstream)
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp", listen)
	if err != nil {
		return err
	}
	server := &http.Server{Handler: plainHandler(u), ErrorLog: log.New(io.Discard, "", 0)}
	return server.Serve(l)
}
