package proxy

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tidwall/gjson"
)

// What is wrong with a connection to vLLM is named, with what mends it, in the answer, in the log and in the metrics.
func TestUnreachable(t *testing.T) {
	plain := httptest.NewServer(http.NotFoundHandler())
	t.Cleanup(plain.Close)
	secure := func(change func(*httptest.Server)) *httptest.Server {
		s := httptest.NewUnstartedServer(http.NotFoundHandler())
		s.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug)
		if change != nil {
			change(s)
		}
		s.StartTLS()
		t.Cleanup(s.Close)
		return s
	}
	trusting := func(s *httptest.Server) func(*Config) {
		return func(c *Config) {
			c.RootCAs = x509.NewCertPool()
			c.RootCAs.AddCert(s.Certificate())
		}
	}
	whole := secure(nil)
	expired := secure(func(s *httptest.Server) { s.TLS = &tls.Config{Certificates: []tls.Certificate{expiredCertificate(t)}} })
	mutual := secure(func(s *httptest.Server) { s.TLS = &tls.Config{ClientAuth: tls.RequireAnyClientCert} })
	garbage := listenAndSay(t, "SSH-2.0-OpenSSH_9.2\r\n")
	socket := filepath.Join(t.TempDir(), "s")
	for _, test := range []struct {
		kind, upstream, remedy string
		change                 func(*Config)
	}{
		{kind: "connection refused", upstream: "http://" + freeAddress(t), remedy: "Check that it runs"},
		{kind: "certificate not trusted", upstream: whole.URL, remedy: "--upstream-ca"},
		{kind: "certificate for another name", upstream: strings.Replace(whole.URL, "127.0.0.1", "localhost", 1), remedy: "Give --upstream a name", change: trusting(whole)},
		{kind: "certificate not valid", upstream: expired.URL, remedy: "Check the dates", change: trusting(expired)},
		{kind: "TLS refused", upstream: mutual.URL, remedy: "client certificate", change: trusting(mutual)},
		{kind: "no TLS there", upstream: strings.Replace(plain.URL, "http:", "https:", 1), remedy: "Begin --upstream with http://"},
		{kind: "no TLS there", upstream: "https://" + garbage, remedy: "Begin --upstream with http://"},
		{kind: "no such socket", upstream: "http://localhost", remedy: "Check that it runs", change: func(c *Config) { c.Socket = socket }},
	} {
		t.Run(test.kind, func(t *testing.T) {
			var changes []func(*Config)
			name := test.upstream
			if test.change != nil {
				changes = append(changes, test.change)
			}
			if test.kind == "no such socket" {
				name = "unix://" + socket
			}
			r := newRig(t, test.upstream, changes...)
			a := r.chat(true, 3)
			for again := 0; test.kind == tlsRefused && !strings.Contains(a.body, tlsRefused) && again < 50; again++ {
				a = r.chat(true, 3) // with TLS 1.3 the request may be written, and fail, before the alert is read
			}
			message := gjson.Get(a.body, "error.message").Str
			if a.status != http.StatusBadGateway || !strings.HasPrefix(message, "vLLM at "+name+" cannot be reached ("+test.kind+"). ") || !strings.Contains(message, test.remedy) {
				t.Errorf("status %d, %s", a.status, a.body)
			}
			r.wantMetric(1, "upstream_errors_total", "kind", test.kind)
			eventually(t, "it is said in the log", func() bool {
				for _, line := range r.log.lines(t, slog.LevelInfo, "requests get status 502") {
					mendable := remedies[test.kind] == "" || strings.Contains(line.Get("msg").Str, remedies[test.kind])
					if mendable && line.Get("upstream").Str == name {
						return true
					}
				}
				return false
			})
		})
	}
}

func expiredCertificate(t *testing.T) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1),
		NotBefore:    time.Now().Add(-2 * time.Hour),
		NotAfter:     time.Now().Add(-time.Hour),
		IPAddresses:  []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	raw, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{raw}, PrivateKey: key}
}

// listenAndSay is something that is neither HTTP nor TLS.
func listenAndSay(t *testing.T, what string) (address string) {
	t.Helper()
	return acceptConns(t, func(conn *net.TCPConn) {
		_, _ = io.WriteString(conn, what)
		_, _ = io.Copy(io.Discard, conn)
		conn.Close()
	})
}
