package telemetry

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Limits of the HTTP server. The write timeout is long because a CPU profile takes as many seconds as the request asks
// for.
const (
	maxHTTPConns      = 64
	maxScrapes        = 4
	readTimeout       = 10 * time.Second
	writeTimeout      = 2 * time.Minute
	idleTimeout       = time.Minute
	scrapeTimeout     = 10 * time.Second
	maxHTTPHeaderSize = 16 << 10
)

// ServerOptions configures the HTTP server.
type ServerOptions struct {
	// Address is IP:port. Port 0 picks a free port.
	Address string
	// Pprof adds /debug/pprof.
	Pprof bool
	// Log receives the messages of net/http; it may be nil.
	Log *slog.Logger
}

// Server is the HTTP server: /metrics, /healthz, /readyz, and a page with links to them.
type Server struct {
	listener net.Listener
	http     *http.Server
	done     chan struct{}
	err      error
}

// Serve starts the HTTP server. Close stops it.
//
// Errors: the errors of net.Listen.
func (t *Telemetry) Serve(o ServerOptions) (*Server, error) {
	l, err := net.Listen("tcp", o.Address)
	if err != nil {
		return nil, fmt.Errorf("metrics.address: listen on %s: %w", o.Address, err)
	}
	log := o.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	s := &Server{
		listener: l,
		done:     make(chan struct{}),
		http: &http.Server{
			Handler:           t.Handler(o.Pprof),
			ReadHeaderTimeout: readTimeout,
			ReadTimeout:       readTimeout,
			WriteTimeout:      writeTimeout,
			IdleTimeout:       idleTimeout,
			MaxHeaderBytes:    maxHTTPHeaderSize,
			// Without ErrorLog, net/http writes plain text to standard error, whatever the format of the log.
			ErrorLog: slog.NewLogLogger(LimitHandler(log.With("server", "metrics").Handler(), LimitOptions{}),
				slog.LevelWarn),
		},
	}
	go func() {
		defer close(s.done)
		if err := s.http.Serve(newLimitListener(l, maxHTTPConns)); !errors.Is(err, http.ErrServerClosed) {
			s.err = err
		}
	}()
	return s, nil
}

// Addr returns the address that the server listens on.
func (s *Server) Addr() net.Addr { return s.listener.Addr() }

// Close waits until running requests have ended or ctx is done, and then closes their connections. Idempotent.
func (s *Server) Close(ctx context.Context) error {
	err := s.http.Shutdown(ctx)
	if err != nil {
		err = s.http.Close()
	}
	<-s.done
	return errors.Join(err, s.err)
}

// Handler returns the HTTP handler of the server.
func (t *Telemetry) Handler(withPprof bool) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(t.registry, promhttp.HandlerOpts{
		MaxRequestsInFlight: maxScrapes,
		Timeout:             scrapeTimeout,
	}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		reply(w, http.StatusOK, map[string]any{"alive": true})
	})
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		reasons := t.health.Reasons()
		code := http.StatusOK
		if len(reasons) > 0 {
			code = http.StatusServiceUnavailable
		}
		reply(w, code, map[string]any{"ready": len(reasons) == 0, "reasons": reasons, "degraded": t.Degraded()})
	})
	pages := []string{"/metrics", "/healthz", "/readyz"}
	if withPprof {
		pages = append(pages, "/debug/pprof/")
		mux.HandleFunc("GET /debug/pprof/", pprof.Index)
		mux.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
		mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
		mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	}
	var index strings.Builder
	index.WriteString("<!DOCTYPE html><title>jbofd</title><h1>jbofd</h1>")
	for _, p := range pages {
		fmt.Fprintf(&index, "<p><a href=%q>%s</a>", p, p)
	}
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		_, _ = io.WriteString(w, index.String()) // fails only if the peer has gone
	})
	return mux
}

func reply(w http.ResponseWriter, code int, body any) {
	out, err := json.Marshal(body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(code)
	// Write fails only if the peer has gone, so nobody can be told.
	_, _ = w.Write(append(out, '\n'))
}

// limitListener accepts a limited number of concurrent connections. Further connections wait in the kernel's bounded
// queue.
type limitListener struct {
	net.Listener
	slots chan struct{}
	once  sync.Once
	done  chan struct{}
}

func newLimitListener(l net.Listener, n int) *limitListener {
	return &limitListener{Listener: l, slots: make(chan struct{}, n), done: make(chan struct{})}
}

func (l *limitListener) Accept() (net.Conn, error) {
	select {
	case l.slots <- struct{}{}:
	case <-l.done:
		return nil, net.ErrClosed
	}
	c, err := l.Listener.Accept()
	if err != nil {
		<-l.slots
		return nil, err
	}
	return &limitConn{Conn: c, release: sync.OnceFunc(func() { <-l.slots })}, nil
}

func (l *limitListener) Close() error {
	l.once.Do(func() { close(l.done) })
	return l.Listener.Close()
}

type limitConn struct {
	net.Conn
	release func()
}

func (c *limitConn) Close() error {
	defer c.release()
	return c.Conn.Close()
}
