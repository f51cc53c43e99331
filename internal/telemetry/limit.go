package telemetry

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// maxLimitKeys limits the number of messages with a budget of their own. All further messages share one budget. It also
// limits the number of causes.
const maxLimitKeys = 256

// LimitOptions describe a rate limit on log messages.
type LimitOptions struct {
	// Lines is the number of records of one message that pass in each period of Every; 0 stands for 5.
	Lines int
	// Every is the period; 0 stands for a second.
	Every time.Duration
	// Cause tells what a record is due to, if it comes again and again as long as that lasts; otherwise it returns "".
	// One record of each cause passes in each period of CauseEvery. Nil: none is looked at.
	Cause      func(r *slog.Record) string
	CauseEvery time.Duration
	// Dropped is called with the number of suppressed records; it may be nil.
	Dropped func(n int)
}

// LimitHandler returns a handler that passes on at most o.Lines records of each message in a period, and counts the
// others. The first record that passes after suppressed ones states their number in the attribute "suppressed". Periods
// are measured with the times of the records.
//
// The handler is for events that hosts or failing drives can cause without limit. A message must be a constant string;
// attributes describe the individual event.
func LimitHandler(inner slog.Handler, o LimitOptions) slog.Handler {
	if o.Lines <= 0 {
		o.Lines = 5
	}
	if o.Every <= 0 {
		o.Every = time.Second
	}
	return &limitHandler{inner: inner, shared: &limiter{opts: o, messages: map[string]*budget{},
		causes: map[string]*budget{}}}
}

type limitHandler struct {
	inner  slog.Handler
	shared *limiter
}

type limiter struct {
	opts LimitOptions
	// mu guards messages and causes.
	mu               sync.Mutex
	messages, causes map[string]*budget
}

// budget is the remaining budget of one message.
type budget struct {
	since      time.Time // when the current period began
	passed     int       // in the current period
	suppressed int       // since the last record that passed
}

// isNews decides whether a record of a cause passes, as far as that is concerned. It returns the number of records
// suppressed before it.
func (l *limiter) isNews(cause string, now time.Time) (suppressed int, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	b := l.causes[cause]
	if b != nil && now.Sub(b.since) >= 0 && now.Sub(b.since) < l.opts.CauseEvery {
		b.suppressed++
		return 0, false
	}
	if b == nil && len(l.causes) >= maxLimitKeys {
		for c, o := range l.causes {
			if now.Sub(o.since) >= l.opts.CauseEvery {
				delete(l.causes, c)
			}
		}
		if len(l.causes) >= maxLimitKeys {
			return 0, true // its message has a budget still
		}
	}
	if b != nil {
		suppressed = b.suppressed
	}
	l.causes[cause] = &budget{since: now}
	return suppressed, true
}

// allow decides whether a record passes. It returns the number of records suppressed before it.
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
	if d := now.Sub(b.since); d >= l.opts.Every || d < 0 {
		b.since, b.passed = now, 0
	}
	if b.passed >= l.opts.Lines {
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
	before, ok := 0, true
	if o := &h.shared.opts; o.Cause != nil {
		if cause := o.Cause(&r); cause != "" {
			before, ok = h.shared.isNews(cause, r.Time)
		}
	}
	suppressed := 0
	if ok {
		suppressed, ok = h.shared.allow(r.Message, r.Time)
	}
	if !ok {
		if h.shared.opts.Dropped != nil {
			h.shared.opts.Dropped(1)
		}
		return nil
	}
	if suppressed += before; suppressed > 0 {
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
