package telemetry

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// maxLimitKeys bounds the messages told apart; further ones share one budget.
const maxLimitKeys = 256

// LimitOptions describe a rate limit on log messages.
type LimitOptions struct {
	// PerSec is how many records of one message pass in a second; 0: 5.
	PerSec int
	// Dropped is told of records that were suppressed; nil: nobody.
	Dropped func(n int)
}

// LimitHandler returns a handler that passes on at most PerSec records a second of
// each message, and counts the others. The first record that passes after some
// were suppressed says how many in its attribute "suppressed". Time is the
// records' own.
//
// It is for what peers can cause: a message is a constant string, and what differs
// between peers goes into attributes.
func LimitHandler(inner slog.Handler, o LimitOptions) slog.Handler {
	if o.PerSec <= 0 {
		o.PerSec = 5
	}
	return &limitHandler{inner: inner, shared: &limiter{opts: o, messages: map[string]*budget{}}}
}

type limitHandler struct {
	inner  slog.Handler
	shared *limiter
}

type limiter struct {
	opts LimitOptions
	// mu guards messages.
	mu       sync.Mutex
	messages map[string]*budget
}

// budget is what one message has left.
type budget struct {
	since      time.Time // when the current second began
	passed     int       // in the current second
	suppressed int       // since one passed
}

// allow decides on a record and returns how many were suppressed before it.
func (l *limiter) allow(message string, now time.Time) (suppressed int, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	b := l.messages[message]
	if b == nil {
		if len(l.messages) >= maxLimitKeys {
			message = ""
		}
		if b = l.messages[message]; b == nil {
			b = &budget{since: now}
			l.messages[message] = b
		}
	}
	if d := now.Sub(b.since); d >= time.Second || d < 0 {
		b.since, b.passed = now, 0
	}
	if b.passed >= l.opts.PerSec {
		b.suppressed++
		return 0, false
	}
	b.passed++
	suppressed, b.suppressed = b.suppressed, 0
	return suppressed, true
}

func (h *limitHandler) Enabled(ctx context.Context, level slog.Level) bool {
	return h.inner.Enabled(ctx, level)
}

func (h *limitHandler) Handle(ctx context.Context, r slog.Record) error {
	suppressed, ok := h.shared.allow(r.Message, r.Time)
	if !ok {
		if h.shared.opts.Dropped != nil {
			h.shared.opts.Dropped(1)
		}
		return nil
	}
	if suppressed > 0 {
		r = r.Clone()
		r.AddAttrs(slog.Int("suppressed", suppressed))
	}
	return h.inner.Handle(ctx, r)
}

func (h *limitHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &limitHandler{inner: h.inner.WithAttrs(attrs), shared: h.shared}
}

func (h *limitHandler) WithGroup(name string) slog.Handler {
	return &limitHandler{inner: h.inner.WithGroup(name), shared: h.shared}
}
